"""Measured speeds for the performance table, read back from job statuses.

Every TrainingJob with an engine keeps the speed that it last reported, and where (``status.progress``,
``status.admission``): one record each, running or ended, so a restarted operator knows what the one before knew,
for as long as the jobs exist. A report is the tenant's word until its job has succeeded in one attempt and the
operator's own clock agrees: steps over the time between the start of all pods and the end. A job that is too short
for that proves nothing. Jobs that fail this comparison cost their tenant its word (``Conduct``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta

from busbar.kube.types import TrainingJob
from busbar.kube.types.training_job import TrainingJobStatus, TrainingPhase
from busbar.scheduler.reports import NOISE, SIGMAS, SLACK
from busbar.scheduler.table import Conduct, Fault, Record

CHECKED_FROM_S = 600.0
"""Shorter runs are mostly preparing and evaluating."""
BESIDES_S = 300.0
"""What a run may spend on that."""
GRID = 0.05
"""Speeds are read in steps of this much, relatively: a poll that says nearly the same changes nothing."""


def measured(
    jobs: Iterable[tuple[TrainingJob, str, float]], tenant_of: Mapping[str, str]
) -> tuple[tuple[Record, ...], tuple[Conduct, ...]]:
    """Records and the tenants' conduct.

    Args:
        jobs: each with its workload class and the tokens of the whole run; jobs without a class say nothing.
        tenant_of: namespace to tenant.
    """
    records: list[Record] = []
    conduct: dict[str, Conduct] = {}
    for job, workload_class, tokens in jobs:
        tenant = tenant_of.get(job.metadata.namespace or "", "")
        record = _record(job, workload_class, tenant)
        if record is None or job.status is None:
            continue
        agrees = _agrees(job.status, math.exp(record.log_mean), tokens)
        if agrees is not None:
            record = replace(record, verified=agrees, fault="" if agrees else Fault.COUNTERS.value)
            old = conduct.get(tenant, Conduct(tenant))
            conduct[tenant] = Conduct(tenant, old.passed + agrees, old.failed + (not agrees))
        records.append(record)
    records.sort(key=lambda record: (record.place, record.tenant, record.job))
    return tuple(records), tuple(conduct[name] for name in sorted(conduct))


def has_spoken(status: TrainingJobStatus) -> bool:
    """Whether the job ever said how fast it is."""
    return status.admission is not None and bool(status.progress and status.progress.tokens_per_second)


def _record(job: TrainingJob, workload_class: str, tenant: str) -> Record | None:
    """What the job last said of its speed, and where; None where it has not said anything."""
    status = job.status
    if status is None or status.admission is None or status.progress is None:
        return None
    speed = status.progress.tokens_per_second
    if not speed:
        return None
    place = status.admission
    return Record(
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
