"""Pods and Jobs of other controllers that a tenant opted in by a label, so that manifests stay as they are.

An admission policy gives such a pod our scheduling gate when it is created. From then on it is a job of one pod:
it waits in the same queue, and when the plan starts it, it is pinned to the node chosen and its gate is removed.
The ungated, pinned pod is the record of that admission; nothing else is stored. The operator may add no toleration, so
the pod brings those of its pool: without them it would be let go and never bound. A ``batch/v1`` Job that was
created suspended is unsuspended at once, because each of its pods waits at its own gate.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from datetime import datetime

from busbar.kube.resources import JOBS
from busbar.kube.types import AcceleratorPool
from busbar.kube.types.accelerator_pool import TaintEffect, TolerationOperator
from busbar.operator.decisions import Admit
from busbar.operator.pods.claims import Claim, at_its_node
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING
from busbar.operator.pools.capacities import Capacities
from busbar.operator.pools.nodes import unit_m
from busbar.operator.watch.projections import HOSTNAME, Node, Pod
from busbar.operator.watch.small_projections import BatchJobSeen
from busbar.operator.write.actions import Patch, PinAndUngate
from busbar.scheduler import Job, JobId, JobKind, Resources, Toleration


def is_claim(pod: Pod) -> bool:
    """Whether the pod is scheduled by us: opted in, not of our own kinds, and gated now or admitted by us before."""
    return pod.queued and not pod.kind and (pod.gated or bool(pod.pinned and pod.admission))


def is_unaccounted(pod: Pod, owners: Container[str], namespaces: Container[str]) -> bool:
    """Whether no job accounts for what the pod holds: it is neither ours nor opted in.

    Args:
        owners: uids of the jobs and services that exist.
        namespaces: those of tenants; there a pod of ours without its owner is charged to the tenant until it is
            deleted. Elsewhere our label proves nothing.
    """
    if pod.kind in (KIND_TRAINING, KIND_SERVICE):
        return pod.owner_uid not in owners and pod.key.namespace not in namespaces
    return not is_claim(pod)


def admit_pod(pod: Pod, decision: Admit, node: Node | None) -> PinAndUngate | None:
    """The write that admits a gated pod to the node that the plan chose; None when it was admitted before."""
    if not pod.gated or pod.deleting or pod.ended:
        return None
    name = decision.placement.nodes[0]
    host = dict(node.labels).get(HOSTNAME, name) if node is not None else name
    return PinAndUngate(pod.key, pod.uid, pod.gate_index, host, f"{pod.uid[:8]}-1", bool(pod.node_selector))


def release_job(job: BatchJobSeen, in_tenant: bool) -> Patch | None:
    """Unsuspends an opted-in Job of a tenant's namespace; its pods are created with our gate."""
    if not in_tenant or job.finished or not job.suspended:
        return None
    return Patch(JOBS, job.key, {"spec": {"suspend": False}}, uid=job.uid)


def claim(pod: Pod, tenant: str, places: Capacities, now: datetime) -> Claim | None:
    """A pod of another controller that asked to be queued: waiting while gated, running once it is not.

    An admitted pod whose node or pool is gone since is no job: no plan can help it.
    """
    devices = [(name, count) for name, count in pod.requests.devices if count]
    serving = sorted(
        (p for p in places.pools if _serves(p, devices) and not _untolerated(pod, p)),
        key=lambda p: p.metadata.name,
    )
    count_m = devices[0][1] * 1000 if devices else 0
    if not devices and serving:
        count_m = pod.requests.cpu_m * 1000 // unit_m(serving[0])
    per_pod = Resources(count_m, pod.requests.cpu_m, pod.requests.memory_mib, pod.requests.ephemeral_mib)
    job = Job(
        id=JobId(pod.uid),
        name=pod.key.name,
        namespace=pod.key.namespace,
        tenant=tenant,
        kind=JobKind.OPAQUE,
        per_pod=per_pod,
        # "-" matches no pool, so that the waiting record can say that no pool offers the device (or `lacking` why).
        pools=tuple(p.metadata.name for p in serving) or ("-",),
        node_selector=pod.node_selector,
        tolerations=tuple(Toleration(*t) for t in pod.tolerations),
        preemptible=False,
        submitted_at_s=(pod.created_at or now).timestamp(),
    )
    if pod.gated:
        return Claim(job) if not pod.deleting else None
    return at_its_node(job, pod, places, now)


def lacking(pod: Pod, tenant: str, pools: Iterable[AcceleratorPool]) -> str:
    """What to do where only a toleration keeps the pod from every pool that its tenant may use; "": nothing."""
    devices = [(name, count) for name, count in pod.requests.devices if count]
    able = [p for p in pools if _serves(p, devices) and (p.spec.tenants is None or tenant in p.spec.tenants)]
    keys = [_untolerated(pod, p) for p in sorted(able, key=lambda p: p.metadata.name)]
    if not keys or not all(keys):
        return ""
    return f"It does not tolerate the taint {keys[0]} of the nodes that it may use; add the toleration to the pod."


def _untolerated(pod: Pod, pool: AcceleratorPool) -> str:
    """Key of a taint that keeps the pod off the pool's nodes; "": none does."""
    for taint in pool.spec.tolerations or ():
        if taint.effect is TaintEffect.PREFER_NO_SCHEDULE:
            continue
        if not any(
            (effect == "" or taint.effect is None or effect == taint.effect)
            and (
                key in ("", taint.key)
                if operator == "Exists"
                else key == taint.key
                and (taint.operator is TolerationOperator.EXISTS or value == (taint.value or ""))
            )
            for key, operator, value, effect in pod.tolerations
        ):
            return taint.key
    return ""


def _serves(pool: AcceleratorPool, devices: list[tuple[str, int]]) -> bool:
    name = pool.spec.resource_name
    return name == "cpu" if not devices else len(devices) == 1 and devices[0][0] == name
