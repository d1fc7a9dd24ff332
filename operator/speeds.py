"""Measured speeds for the performance table, read back from job statuses.

Every TrainingJob with an engine keeps the speed that it last reported, and where (``status.progress``,
``status.admission``): one report each, of a run that goes on or has ended. What ended runs said is added up in the
PerformanceProfile of their class (evidence.py), so that it outlives them. A report is the tenant's word until its job
has succeeded in one attempt and the operator's own clock agrees: steps over the time between the start of all pods
and the end. A job that is too short for that proves nothing. Jobs that fail this comparison cost their tenant its
word (``Conduct``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from busbar.kube.types import TrainingJob
from busbar.kube.types.training_job import TERMINAL_PHASES, TrainingJobStatus, TrainingPhase
from busbar.scheduler.reports import NOISE, SIGMAS, SLACK
from busbar.scheduler.table import Record

CHECKED_FROM_S = 600.0
"""Shorter runs are mostly preparing and evaluating."""
BESIDES_S = 300.0
"""What a run may spend on that."""
GRID = 0.05
"""Speeds are read in steps of this much, relatively: a poll that says nearly the same changes nothing."""


@dataclass(frozen=True)
class Said:
    """What one attempt of a job said of its speed."""

    run: str
    """The job's uid and its attempt."""
    record: Record
    ended: datetime | None
    """None: it goes on."""
    agrees: bool | None
    """Whether its work and the operator's clock confirm it; None: they cannot tell."""


def said(job: TrainingJob, workload_class: str, tokens: float, tenant: str) -> Said | None:
    """What the job last said of its speed; None where it has said nothing.

    Args:
        tokens: of the whole run.
        tenant: whose word it is.
    """
    status = job.status
    if status is None or status.admission is None or status.progress is None:
        return None
    speed = status.progress.tokens_per_second
    if not speed:
        return None
    place = status.admission
    if place.started_at is None:  # the progress is still that of the attempt before, at another place
        return None
    record = Record(
        workload_class=workload_class,
        accelerator=place.accelerator,
        accelerators_m=place.pods * place.accelerators_per_pod * 1000,
        mode=place.mode or "resident",
        tenant=tenant,
        job=job.metadata.uid,
        reports=1,
        squares=1.0,
        log_mean=round(math.log(speed) / GRID) * GRID,
    )
    ended = status.completion_time if status.phase in TERMINAL_PHASES else None
    return Said(run_of(job), record, ended, _agrees(status, math.exp(record.log_mean), tokens))


def run_of(job: TrainingJob) -> str:
    """Names an attempt of a job, once and for all."""
    return f"{job.metadata.uid}-{(job.status.attempt if job.status is not None else None) or 0}"


def has_spoken(status: TrainingJobStatus) -> bool:
    """Whether the job ever said how fast it is."""
    return status.admission is not None and bool(status.progress and status.progress.tokens_per_second)


def _agrees(status: TrainingJobStatus, speed: float, tokens: float) -> bool | None:
    """Whether the clock confirms the speed; None where it cannot tell."""
    place, ended = status.admission, status.completion_time
    if status.phase is not TrainingPhase.SUCCEEDED or status.attempt != 1 or tokens <= 0:
        return None
    if place is None or place.started_at is None or ended is None:
        return None
    seconds = (ended - place.started_at) / timedelta(seconds=1)
    if seconds < CHECKED_FROM_S:
        return None
    slack = SLACK + SIGMAS * NOISE
    return 1 - slack <= speed * seconds / tokens <= 1 + slack + speed * BESIDES_S / tokens
