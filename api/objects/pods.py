"""An object's pods: their ranks, their logs as a stream, and the events of all of them.

An object that was deleted may leave pods and events behind while another of its name is there already: what names
another uid is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from busbar.api.access.authorization import LOOK_AGAIN_S, Authorizer
from busbar.api.access.identity import Caller
from busbar.api.errors import ApiError, Conflict, Forbidden, NotFound, Unauthenticated
from busbar.api.kubernetes.client import KubeApi, Object, translated
from busbar.api.objects.events import Event, newest
from busbar.api.objects.objects import Objects
from busbar.kube.resources import EVENTS, GROUP, PODS, Resource

FIRST_WORD_S = 2.0
"""How long following a log waits for the first line before the answer begins without it."""


@dataclass(frozen=True)
class PodRank:
    """One pod of an object."""

    name: str
    rank: int
    attempt: int
    phase: str


class Pods:
    """Reads pods, logs and events for callers."""

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
        """The log of one rank of the newest (or the given) attempt. When following, the answer begins after
        `FIRST_WORD_S` even if the pod has written nothing: only then can the server notice that the client
        has left.

        Raises:
            NotFound: no such object, or it has no pod of that rank.
            Conflict: the pod has not started yet.
        """
        await self.require_log(caller, resource, namespace, name)
        uid = await self._objects.exists(caller, resource, namespace, name)
        pod = await self._pod(resource, namespace, name, uid, rank, attempt)
        params = {"follow": "true" if follow else "false"}
        if tail is not None:
            params["tailLines"] = str(tail)
        if pod.phase == "Pending":
            raise Conflict(f"pod {pod.name} has not started yet; its log begins when it does")
        stream = self._kube.log(namespace, pod.name, params=params)
        with translated(f"log of {pod.name}"):
            return await _begun(stream, FIRST_WORD_S if follow else None)

    async def require_log(self, caller: Caller, resource: Resource, namespace: str, name: str) -> None:
        """Raises Forbidden or NotFound for a caller who may not read the object's log."""
        await self._authorizer.require(
            caller, "get", PODS, namespace, subresource="log", name=name, subject_of=resource
        )

    async def ranks(self, caller: Caller, resource: Resource, namespace: str, name: str) -> list[PodRank]:
        """Pods of an object, newest attempt first. Raises NotFound."""
        uid = await self._objects.exists(caller, resource, namespace, name)
        return [_pod_rank(pod) for pod in await self._all(resource, namespace, name, uid)]

    async def events(self, caller: Caller, resource: Resource, namespace: str, name: str) -> list[Event]:
        """Events of the object and of its pods, newest first."""
        await self._authorizer.require(caller, "list", EVENTS, namespace, name=name, subject_of=resource)
        uid = await self._objects.exists(caller, resource, namespace, name)
        with translated(f"events of {namespace}/{name}"):
            found, _ = await self._kube.list(
                EVENTS,
                namespace,
                field_selector=f"involvedObject.kind={resource.kind},involvedObject.name={name}",
            )
        own = _about(found, uid)
        pods = {pod["metadata"]["name"]: pod for pod in await self._all(resource, namespace, name, uid)}
        for pod in sorted(pods)[:16]:
            with translated(f"events of {namespace}/{name}"):
                more, _ = await self._kube.list(
                    EVENTS, namespace, field_selector=f"involvedObject.kind=Pod,involvedObject.name={pod}"
                )
            own += _about(more, pods[pod]["metadata"]["uid"])
        return newest(own)

    async def _all(self, resource: Resource, namespace: str, name: str, uid: str) -> list[Object]:
        selector = f"{GROUP}/job={name},{GROUP}/kind={resource.kind.lower()}"
        with translated(f"pods of {namespace}/{name}"):
            found, _ = await self._kube.list(PODS, namespace, label_selector=selector)
        pods = [pod for pod in found if _belongs_to(pod, uid)]
        pods.sort(
            key=lambda pod: (-_number(pod, "attempt"), _number(pod, "rank"), -_number(pod, "replacement"))
        )
        return pods

    async def _pod(
        self, resource: Resource, namespace: str, name: str, uid: str, rank: int, attempt: int | None
    ) -> PodRank:
        pods = [_pod_rank(pod) for pod in await self._all(resource, namespace, name, uid)]
        for pod in pods:
            if pod.rank == rank and attempt in (None, pod.attempt):
                return pod
        if not pods:
            raise NotFound(f"{resource.kind} {namespace}/{name} has no pods yet, so there is no log")
        raise NotFound(f"{resource.kind} {namespace}/{name} has no pod of rank {rank}")


async def while_allowed(
    log: AsyncGenerator[bytes], look: Callable[[], Awaitable[object]]
) -> AsyncGenerator[bytes]:
    """The log, for as long as its reader may read it; then a line that says why it ends.

    Args:
        look: raises ApiError when the reader may not; called before a chunk, once in `LOOK_AGAIN_S`.
    """
    looked_at = time.monotonic()
    try:
        async for chunk in log:
            if time.monotonic() - looked_at >= LOOK_AGAIN_S:
                looked_at = time.monotonic()
                try:
                    await look()
                except (Unauthenticated, Forbidden, NotFound) as error:
                    yield f"\n[busbar: you may not read on: {error.message}]\n".encode()
                    return
                except ApiError:
                    pass  # it is not known now; it is asked again
            yield chunk
    finally:
        await log.aclose()


async def _begun(stream: AsyncGenerator[bytes], patience_s: float | None) -> AsyncGenerator[bytes]:
    """The stream after its first chunk, or after a while without one. An error before the first chunk is
    raised here."""
    first = asyncio.create_task(_first(stream))
    begun = _chain(first, stream)
    await anext(begun)  # from here on, closing or dropping it also ends the task and the stream
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


def _belongs_to(pod: Object, uid: str) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return not owners or any(owner.get("uid") == uid for owner in owners)


def _about(events: list[Object], uid: str) -> list[Object]:
    return [event for event in events if (event.get("involvedObject") or {}).get("uid", uid) in ("", uid)]


def _pod_rank(pod: Object) -> PodRank:
    return PodRank(
        name=pod["metadata"]["name"],
        rank=_number(pod, "rank"),
        attempt=_number(pod, "attempt"),
        phase=(pod.get("status") or {}).get("phase", "Unknown"),
    )


def _number(pod: Object, label: str) -> int:
    try:
        return int((pod["metadata"].get("labels") or {}).get(f"{GROUP}/{label}", 0))
    except ValueError:
        return 0
