"""Measured speeds for the performance table, read back from job statuses.

Every TrainingJob with an engine keeps the speed that it last reported, and where (``status.progress``,
``status.admission``): one report each, of a run that goes on or has ended. The reports of ended runs are added up in
the PerformanceProfile of their class (observations.py), so that they outlive the jobs. A report is unverified until
its job has succeeded in one attempt and the operator's own clock agrees: steps over the time between the start of all
pods and the end. A job that is too short for that proves nothing. Tenants whose jobs fail this comparison are no
longer believed (``Conduct``). Only runs of the platform's own engine are shared between tenants
(``SpeedReport.image_verified``).

Where power limits held the job's boards, its speed is taken to be what the limits have cost it higher
(``status.power``, by the operator's own count); where they have cost much, it proves nothing of boards without them.

With the speed goes what an accelerator drew on average, where the energy ledger has charged the job: from the nodes'
meters, never from the job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from busbar.kube.types import TrainingJob
from busbar.kube.types.training_status import TERMINAL_PHASES, TrainingJobStatus, TrainingPhase
from busbar.scheduler.fit import accelerator
from busbar.scheduler.model.table import Record, accelerator_key, named_nodes
from busbar.scheduler.performance.reports import NOISE, SIGMAS, SLACK

CHECKED_FROM_S = 600.0
"""Runs shorter than this are not checked: they are mostly preparation and evaluation."""
BESIDES_S = 300.0
"""Time that a run may spend on preparation and evaluation."""
GRID = 0.05
"""Speeds and watts are read in steps of this much, relatively: a poll that says nearly the same changes nothing."""
MOST_SLOWDOWN = 1.25
"""Of a run whose speed without limits is still believed to follow from that under them."""
MOST_WATTS = 1.5
"""Times the nameplate; a job that was charged with more was not alone on its boards."""


@dataclass(frozen=True)
class SpeedReport:
    """The speed that one attempt of a job reported."""

    run: str
    """The job's uid and its attempt."""
    record: Record
    ended: datetime | None
    """None: the attempt still runs."""
    image_verified: bool
    """Whether the platform's own engine reported it, by the digest of its image (pods/engine_image.py). The report of
    another image counts for its own tenant alone, as long as the job exists."""
    agrees: bool | None
    """Whether its work and the operator's clock confirm the speed; None: they cannot."""


def speed_report(job: TrainingJob, workload_class: str, tokens: float, tenant: str) -> SpeedReport | None:
    """The speed that the job last reported; None where it has reported none.

    Args:
        tokens: of the whole run.
        tenant: the tenant of the job.
    """
    status = job.status
    if status is None or status.admission is None or status.progress is None:
        return None
    speed = status.progress.tokens_per_second
    if not speed:
        return None
    place = status.admission
    if place.started_at is None:  # the progress is still that of the attempt before, on another placement
        return None
    if place.power_cap_changed_at is not None:  # nobody knows which part of the run was under which cap
        return None
    slowdown = _slowdown(status)
    if slowdown > MOST_SLOWDOWN:
        return None
    size_m = place.pods * place.accelerators_per_pod * 1000
    record = Record(
        workload_class=workload_class,
        accelerator=accelerator_key(place.accelerator, place.link_class or ""),
        accelerators_m=size_m,
        mode=place.mode or "resident",
        power_cap=1.0 if place.power_cap_percent is None else place.power_cap_percent / 100,
        tenant=tenant,
        job=job.metadata.uid,
        reports=1,
        squares=1.0,
        log_mean=round(math.log(speed * slowdown) / GRID) * GRID,
        memory_mib=(status.memory.peak_device_mib or 0) if status.memory is not None else 0,
        watts=_watts(status, place.accelerator),
        nodes=named_nodes(size_m, len(set(place.nodes))),
    )
    ended = status.completion_time if status.phase in TERMINAL_PHASES else None
    verified = place.image is not None and place.image.verified
    return SpeedReport(
        run_of(job), record, ended, verified, _agrees(status, math.exp(record.log_mean) / slowdown, tokens)
    )


def _slowdown(status: TrainingJobStatus) -> float:
    """What limits have cost the attempt, as a factor on its time."""
    power = status.power_of_attempt
    return 1.0 if power is None else max(1.0, power.slowdown)


def _watts(status: TrainingJobStatus, kind: str) -> float:
    """What one accelerator of the job drew on average, rounded up; 0 where that is not known: nothing was measured, for
    too short a time, on several placements, or it is none that boards of this type can draw."""
    usage, place, known = status.usage, status.admission, accelerator(kind)
    if status.attempt != 1 or place is None or usage is None or not usage.energy_joules:
        return 0.0
    if usage.accelerator_seconds < CHECKED_FROM_S * place.pods * place.accelerators_per_pod:
        return 0.0
    watts = usage.energy_joules / usage.accelerator_seconds
    if known is not None and not known.idle_watts < watts <= MOST_WATTS * known.watts:
        return 0.0
    return round(math.exp(math.ceil(math.log(watts) / GRID) * GRID), 1)


def run_of(job: TrainingJob) -> str:
    """A unique name of an attempt of a job."""
    return f"{job.metadata.uid}-{(job.status.attempt if job.status is not None else None) or 0}"


def has_reported(status: TrainingJobStatus) -> bool:
    """Whether the job has ever reported a speed."""
    return status.admission is not None and bool(status.progress and status.progress.tokens_per_second)


def _agrees(status: TrainingJobStatus, speed: float, tokens: float) -> bool | None:
    """Whether the operator's clock confirms the speed; None where it cannot."""
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
