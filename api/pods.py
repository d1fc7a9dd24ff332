"""What a job's pods say: logs as a stream, and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from busbar.api.authorization import Authorizer
from busbar.api.errors import Conflict, NotFound
from busbar.api.identity import Caller
from busbar.api.kubernetes import KubeApi, Object, translated
from busbar.api.objects import Objects
from busbar.kube.resources import EVENTS, GROUP, PODS, Resource

MAX_EVENTS = 200
FIRST_WORD_S = 2.0
"""How long a follower waits for the first line before the answer begins without it."""


class Pods:
    """Logs and events, for callers."""

    def __init__(self, kube: KubeApi, objects: Objects, authorizer: Authorizer) -> None:
        self._kube = kube
        self._objects = objects
        self._authorizer = authorizer

    async def logs(
        self,
        caller: Caller,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        rank: int = 0,
        follow: bool = False,
        tail: int | None = None,
        attempt: int | None = None,
    ) -> AsyncGenerator[bytes]:
        """The log of one rank of the newest (or the given) attempt. One that is followed is returned before its
        pod has said anything, if that takes long: only then is the caller's leaving noticed.

        Raises:
            NotFound: no such object, or it has no pod of that rank.
            Conflict: the pod has not started yet.
        """
        await self._authorizer.require(
            caller, "get", PODS, namespace, subresource="log", name=name, subject_of=resource
        )
        await self._objects.get(caller, resource, namespace, name)
        pod = await self._pod(resource, namespace, name, rank, attempt)
        params = {"follow": "true" if follow else "false"}
        if tail is not None:
            params["tailLines"] = str(tail)
        if (pod.get("status") or {}).get("phase") == "Pending":
            raise Conflict(f"pod {pod['metadata']['name']} has not started yet; its log begins when it does")
        stream = self._kube.log(namespace, pod["metadata"]["name"], params=params)
        with translated(f"log of {pod['metadata']['name']}"):
            return await _begun(stream, FIRST_WORD_S if follow else None)

    async def ranks(self, caller: Caller, resource: Resource, namespace: str, name: str) -> list[Object]:
        """Pods of an object, newest attempt first: name, rank, attempt, phase, restarts."""
        await self._authorizer.require(caller, "get", resource, namespace, name=name)
        pods = await self._all(resource, namespace, name)
        return [
            {
                "name": pod["metadata"]["name"],
                "rank": _number(pod, "rank"),
                "attempt": _number(pod, "attempt"),
                "phase": (pod.get("status") or {}).get("phase", "Unknown"),
                "node": (pod.get("spec") or {}).get("nodeName", ""),
            }
            for pod in pods
        ]

    async def events(self, caller: Caller, resource: Resource, namespace: str, name: str) -> list[Object]:
        """Events of the object and of its pods, newest first."""
        await self._authorizer.require(caller, "list", EVENTS, namespace, name=name, subject_of=resource)
        await self._objects.get(caller, resource, namespace, name)
        with translated(f"events of {namespace}/{name}"):
            own, _ = await self._kube.list(
                EVENTS,
                namespace,
                field_selector=f"involvedObject.kind={resource.kind},involvedObject.name={name}",
            )
        pods = {pod["metadata"]["name"] for pod in await self._all(resource, namespace, name)}
        for pod in sorted(pods)[:16]:
            with translated(f"events of {namespace}/{name}"):
                more, _ = await self._kube.list(
                    EVENTS, namespace, field_selector=f"involvedObject.kind=Pod,involvedObject.name={pod}"
                )
            own += more
        rows = [_event(event) for event in own]
        rows.sort(key=lambda row: str(row["lastSeen"] or ""), reverse=True)
        return rows[:MAX_EVENTS]

    async def _all(self, resource: Resource, namespace: str, name: str) -> list[Object]:
        selector = f"{GROUP}/job={name},{GROUP}/kind={resource.kind.lower()}"
        with translated(f"pods of {namespace}/{name}"):
            pods, _ = await self._kube.list(PODS, namespace, label_selector=selector)
        pods.sort(key=lambda pod: (-_number(pod, "attempt"), _number(pod, "rank")))
        return pods

    async def _pod(
        self, resource: Resource, namespace: str, name: str, rank: int, attempt: int | None
    ) -> Object:
        pods = await self._all(resource, namespace, name)
        for pod in pods:
            if _number(pod, "rank") == rank and attempt in (None, _number(pod, "attempt")):
                return pod
        if not pods:
            raise NotFound(f"{resource.kind} {namespace}/{name} has no pods yet, so there is no log")
        raise NotFound(f"{resource.kind} {namespace}/{name} has no pod of rank {rank}")


async def _begun(stream: AsyncGenerator[bytes], patience_s: float | None) -> AsyncGenerator[bytes]:
    """The stream, once it has said something (or refused: that is raised here), or after a while."""
    first = asyncio.create_task(_first(stream))
    begun = _chain(first, stream)
    await anext(begun)  # from here on, whoever closes or drops it ends the task and the stream with it
    try:
        await asyncio.wait({first}, timeout=patience_s)
        if first.done():
            first.result()
    except BaseException:
        await begun.aclose()
        raise
    return begun


async def _first(stream: AsyncGenerator[bytes]) -> bytes:
    return await anext(stream, b"")


async def _chain(first: asyncio.Task[bytes], rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        yield b""
        if chunk := await first:
            yield chunk
        async for chunk in rest:
            yield chunk
    finally:
        first.cancel()
        await asyncio.wait({first})
        await rest.aclose()


def _number(pod: Object, label: str) -> int:
    try:
        return int((pod["metadata"].get("labels") or {}).get(f"{GROUP}/{label}", 0))
    except ValueError:
        return 0


def _event(event: Object) -> dict[str, Any]:
    return {
        "type": event.get("type", "Normal"),
        "reason": event.get("reason", ""),
        "message": event.get("message", ""),
        "object": f"{(event.get('involvedObject') or {}).get('kind', '')}/{(event.get('involvedObject') or {}).get('name', '')}",
        "count": event.get("count") or (event.get("series") or {}).get("count") or 1,
        "lastSeen": event.get("lastTimestamp")
        or (event.get("series") or {}).get("lastObservedTime")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp"),
    }
