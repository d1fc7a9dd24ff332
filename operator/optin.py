"""Pods and Jobs of other controllers that a tenant opted in by a label, so that nobody rewrites manifests.

An admission policy gives such a pod our scheduling gate when it is created. From then on it is a job of one pod:
it waits in the same queue, and when the plan starts it, it is pinned to the node chosen and its gate is lifted.
The ungated, pinned pod is the record of that admission; nothing else is stored. A ``batch/v1`` Job that was
created suspended is let go at once, because each of its pods is held by its own gate.
"""

from __future__ import annotations

from busbar.kube.resources import JOBS
from busbar.operator.actions import LetGo, Patch
from busbar.operator.orders import Admit
from busbar.operator.pods import HOSTNAME, Node, Pod
from busbar.operator.world import BatchJobSeen


def is_claim(pod: Pod) -> bool:
    """Whether the pod queues with us: opted in, not of our own kinds, and gated now or admitted by us before."""
    return pod.queued and not pod.kind and (pod.gated or bool(pod.pinned and pod.admission))


def admit_pod(pod: Pod, order: Admit, node: Node | None) -> LetGo | None:
    """The write that lets a gated pod go where the plan says; None when it is already on its way."""
    if not pod.gated or pod.deleting or pod.ended:
        return None
    name = order.placement.nodes[0]
    host = dict(node.labels).get(HOSTNAME, name) if node is not None else name
    return LetGo(pod.key, pod.uid, pod.gate_index, host, f"{pod.uid[:8]}-1", bool(pod.node_selector))


def release_job(job: BatchJobSeen, in_tenant: bool) -> Patch | None:
    """Un-suspends an opted-in Job of a tenant's namespace; its pods are born with our gate."""
    if not in_tenant or job.finished or not job.suspended:
        return None
    return Patch(JOBS, job.key, {"spec": {"suspend": False}}, uid=job.uid)
