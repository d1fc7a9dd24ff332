"""Writes everything that the operator writes: statuses, children, gates.

``write_status`` is the only way a status changes: it sends the difference under the resourceVersion the decision
was made on, and on success emits the event and the metric. ``carry_out`` does a reconcile's actions:
neighbouring actions of one kind in parallel, different kinds in the order given. Both put the server's answer
into the caches at once, so that the next reconcile sees it without waiting for the watch. Every write has a place
in a lane (``lanes.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from itertools import groupby
from typing import Any

from busbar.kube.client import JSON_PATCH, KubeClient, Object, Preconditions
from busbar.kube.errors import AlreadyExists, ApiError, Conflict, ConnectionFailed, Invalid, NotFound
from busbar.kube.informer import Cache, Key
from busbar.kube.resources import NODES, PODS, Resource
from busbar.kube.types import TrainingPhase
from busbar.kube.types.meta import LABEL_ADMISSION_ID, SCHEDULING_GATE
from busbar.kube.types.meta import Resource as Model
from busbar.kube.types.training_status import TERMINAL_PHASES
from busbar.operator.errors import LaneFull
from busbar.operator.metrics import Metrics
from busbar.operator.watch.projections import HOSTNAME
from busbar.operator.write.actions import (
    Action,
    Apply,
    Create,
    Delete,
    LiftGate,
    Patch,
    PinAndUngate,
    PostToPod,
    TaintNode,
)
from busbar.operator.write.events import EventQueue, Notice
from busbar.operator.write.lanes import Lane, Lanes
from busbar.scheduler.power import DomainFault

FIELD_MANAGER = "busbar-operator"
TOLD_PHASES = frozenset({TrainingPhase.QUEUED, TrainingPhase.STARTING, TrainingPhase.RUNNING})
"""Phases that only say what has happened; a later status says it as well where such a one finds no place in time."""
_WARNINGS = frozenset(
    {
        "Failed",
        "Retrying",
        "RetryLimitReached",
        "GangIncomplete",
        "PodReplaced",
        "NodeLost",
        "PlanExceeded",
        "PlanRefused",
        "PodsRefused",
        "BudgetWarning",
        "BudgetSpent",
        "PodStuck",
        "ForeignPods",
        "ReplicaReplaced",
        "ReplicaUnanswered",
        "ReplicaCrashed",
        "DeadlineExceeded",
        "DeadlineLate",
        "DeadlineMissed",
        "DeadlineNotPromised",
        "SlowPod",
        "SlowDisk",
        "SlowLink",
        "SpeedQuarantined",
        *DomainFault,
        "OverBudget",
        "FloorAboveBudget",
        "WorkStopped",
        "NodesSilent",
    }
)


class Writer:
    """Limited by the lanes; the client's guard checks the lease before each write."""

    def __init__(
        self,
        client: KubeClient,
        metrics: Metrics,
        events: EventQueue,
        caches: Mapping[str, Cache[Any]],
        post: Callable[[PostToPod], None],
        lanes: Lanes,
    ) -> None:
        self._lanes = lanes
        self._client, self._metrics, self._events = client, metrics, events
        self._caches = caches  # by kind
        self._post_to_pod = post

    async def write_status(
        self, resource: Resource, obj: Model, new: Any, *, acts: bool = False, waits: bool = False
    ) -> None:
        """Writes ``new`` as the object's status.

        ``acts``: actions follow, so it goes with what starts and stops jobs whatever it says. ``waits``: a status that
        only tells something waits for its place.

        Raises:
            Conflict: the object changed meanwhile.
            LaneFull: it only tells something, does not wait, and there is no place.
        """
        old_status = getattr(obj, "status", None)
        old = old_status.to_wire() if old_status is not None else {}
        wire = new.to_wire()
        difference = merge_difference(old, wire)
        if not difference:
            return
        meta = obj.metadata
        patch = {"metadata": {"resourceVersion": meta.resource_version}, "status": difference}
        lane = min(lane_of(old, wire), Lane.ACT if acts else Lane.TELL)
        if lane is Lane.TELL and not waits and not self._lanes.has_room(lane):
            raise LaneFull(f"{resource.kind} {meta.name}: there is no place for its status")
        sent = self._client.patch(resource, meta.name, patch, meta.namespace, subresource="status")
        try:
            answer = await self._counted("status", resource, sent, lane)
        except NotFound:
            self._forget(resource, Key(meta.namespace or "", meta.name))
            raise
        self._observe(resource, answer)
        self._announce(resource, obj, old, wire)

    def _announce(self, resource: Resource, obj: Model, old: dict[str, Any], new: dict[str, Any]) -> None:
        before = _announced(old)
        phase, reason, message = _announced(new)
        if (phase, reason) == before[:2] or not reason:
            return
        self._metrics.transitions.labels(resource.kind, phase, reason).inc()
        self.notice(resource, obj, reason, message or phase, transition=True)

    def notice(
        self, resource: Resource, obj: Model, reason: str, message: str, *, transition: bool = False
    ) -> None:
        """An event about an object that is no status change."""
        meta = obj.metadata
        self._events.put(
            Notice(
                api_version=resource.api_version,
                kind=resource.kind,
                namespace=meta.namespace or "",
                name=meta.name,
                uid=meta.uid,
                reason=reason,
                message=message,
                warning=reason in _WARNINGS,
                transition=transition,
            )
        )

    def put_notice(self, notice: Notice) -> None:
        """An event about any object."""
        self._events.put(notice)

    async def carry_out(self, actions: tuple[Action, ...]) -> None:
        """Does the actions; the first error is raised after the actions beside it have ended."""
        for _, group in groupby(actions, key=_kind_of):
            results = await asyncio.gather(*(self._do(a) for a in group), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    async def _do(self, action: Action) -> None:
        if isinstance(action, PostToPod):
            self._post_to_pod(action)
        elif isinstance(action, Create):
            await self._create(action)
        elif isinstance(action, Delete):
            await self._delete(action)
        elif isinstance(action, LiftGate):
            await self._lift(action)
        elif isinstance(action, PinAndUngate):
            await self._pin_and_ungate(action)
        elif isinstance(action, Patch):
            await self._patch(action)
        elif isinstance(action, TaintNode):
            await self._taint(action)
        else:
            applied = self._client.apply(action.resource, action.body, manager=FIELD_MANAGER, force=True)
            self._observe(action.resource, await self._counted("apply", action.resource, applied))

    async def _create(self, action: Create) -> None:
        made = self._client.create(action.resource, action.body, action.key.namespace or None)
        try:
            self._observe(action.resource, await self._counted("create", action.resource, made))
        except AlreadyExists:
            # Made before a restart, or the watch is late: the next reconcile will see which. A pod's admission may have
            # been sent twice, and is settled now.
            if action.resource is PODS:
                await self._refresh(PODS, action.key)

    async def _delete(self, action: Delete) -> None:
        gone = self._client.delete(
            action.resource,
            action.key.name,
            action.key.namespace or None,
            grace_s=action.grace_s,
            propagation=action.propagation,
            preconditions=Preconditions(uid=action.uid),
        )
        try:
            answer = await self._counted("delete", action.resource, gone)
        except NotFound:
            self._forget(action.resource, action.key)
            return
        except Conflict:
            return  # another object with this name: not the one that was meant
        meta = answer.get("metadata") or {}
        if meta.get("deletionTimestamp") and meta.get("deletionGracePeriodSeconds"):
            self._observe(action.resource, answer)

    async def _lift(self, action: LiftGate) -> None:
        await self._json_patch(PODS, action.key, _lift_patch(action.uid, action.gate_index))

    async def _taint(self, action: TaintNode) -> None:
        sent = self._client.patch(NODES, action.key.name, action.patch, kind=JSON_PATCH)
        with contextlib.suppress(
            NotFound, Invalid
        ):  # another one's taints came or went; the watch says which
            self._observe(NODES, await self._counted("patch", NODES, sent))

    async def _pin_and_ungate(self, action: PinAndUngate) -> None:
        """A gated pod may have its node selector narrowed; both happen in one write, or neither."""
        host: dict[str, Any] = {
            "op": "add",
            "path": "/spec/nodeSelector/kubernetes.io~1hostname",
            "value": action.hostname,
        }
        if not action.has_selector:
            host = {"op": "add", "path": "/spec/nodeSelector", "value": {HOSTNAME: action.hostname}}
        label = LABEL_ADMISSION_ID.replace("/", "~1")
        mark = {"op": "add", "path": f"/metadata/labels/{label}", "value": action.admission}
        lift = _lift_patch(action.uid, action.gate_index)
        await self._json_patch(PODS, action.key, [*lift[:2], host, mark, lift[2]])

    async def _patch(self, action: Patch) -> None:
        patch = dict(action.patch)
        if action.uid:
            patch["metadata"] = {**patch.get("metadata", {}), "uid": action.uid}
        sent = self._client.patch(action.resource, action.key.name, patch, action.key.namespace or None)
        try:
            self._observe(action.resource, await self._counted("patch", action.resource, sent))
        except NotFound:
            self._forget(action.resource, action.key)

    async def _json_patch(self, resource: Resource, key: Key, patch: list[dict[str, Any]]) -> None:
        sent = self._client.patch(resource, key.name, patch, key.namespace, kind=JSON_PATCH)
        try:
            self._observe(resource, await self._counted("patch", resource, sent))
        except NotFound:
            self._forget(resource, key)
        except Invalid:
            # A test failed: the pod has changed (often the gate is gone already). Read it again.
            await self._refresh(resource, key)

    async def _refresh(self, resource: Resource, key: Key) -> None:
        try:
            self._observe(resource, await self._client.get(resource, key.name, key.namespace or None))
        except NotFound:
            self._forget(resource, key)

    async def _counted(
        self, verb: str, resource: Resource, call: Coroutine[Any, Any, Object], lane: Lane = Lane.ACT
    ) -> Object:
        result = "ok"
        try:
            async with self._lanes.place(lane):
                return await call
        except ApiError as error:
            result = error.code
            raise
        except ConnectionFailed as error:
            result = error.code
            raise
        finally:
            call.close()  # it was not begun where no place was had
            self._metrics.writes.labels(verb, resource.plural, result).inc()

    def _observe(self, resource: Resource, answer: Object) -> None:
        cache = self._caches.get(resource.kind)
        if cache is not None and answer.get("metadata", {}).get("name"):
            cache.observe(answer)

    def _forget(self, resource: Resource, key: Key) -> None:
        cache = self._caches.get(resource.kind)
        if cache is not None:
            cache.forget(key)


def _lift_patch(uid: str, index: int) -> list[dict[str, Any]]:
    gate = f"/spec/schedulingGates/{index}"
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "test", "path": f"{gate}/name", "value": SCHEDULING_GATE},
        {"op": "remove", "path": gate},
    ]


def _kind_of(action: Action) -> tuple[str, str]:
    resource = getattr(action, "resource", None)
    return type(action).__name__, resource.plural if isinstance(resource, Resource) else ""


def _announced(status: dict[str, Any]) -> tuple[str, str, str]:
    """Phase, reason, message: of the object, or of its Ready condition where the kind has no phase."""
    if "phase" in status:
        return str(status["phase"]), str(status.get("reason") or ""), str(status.get("message") or "")
    ready = next((c for c in status.get("conditions") or () if c.get("type") == "Ready"), None)
    if ready is None:
        return "", "", ""
    return str(ready["status"]), str(ready.get("reason") or ""), str(ready.get("message") or "")


def lane_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> Lane:
    """What gives or frees a place goes first; what else starts or stops something acts; that something starts or runs,
    reasons, forecasts, counts and progress are only told."""
    if any(old.get(key) != new.get(key) for key in ("release", "desiredReplicas")):
        return Lane.PLACE
    if (old.get("admission") or {}).get("id") != (new.get("admission") or {}).get("id"):
        return Lane.PLACE
    phase = new.get("phase")
    if phase == old.get("phase") or phase in TOLD_PHASES:
        return Lane.TELL
    return Lane.PLACE if phase in TERMINAL_PHASES else Lane.ACT


def merge_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) that turns ``old`` into ``new``; empty when they are equal."""
    patch: dict[str, Any] = {}
    for key, value in new.items():
        was = old.get(key)
        if was == value:
            continue
        if isinstance(value, dict) and isinstance(was, dict):
            inner = merge_difference(was, value)
            if inner:
                patch[key] = inner
        else:
            patch[key] = value
    for key in old:
        if key not in new:
            patch[key] = None
    return patch


__all__ = ["FIELD_MANAGER", "Apply", "Writer", "merge_difference"]
