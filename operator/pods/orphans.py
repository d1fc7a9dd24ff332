"""Pods of ours whose job or service is gone, and their deletion.

Through a pod's owner reference its object finds it, counts it, stops it, and is deleted with it. A pod without a
living owner holds accelerators that nothing releases. Such pods come from a deletion with
``propagationPolicy: Orphan``, from one that somebody's finalizer blocks for ever, or from writes before the
admission policies existed.

    owner there, its uid that of the reference    not an orphan, even if our cache says otherwise
    no reference to a controller                  deleted at once
    owner gone, or another of its name            deleted after ``orphan_grace_s``, the garbage collector's time
    owner being deleted                           deleted ``orphan_grace_s`` after that began, the same

Level-triggered: checked when the pod or its owner changes, at the start, and at every resync; in the caches first,
then by a GET of the owner. Deletions name the uid. Until an orphan is gone, its resources count as used by the
tenant of its namespace (``claim``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from busbar.kube.errors import NotFound
from busbar.kube.informer import Key
from busbar.kube.resources import MODEL_SERVICES, PODS, TRAINING_JOBS, Resource
from busbar.operator.pods.claims import Claim, at_its_node
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING
from busbar.operator.pools.capacities import Capacities
from busbar.operator.pools.nodes import unit_m
from busbar.operator.settings import Settings
from busbar.operator.watch.caches import Caches
from busbar.operator.watch.projections import Pod, time_of
from busbar.operator.write.actions import Delete
from busbar.operator.write.events import Notice
from busbar.operator.write.writer import Writer
from busbar.scheduler import Job, JobId, JobKind, Resources

OWNERS: dict[str, Resource] = {KIND_TRAINING: TRAINING_JOBS, KIND_SERVICE: MODEL_SERVICES}
"""Label of a pod to the kind of its owner."""
DELETED = "OrphanDeleted"
"""Reason of the event at the pod."""


@dataclass(frozen=True)
class Owner:
    """The object that bears the name in the pod's label, as the API server has it."""

    uid: str
    deleting_since: datetime | None = None


@dataclass(frozen=True)
class Verdict:
    """What is to be done with a pod: nothing, look again, or delete it because of `why`."""

    why: str = ""
    again_s: float | None = None


def is_stray(pod: Pod, owner: Owner | None) -> bool:
    """Whether a pod of ours has no living owner of the name in its label."""
    if pod.kind not in OWNERS or not pod.job:
        return False
    return owner is None or owner.uid != pod.owner_uid or owner.deleting_since is not None


def judge(pod: Pod, owner: Owner | None, since: datetime, now: datetime, grace_s: float) -> Verdict:
    """See the module's head.

    Args:
        owner: as the API server has just said; None: there is none.
        since: when the pod was first seen as a stray.
    """
    if not is_stray(pod, owner) or pod.deleting:
        return Verdict()
    kind = OWNERS[pod.kind].kind
    if not pod.owner_uid:
        return Verdict(f"it has no owner reference, so no {kind} accounts for it")
    if owner is not None and owner.uid == pod.owner_uid and owner.deleting_since is not None:
        since = owner.deleting_since
        why = f"its {kind} {pod.job} is being deleted and something holds that up"
    else:
        why = f"its {kind} {pod.job} is gone"
    left = grace_s - (now - since) / timedelta(seconds=1)
    return Verdict(again_s=left) if left > 0 else Verdict(why)


def claim(pod: Pod, tenant: str, places: Capacities, now: datetime) -> Claim | None:
    """The orphan as a job of the tenant of its namespace; None for other pods and for those that hold nothing."""
    if not tenant or pod.kind not in OWNERS or pod.ended:
        return None
    node = places.node_of(pod)
    pool = places.pool_of(node) if node is not None else None
    if pool is None:
        return None
    requests, name = pod.requests, pool.spec.resource_name
    count_m = requests.cpu_m * 1000 // unit_m(pool) if name == "cpu" else requests.device(name) * 1000
    if not count_m:
        return None
    job = Job(
        id=JobId(pod.uid),
        name=pod.key.name,
        namespace=pod.key.namespace,
        tenant=tenant,
        kind=JobKind.OPAQUE,
        per_pod=Resources(count_m, requests.cpu_m, requests.memory_mib, requests.ephemeral_mib),
        pools=(pool.metadata.name,),
        preemptible=False,
        submitted_at_s=(pod.created_at or now).timestamp(),
    )
    return at_its_node(job, pod, places, now)


class Reaper:
    """Deletes orphans; `handle` is called for pods of our kinds."""

    def __init__(
        self,
        caches: Caches,
        writer: Writer,
        get: Callable[[Resource, str, str], Awaitable[Any]],
        settings: Settings,
    ) -> None:
        self._caches, self._writer, self._get = caches, writer, get
        self._grace_s = settings.orphan_grace_s
        self._since: dict[str, datetime] = {}
        """By pod uid: when it was first seen as a stray."""

    def is_stray(self, pod: Pod) -> bool:
        """Whether the caches say so, in namespaces where our policies protect the labels; elsewhere anybody may set them."""
        if pod.kind not in OWNERS or not self._is_guarded(pod.key.namespace):
            return False
        found = self._caches.owner(OWNERS[pod.kind].kind, Key(pod.key.namespace, pod.job))
        owner = Owner(found.metadata.uid, found.metadata.deletion_timestamp) if found is not None else None
        return is_stray(pod, owner)

    def strays(self) -> list[Key]:
        """All strays."""
        return [key for key, pod in self._caches.pods.items.items() if self.is_stray(pod)]

    async def handle(self, pod: Pod, now: datetime) -> float | None:
        """Checks one pod; returns after how many seconds it must be checked again."""
        if not self.is_stray(pod):
            self._since.pop(pod.uid, None)
            return None
        since = self._since.setdefault(pod.uid, now)
        verdict = judge(pod, await self._owner(pod), since, now, self._grace_s)
        if verdict.why:
            await self._writer.carry_out((Delete(PODS, pod.key, pod.uid),))
            text = f"This pod is deleted: {verdict.why}."
            self._writer.put_notice(
                Notice("v1", "Pod", pod.key.namespace, pod.key.name, pod.uid, DELETED, text, warning=True)
            )
        return verdict.again_s

    def forget(self, uid: str) -> None:
        """Drops what is remembered of a pod that is gone."""
        self._since.pop(uid, None)

    def _is_guarded(self, namespace: str) -> bool:
        found = self._caches.namespaces.items.get(Key("", namespace))
        return found is not None and any(key.startswith("busbar.dev/") for key, _ in found.labels)

    async def _owner(self, pod: Pod) -> Owner | None:
        """The owner as the API server has it now; a cache may be late, and leaves out objects that it cannot parse."""
        try:
            meta = (await self._get(OWNERS[pod.kind], pod.job, pod.key.namespace))["metadata"]
        except NotFound:
            return None
        return Owner(meta["uid"], time_of(meta.get("deletionTimestamp")))
