"""From an object's status to the row and the sample that history keeps of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from busbar.api.clock import parse_time
from busbar.api.database.types import storable
from busbar.api.kubernetes import Object
from busbar.kube.informer import version_of
from busbar.kube.types.meta import ANNOTATION_REQUESTER

MOST = 2**31 - 1
"""Counts are kept up to here: what a job says of itself must fit into every column, or nobody's row is written."""


@dataclass(frozen=True)
class Sample:
    """One point of a job's curves."""

    attempt: int
    step: int
    loss: float | None
    tokens_per_second: float | None
    ready_replicas: int | None
    mark: int = field(compare=False)
    """Tells points of one attempt apart, the same for everybody who sees them: the step of a job, the version
    of a service."""


def row_of(obj: Object, tenant: str, now: datetime) -> dict[str, Any]:
    """The columns of `jobs` for an object: the totals of its status, never our own sums. A status that was
    written while we were away is simply the newer truth."""
    meta, status = obj["metadata"], obj.get("status") or {}
    admission, progress = status.get("admission") or {}, status.get("progress") or {}
    usage, lost = status.get("usage") or {}, status.get("lostWork") or {}
    pools = status.get("pools") or []
    return {
        "uid": meta["uid"],
        "kind": obj["kind"],
        "namespace": meta["namespace"],
        "name": meta["name"],
        "tenant": tenant,
        "requester": storable((meta.get("annotations") or {}).get(ANNOTATION_REQUESTER), 253),
        "phase": storable(status.get("phase") or "Pending", 32),
        "reason": storable(status.get("reason"), 128),
        "message": storable(status.get("message"), 4096),
        "pool": storable(admission.get("pool") or (pools[0].get("pool") if pools else ""), 253),
        "mode": storable(admission.get("mode"), 64),
        "attempt": _int(status.get("attempt")),
        "preemptions": _int(status.get("preemptions")),
        "restarts": _int(status.get("restarts")),
        "step": _int(progress.get("step")),
        "lost_steps": _int(lost.get("steps")),
        "lost_seconds": _float(lost.get("seconds")),
        "accelerator_seconds": _float(usage.get("acceleratorSeconds")),
        "work_units": _float(usage.get("workUnits")),
        "energy_joules": _float(usage.get("energyJoules")),
        "cost": _float(usage.get("cost")),
        "created_at": parse_time(meta.get("creationTimestamp")) or now,
        "started_at": parse_time(status.get("startTime")),
        "completed_at": parse_time(status.get("completionTime")),
        "deleted_at": None,
        "seen_at": now,
    }


def sample_of(obj: Object) -> Sample | None:
    """The point that an object's status adds to its curves; None when it says nothing measurable."""
    status = obj.get("status") or {}
    progress = status.get("progress") or {}
    if obj["kind"] == "ModelService":
        if status.get("readyReplicas") is None:
            return None
        return Sample(0, 0, None, None, _int(status.get("readyReplicas")), mark=version_of(obj))
    if not progress.get("step"):
        return None
    return Sample(
        attempt=_int(status.get("attempt")),
        step=_int(progress.get("step")),
        loss=as_number(progress.get("loss")),
        tokens_per_second=as_number(progress.get("tokensPerSecond")),
        ready_replicas=None,
        mark=_int(progress.get("step")),
    )


def as_number(value: object) -> float | None:
    """A number, also when the schema carries it as a string; not a number becomes None."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if number == number and abs(number) != float("inf") else None


def _float(value: object) -> float:
    return as_number(value) or 0.0


def _int(value: object) -> int:
    return max(-MOST, min(MOST, int(as_number(value) or 0)))
