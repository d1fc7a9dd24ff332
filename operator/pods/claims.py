"""What all kinds share in their translation into jobs of the scheduler's snapshot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from busbar.kube.types import quantity
from busbar.kube.types.shape import PodShape
from busbar.operator.pools.capacities import Capacities
from busbar.operator.watch.projections import Pod
from busbar.scheduler import Job, Placement, Reservation, Resources, Run


@dataclass(frozen=True)
class Claim:
    """A job of the snapshot."""

    job: Job
    pods: frozenset[str] = frozenset()
    """Uids of the pods whose resources the job's run counts, so they are not subtracted from their nodes as well."""
    reservation: Reservation | None = None
    """The place that an earlier plan collects for it, from its status."""


def per_pod(shape: PodShape) -> Resources:
    """What one pod of this shape asks for."""
    return Resources(
        accelerators_m=shape.accelerators_per_pod * 1000,
        cpu_m=quantity.to_millis(shape.cpu) if shape.cpu is not None else 0,
        memory_mib=quantity.to_mib(shape.memory),
        ephemeral_mib=quantity.to_mib(shape.ephemeral_storage),
    )


def at_its_node(job: Job, pod: Pod, places: Capacities, now: datetime) -> Claim | None:
    """The claim of one pod that is bound or pinned to a node; None where its node or pool is gone."""
    node = places.node_of(pod)
    pool = places.pool_of(node) if node is not None else None
    if node is None or pool is None:
        return None
    placement = Placement(pool.metadata.name, pool.spec.accelerator, "resident", (node.name,), job.per_pod)
    started = (pod.created_at or now).timestamp()
    run = Run(placement=placement, started_at_s=started, releasing=pod.deleting)
    return Claim(replace(job, run=run), frozenset({pod.uid}))
