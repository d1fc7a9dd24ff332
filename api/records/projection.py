"""The row and the sample that history keeps of an object's status. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from busbar.api.database.types import storable
from busbar.kube.types import ModelService, TrainingJob
from busbar.kube.types.lost_work import LostWork, LostWorkCaused
from busbar.kube.types.meta import ANNOTATION_REQUESTER
from busbar.kube.types.service_status import ModelServiceStatus
from busbar.kube.types.training_status import Admission, Progress, TrainingJobStatus, Usage

MOST = 2**31 - 1
"""Largest count that is stored. A job reports its own counts; one that exceeds its column would make the
whole write fail."""

Kept = TrainingJob | ModelService
"""The kinds that history keeps."""


@dataclass(frozen=True)
class Sample:
    """One point of a job's curves."""

    attempt: int
    step: int
    loss: float | None
    tokens_per_second: float | None
    ready_replicas: int | None
    mark: int = field(compare=False)
    """Identifies a point within an attempt, equally for all replicas: the step of a job, the resource version
    of a service."""


def row_of(obj: Kept, tenant: str, now: datetime) -> dict[str, Any]:
    """The columns of `jobs` for an object: the totals of its status, never sums of our own. A status written
    while the API was down is simply newer."""
    meta, status = obj.metadata, obj.status
    usage = (status.usage if status is not None else None) or Usage()
    phase = status.phase if status is not None else None
    return {
        "uid": meta.uid,
        "kind": obj.kind,
        "namespace": meta.namespace or "",
        "name": meta.name,
        "tenant": tenant,
        "requester": storable(meta.annotations.get(ANNOTATION_REQUESTER), 253),
        "phase": storable(phase.value if phase is not None else "Pending", 32),
        "reason": storable(status.reason if status is not None else None, 128),
        "message": storable(status.message if status is not None else None, 4096),
        "restarts": _count(status.restarts if status is not None else None),
        "accelerator_seconds": _amount(usage.accelerator_seconds),
        "work_units": _amount(usage.work_units),
        "energy_joules": _amount(usage.energy_joules),
        "cost": _amount(usage.cost),
        "created_at": meta.creation_timestamp or now,
        "deleted_at": None,
        "seen_at": now,
        **(_of_job(obj.status) if isinstance(obj, TrainingJob) else _of_service(obj.status)),
    }


def _of_job(found: TrainingJobStatus | None) -> dict[str, Any]:
    status = found or TrainingJobStatus()
    lost, progress = status.lost_work or LostWork(), status.progress or Progress()
    admission: Admission | None = status.admission
    return {
        "pool": storable(admission.pool if admission is not None else "", 253),
        "mode": storable(admission.mode if admission is not None else None, 64),
        "attempt": _count(status.attempt),
        "preemptions": _count(status.preemptions),
        "step": _count(progress.step),
        "lost_steps": _count(lost.steps),
        "lost_seconds": _amount(lost.seconds),
        "caused_seconds": 0.0,
        "caused_cost": 0.0,
        "started_at": status.start_time,
        "completed_at": status.completion_time,
    }


def _of_service(found: ModelServiceStatus | None) -> dict[str, Any]:
    pools = (found.pools if found is not None else None) or ()
    caused = (found.lost_work_caused if found is not None else None) or LostWorkCaused()
    return {
        "pool": storable(pools[0].pool if pools else "", 253),
        "mode": "",
        "attempt": 0,
        "preemptions": 0,
        "step": 0,
        "lost_steps": 0,
        "lost_seconds": 0.0,
        "caused_seconds": _amount(caused.accelerator_seconds),
        "caused_cost": _amount(caused.cost),
        "started_at": None,
        "completed_at": None,
    }


def sample_of(obj: Kept) -> Sample | None:
    """The point that an object's status adds to its curves; None when it reports nothing measurable."""
    if isinstance(obj, ModelService):
        ready = obj.status.ready_replicas if obj.status is not None else None
        version = obj.metadata.resource_version or ""
        mark = int(version) if version.isdigit() else 0
        return Sample(0, 0, None, None, _count(ready), mark=mark) if ready is not None else None
    status = obj.status or TrainingJobStatus()
    progress = status.progress
    if progress is None or not progress.step:
        return None
    return Sample(
        attempt=_count(status.attempt),
        step=_count(progress.step),
        loss=_finite(progress.loss),
        tokens_per_second=_finite(progress.tokens_per_second),
        ready_replicas=None,
        mark=_count(progress.step),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _amount(value: float | None) -> float:
    return _finite(value) or 0.0


def _count(value: int | None) -> int:
    return min(MOST, value or 0)
