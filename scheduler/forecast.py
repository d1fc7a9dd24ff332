"""What if I submitted this job now? A start now, or quantiles of when it would start.

The job is put into a copy of the snapshot and planned. If it waits, futures are simulated with the same
planner: every running and waiting job's remaining time is drawn from the history of finished jobs that
resemble it, given how long it has run already, and the clock jumps from completion to completion until the
job starts. Nothing is read from the truth; the same seed gives the same answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from .apply import applied
from .planner import plan
from .plans import NEVER, Action, Policy, WaitingRecord
from .types import Job, JobId, Snapshot

FUTURES = 15
"""Simulated futures; p50 and p90 of so few are rough, and cost seconds on a large cluster."""
HORIZON_S = 30 * 86400.0
"""A start later than this counts as this."""
DEFAULT_S = 4 * 3600.0
"""Length of a job when there is no history at all."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A job of the past: what it was, and how long it ran in all."""

    tenant: str
    accelerators_m: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a job would start."""

    starts_now: bool
    action: Action | None = None
    """The start, if it starts now: where, in which mode, and why."""
    record: WaitingRecord | None = None
    """Why it waits, if it waits."""
    p50_s: float | None = None
    """Seconds until it starts, median; None: it starts now, or never as things are."""
    p90_s: float | None = None
    futures: int = 0


def what_if(
    snapshot: Snapshot,
    policy: Policy,
    job: Job,
    now: float,
    history: Sequence[Finished] = (),
    seed: int = 0,
    futures: int = FUTURES,
) -> Forecast:
    """Plan with the job added (or replaced, if its id is known), without changing anything."""
    others = tuple(other for other in snapshot.jobs if other.id != job.id)
    with_job = replace(snapshot, jobs=(*others, job))
    result, _ = plan(with_job, policy, now)
    action = next((a for a in result.actions if a.job == job.id and a.to is not None), None)
    record = result.record(job.id)
    if action is not None:
        return Forecast(True, action, record)
    if record is None or record.code in NEVER:
        return Forecast(False, None, record)
    lengths = _Lengths(history)
    waits = sorted(
        _future(with_job, policy, job.id, now, lengths, Random(f"{seed}/{number}"))
        for number in range(futures)
    )
    return Forecast(False, None, record, _quantile(waits, 0.5), _quantile(waits, 0.9), futures)


class _Lengths:
    """Lengths of finished jobs, by tenant and size, by size, and of all."""

    def __init__(self, history: Sequence[Finished]) -> None:
        self._rows: dict[tuple[str, int], list[float]] = {}
        for item in history:
            for key in ((item.tenant, item.accelerators_m), ("", item.accelerators_m), ("", 0)):
                self._rows.setdefault(key, []).append(item.seconds)
        for row in self._rows.values():
            row.sort()

    def remaining_s(self, job: Job, ran_s: float, random: Random) -> float:
        """A draw of the time left, given that the job has run so long."""
        size = job.min_pods * job.per_pod.accelerators_m
        for key in ((job.tenant, size), ("", size), ("", 0)):
            row = self._rows.get(key, [])
            first = bisect_right(row, ran_s)
            if len(row) - first >= 3:
                return row[random.randrange(first, len(row))] - ran_s
        # Longer than anything seen: what has run long will run about as long again.
        return max(ran_s, DEFAULT_S) * random.expovariate(1.0)


def _future(
    snapshot: Snapshot, policy: Policy, job: JobId, now: float, lengths: _Lengths, random: Random
) -> float:
    """Seconds until the job starts in one simulated future."""
    begin = now
    left: dict[JobId, float] = {}
    for other in sorted(snapshot.jobs, key=lambda other: other.id):
        size = max(other.min_pods * other.per_pod.accelerators_m / 1000, 1e-3)
        ran_s = other.attained_s / size
        if other.run is not None:
            ran_s = max(ran_s, now - other.run.started_at_s)
        left[other.id] = lengths.remaining_s(other, ran_s, random)
    while now - begin < HORIZON_S:
        result, _ = plan(snapshot, policy, now)
        snapshot = applied(snapshot, result, now)
        running = [other for other in snapshot.jobs if other.run is not None]
        if any(other.id == job for other in running):
            return now - begin
        if not running:
            break
        step = max(1.0, min(left[other.id] for other in running))
        now += step
        for other in running:
            left[other.id] -= step
        snapshot = replace(
            snapshot,
            jobs=tuple(
                _released(other) for other in snapshot.jobs if other.run is None or left[other.id] > 0
            ),
        )
    return HORIZON_S


def _released(job: Job) -> Job:
    """A stopping job has stopped by the next event."""
    return replace(job, run=None) if job.run is not None and job.run.releasing else job


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
