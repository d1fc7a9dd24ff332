"""The place that is collected for a waiting TrainingJob: to its status and back.

The scheduler keeps reservations from plan to plan. The status is where people read them, and where a restarted
operator finds them: the job keeps its place in line and its nodes. Only what people can see is worth a write: the
place, how many of its nodes are collected, and a start that has moved.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import groupby

from busbar.kube.types import TrainingJob
from busbar.kube.types.training_status import CollectedNode, PerPod, TrainingJobStatus
from busbar.kube.types.training_status import Reservation as ReservationStatus
from busbar.operator.decisions import Reserved
from busbar.operator.training.start_forecast import moment
from busbar.operator.training.view import per_pod_of, resources_of
from busbar.scheduler import JobId, Placement, Reservation

MOVED = 0.1
"""A start is written again when it has moved by more than this part of the time that is left,"""
MOVED_S = 60.0
"""and by more than this."""


def reservation_of(obj: TrainingJob) -> Reservation | None:
    """The reservation in a job's status, as the scheduler keeps it."""
    found = obj.status.reservation if obj.status is not None else None
    if found is None or not found.nodes:
        return None
    ranks = [node for node in found.nodes for _ in range(node.pods)]
    per_pod = found.per_pod or PerPod(accelerators_m=found.accelerators_per_pod * 1000)
    return Reservation(
        job=JobId(obj.metadata.uid),
        placement=Placement(
            pool=found.pool,
            accelerator=found.accelerator,
            mode=found.mode or "resident",
            nodes=tuple(node.name for node in ranks),
            per_pod=resources_of(per_pod),
        ),
        since_s=tuple(node.since.timestamp() for node in ranks),
        start_s=found.start_by.timestamp(),
        collected=found.collected,
    )


def with_reservation(
    job: TrainingJob, status: TrainingJobStatus, decision: Reserved, now: datetime
) -> TrainingJobStatus:
    """The status of a waiting job with this reservation; the same one where it need not change."""
    if same_place(status.reservation, decision.reservation) and not moved(
        status.reservation, decision.reservation, now.timestamp()
    ):
        return status
    found = decision.reservation
    written = None if found is None else _written(found, job.spec.shape.accelerators_per_pod, now)
    return status.model_copy(update={"reservation": written})


def same_place(old: ReservationStatus | None, new: Reservation | None) -> bool:
    """Whether both have the same nodes, collected since the same time, for the same pods."""
    if old is None or new is None:
        return old is None and new is None
    place = new.placement
    return (
        (old.pool, old.accelerator, old.mode) == (place.pool, place.accelerator, place.mode)
        and old.nodes == _nodes(new)
        and old.per_pod == per_pod_of(place)
    )


def moved(old: ReservationStatus | None, new: Reservation | None, now_s: float) -> bool:
    """Whether people see another count or another start; a start that is due stays due as time goes on."""
    if old is None or new is None:
        return False
    if (old.collected, old.needed) != (new.collected, new.nodes):
        return True
    was_s, is_s = (max(at_s - now_s, 0.0) for at_s in (old.start_by.timestamp(), new.start_s))
    return abs(is_s - was_s) > max(MOVED_S, MOVED * is_s)


def _written(found: Reservation, accelerators_per_pod: int, now: datetime) -> ReservationStatus:
    place = found.placement
    return ReservationStatus(
        pool=place.pool,
        accelerator=place.accelerator,
        mode=place.mode,
        pods=place.pods,
        accelerators_per_pod=accelerators_per_pod,
        per_pod=per_pod_of(place),
        nodes=_nodes(found),
        start_by=moment(now, max(0.0, found.start_s - now.timestamp())),
        collected=found.collected,
        needed=found.nodes,
    )


def _nodes(found: Reservation) -> list[CollectedNode]:
    """The nodes in order of rank; ranks side by side on one node are one entry."""
    ranks = groupby(zip(found.placement.nodes, found.since_s, strict=True))
    return [
        CollectedNode(name=name, pods=len(list(same)), since=_at(since_s)) for (name, since_s), same in ranks
    ]


def _at(at_s: float) -> datetime:
    """The moment, in whole milliseconds, as all times of a status."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=round(at_s * 1000))
