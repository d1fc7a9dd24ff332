"""Pods that are given up with their node: nobody knows whether they still run, and nobody can stop them.

In the platform's engine a later start of a run shuts the earlier one out of its folders (`workloads/training/fence.py`). So
its jobs do not wait for such a pod: it is deleted without its node's word, which the node finds when it answers again and
ends what still runs, and the job goes on elsewhere. Jobs of own images have no such fence: they wait until a person says
that the node is dead (`PodStuck`).
"""

from __future__ import annotations

from collections.abc import Iterable

from busbar.kube.resources import PODS
from busbar.operator.pods.silent_nodes import is_given_up
from busbar.operator.training.view import JobView
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Delete


def is_lost(view: JobView, pod: Pod) -> bool:
    """Whether the pod is given up with its node, although it may still run."""
    fenced = view.job.spec.engine is not None
    return fenced and is_given_up(pod, view.silent, view.now, view.settings.node_lost_s)


def removals(view: JobView, pods: Iterable[Pod]) -> tuple[Delete, ...]:
    """Deletes `pods`: those that are not being deleted yet, and again those that only their lost node keeps."""
    return tuple(_delete(view, pod) for pod in pods if not pod.deleting or is_lost(view, pod))


def _delete(view: JobView, pod: Pod) -> Delete:
    started = pod.phase == "Running"
    grace = view.job.spec.preemption.grace_period_seconds if started else None
    return Delete(PODS, pod.key, pod.uid, 0 if is_lost(view, pod) else grace)
