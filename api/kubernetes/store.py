"""The API's live view of our kinds: one watch each, objects as the models of `busbar.kube.types`.

Lists, pages and the history projection read from here; single objects are read from the API server. The
answers to our own writes are put in at once (`observe`), so that people see what they just did. Each version
of an object is parsed once, when the watch delivers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from busbar.api.errors import Unavailable
from busbar.api.kubernetes.client import KubeApi, Object
from busbar.api.kubernetes.typed import M, read, tidy
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
from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile, Tenant, TrainingJob
from busbar.kube.types.meta import Resource as Model

Change = Callable[[Key, Model | None, Model | None], None]
"""The key, the previous object (None when it is new) and the current one (None when it was deleted)."""

WATCHED: dict[Resource, type[Model]] = {
    TRAINING_JOBS: TrainingJob,
    MODEL_SERVICES: ModelService,
    ACCELERATOR_POOLS: AcceleratorPool,
    TENANTS: Tenant,
    PERFORMANCE_PROFILES: PerformanceProfile,
}


class Store:
    """Objects by kind and key. `subscribe` before `start`; callbacks run in the watching task and must be quick."""

    def __init__(self, kube: KubeApi, *, backoff_s: tuple[float, float] = (0.2, 30.0)) -> None:
        self._subscribers: list[Change] = []
        self._tasks: list[asyncio.Task[None]] = []
        # The informer needs only `list` and `watch` of the client, which KubeApi has.
        client = cast(KubeClient, kube)
        self._informers = {
            resource.plural: Informer[Model](
                client, resource, _project(model), self._tell, backoff_s=backoff_s
            )
            for resource, model in WATCHED.items()
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

    def all(self, kind: type[M]) -> list[M]:
        """Every object of a kind. Unavailable until the first list is complete."""
        return cast(list[M], list(self._complete(kind).items.values()))

    def find(self, kind: type[M], name: str, namespace: str = "") -> M | None:
        """One object of a kind; None when there is none. Unavailable until the first list is complete."""
        return cast(M | None, self._complete(kind).items.get(Key(namespace, name)))

    def observe(self, resource: Resource, obj: Object) -> None:
        """Take what the API server answered to a write of ours, if the watch has brought nothing newer."""
        self._informers[resource.plural].observe(obj)

    def _complete(self, kind: type[Model]) -> Informer[Model]:
        informer = self._informers[kind.info.plural]
        if not informer.synced.is_set():
            raise Unavailable("the list is not complete yet: waiting for Kubernetes", retry_after_s=2)
        return informer

    def _tell(self, key: Key, old: Model | None, new: Model | None) -> None:
        for subscriber in self._subscribers:
            subscriber(key, old, new)


def _project(kind: type[M]) -> Callable[[Object], M | None]:
    def project(obj: Object) -> M | None:
        return read(kind, tidy(obj))

    return project
