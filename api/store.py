"""The API's live view of our kinds: one watch each, raw objects without `managedFields`.

Lists, pages and the history projection read from here; single objects are read from the API server. Answers
of our own writes are put in at once (`observe`), so that a person sees what they just did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

from busbar.api.errors import Unavailable
from busbar.api.kubernetes import KubeApi, Object
from busbar.kube.client import KubeClient
from busbar.kube.informer import Informer, Key
from busbar.kube.resources import (
    ACCELERATOR_POOLS,
    MODEL_SERVICES,
    PERFORMANCE_PROFILES,
    TENANTS,
    TRAINING_JOBS,
    Resource,
)

Change = Callable[[Resource, Key, Object | None, Object | None], None]

WATCHED = (TRAINING_JOBS, MODEL_SERVICES, ACCELERATOR_POOLS, TENANTS, PERFORMANCE_PROFILES)
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


class Store:
    """Objects by kind and key. `subscribe` before `start`; callbacks run in the watching task and must be quick."""

    def __init__(self, kube: KubeApi, *, backoff_s: tuple[float, float] = (0.2, 30.0)) -> None:
        self._subscribers: list[Change] = []
        self._tasks: list[asyncio.Task[None]] = []
        # The informer needs only `list` and `watch` of the client, which KubeApi has.
        client = cast(KubeClient, kube)
        self._informers = {
            resource.plural: Informer[Object](
                client, resource, _project, self._tell(resource), backoff_s=backoff_s
            )
            for resource in WATCHED
        }

    def subscribe(self, change: Change) -> None:
        self._subscribers.append(change)

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(informer.run(), name=f"watch {plural}")
            for plural, informer in self._informers.items()
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    @property
    def ready(self) -> bool:
        return all(informer.synced.is_set() for informer in self._informers.values())

    async def synced(self, timeout_s: float) -> None:
        """Wait until every kind was listed once; TimeoutError otherwise."""
        async with asyncio.timeout(timeout_s):
            for informer in self._informers.values():
                await informer.synced.wait()

    def all(self, resource: Resource) -> Iterable[Object]:
        """Every object of a kind. Unavailable until the first list is complete."""
        return self._complete(resource).items.values()

    def find(self, resource: Resource, name: str, namespace: str = "") -> Object | None:
        """One object of a kind; None when there is none. Unavailable until the first list is complete."""
        return self._complete(resource).items.get(Key(namespace, name))

    def observe(self, resource: Resource, obj: Object) -> None:
        self._informers[resource.plural].observe(obj)

    def _complete(self, resource: Resource) -> Informer[Object]:
        informer = self._informers[resource.plural]
        if not informer.synced.is_set():
            raise Unavailable("the list is not complete yet: waiting for Kubernetes", retry_after_s=2)
        return informer

    def _tell(self, resource: Resource) -> Callable[[Key, Object | None, Object | None], None]:
        def tell(key: Key, old: Object | None, new: Object | None) -> None:
            for subscriber in self._subscribers:
                subscriber(resource, key, old, new)

        return tell


def _project(obj: Object) -> Object:
    annotations = obj["metadata"].get("annotations")
    if annotations:
        annotations.pop(LAST_APPLIED, None)
    return obj
