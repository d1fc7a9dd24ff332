"""Deadlines: how much each job with a deadline needs from now on, so that all promises are kept.

Minimum satisfactory shares by progressive filling, as in ElasticFlow (Gu et al., ASPLOS'23), on several types. The time
ahead is cut into spans in which what is free does not change. In order of their deadlines, the promised jobs take what
they need of it: of all pools, modes and sizes x in which a job is done in time, if it has min(x, what is free) pods in
each span, that which takes the fewest unit-hours (accelerators x exchange rate). So a job asks for the least that keeps
its promise, and one with a later deadline gets what is left.

A deadline is promised if the job can keep it without breaking a promise that was made before; who is not promised is
asked again in each plan, because others end early. A promise that cannot be kept any more (nodes were lost, the job is
slower than measured) stays, and its job takes what is left by then and is done as soon as it can be.

A tenant's promises take at most what the tenant is entitled to, for others' shares must not be promised away, and leave
out what jobs hold that nobody may stop. Speeds count with their lower bound, and a deadline is aimed at a little early.

What follows from it is in the values (`value.py`): a promised job that needs its share now (`DeadlineShare.urgent`) is worth
more, up to the speed of that share, than all jobs without; beyond it, and before, it is worth what others are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..model.plans import DeadlineAnswer, DeadlineShare
from ..model.snapshot import JobId

EARLY_S = 60.0
"""A deadline is aimed at by so much early: what a plan starts or resizes takes place a little later."""
EARLY_PART = 0.03
"""And by this part of the time that is left, at most."""
TRIED = 16
"""Jobs without a promise for which one is sought in a plan, earliest deadline first; each costs a filling."""
EPS = 1e-6
"""Relative, and in units: entitlements are rounded to a millionth of a unit."""
FOREVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Way:
    """A pool and mode in which a job could run, with its sizes."""

    pool: str
    accelerator: str
    per_pod: float
    """Accelerators of a pod."""
    unit: float
    """Exchange-rate units of an accelerator."""
    pods: tuple[int, ...]
    """Ascending."""
    speeds: tuple[float, ...]
    """Work per second of each size, at the lower bound; of sizes in which more pods are faster."""
    runs: int = 0
    """The pods with which it runs so now."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A job with a deadline."""

    job: JobId
    label: str
    """By which people know it."""
    tenant: str
    deadline_s: float
    work: float
    """What is left to do."""
    restart_s: float
    """How long a start costs."""
    promised: bool
    ways: tuple[Way, ...]


def shares(
    jobs: Iterable[Asked],
    capacity: Mapping[str, float],
    entitled: Mapping[str, float],
    now: float,
) -> tuple[DeadlineShare, ...]:
    """What each job needs, by job id.

    Args:
        capacity: accelerators of each pool that jobs with deadlines may take.
        entitled: exchange-rate units that each tenant may promise.
    """
    ordered = sorted(jobs, key=lambda job: (job.deadline_s, job.job))
    promised = [job for job in ordered if job.promised]
    others = [job for job in ordered if not job.promised]
    filling = _Filling(promised, capacity, entitled, now)
    refused: dict[JobId, DeadlineShare] = {}
    for job in others[:TRIED]:
        tried = _Filling(sorted([*promised, job], key=_turn), capacity, entitled, now)
        broken = [one for one in tried.late if one.job not in {late.job for late in filling.late}]
        if not broken:
            promised, filling = sorted([*promised, job], key=_turn), tried
            continue
        refused[job.job] = _refusal(job, broken, capacity, now)
    for job in others[TRIED:]:
        refused[job.job] = DeadlineShare(job.job, DeadlineAnswer.NOT_TRIED)
    found = {**refused, **filling.shares}
    return tuple(found[name] for name in sorted(found))


def _turn(job: Asked) -> tuple[float, JobId]:
    return job.deadline_s, job.job


def _refusal(job: Asked, broken: Sequence[Asked], capacity: Mapping[str, float], now: float) -> DeadlineShare:
    """Why a deadline is not promised: it is out of reach even alone, or whose promises it would break."""
    alone = _Filling([job], capacity, {job.tenant: math.inf}, now)
    ends_s = alone.shares[job.job].ends_s
    if alone.late:
        slack_s = 0.0 if ends_s is None else job.deadline_s - ends_s
        return DeadlineShare(job.job, DeadlineAnswer.OUT_OF_REACH, ends_s=ends_s, slack_s=slack_s)
    own = tuple(one.label for one in broken if one.tenant == job.tenant and one.job != job.job)
    return DeadlineShare(job.job, DeadlineAnswer.CROWDED, breaks=own)


class _Filling:
    """The jobs' shares, filled in this order; `late` are those that are not done in time."""

    def __init__(
        self, jobs: Sequence[Asked], capacity: Mapping[str, float], entitled: Mapping[str, float], now: float
    ) -> None:
        self.now = now
        self.shares: dict[JobId, DeadlineShare] = {}
        self.late: list[Asked] = []
        self._starts = np.array([now])
        self._free = {pool: np.array([amount]) for pool, amount in capacity.items()}
        self._units = {job.tenant: np.array([entitled.get(job.tenant, 0.0)]) for job in jobs}
        for job in jobs:
            found = self._cheapest(job)
            if found is None:
                self.late.append(job)
            else:
                self._take(job, found, DeadlineAnswer.KEEPS)
        for job in self.late:
            self._take(job, self._soonest(job), DeadlineAnswer.LATE)

    def _cheapest(self, job: Asked) -> _Fit | None:
        left_s = job.deadline_s - self.now
        aim_s = job.deadline_s - min(EARLY_S, EARLY_PART * left_s)
        in_time = [fit for fit in self._fits(job) if fit.ends_s <= aim_s]
        return min(in_time, key=lambda fit: (fit.unit_s, not fit.way.runs, fit.ends_s), default=None)

    def _soonest(self, job: Asked) -> _Fit | None:
        ending = [fit for fit in self._fits(job) if math.isfinite(fit.ends_s)]
        return min(ending, key=lambda fit: (fit.ends_s, fit.unit_s), default=None)

    def _fits(self, job: Asked) -> list[_Fit]:
        """The job in each of its ways with each size at most."""
        lengths = np.diff(self._starts, append=self._starts[0] + FOREVER_S)
        found = []
        for way in job.ways:
            free = self._free.get(way.pool)
            if free is None:
                continue
            room = np.minimum(free, (self._units[job.tenant] + EPS) / way.unit) / way.per_pod + EPS
            pods, speeds = np.array([0, *way.pods]), np.array([0.0, *way.speeds])
            fitting = np.searchsorted(pods, room, side="right") - 1
            for most in range(1, len(pods)):
                sizes = np.minimum(fitting, most)
                fit = self._ended(job, way, pods[sizes], speeds[sizes], lengths)
                if fit is not None:
                    found.append(fit)
        return found

    def _ended(
        self,
        job: Asked,
        way: Way,
        pods: NDArray[np.int64],
        speeds: NDArray[np.float64],
        lengths: NDArray[np.float64],
    ) -> _Fit | None:
        """When the job is done if it has these pods in each span; None: never."""
        work = job.work
        if pods[0] != way.runs or not way.runs:
            work += job.restart_s * float(speeds[int(np.argmax(pods > 0))])
        done = np.cumsum(speeds * lengths)
        last = int(np.searchsorted(done, work * (1 - EPS)))
        if last == len(done):
            return None
        before = float(done[last - 1]) if last else 0.0
        ends_s = float(self._starts[last]) + (work - before) / float(speeds[last])
        used_s = np.minimum(lengths[: last + 1], ends_s - self._starts[: last + 1])
        unit_s = float((pods[: last + 1] * used_s).sum()) * way.per_pod * way.unit
        return _Fit(way, pods[: last + 1], float(speeds[0]), ends_s, unit_s)

    def _take(self, job: Asked, fit: _Fit | None, answer: DeadlineAnswer) -> None:
        if fit is None:
            self.shares[job.job] = DeadlineShare(job.job, answer)
            return
        self._cut(fit.ends_s)
        accelerators = fit.pods * fit.way.per_pod
        self._free[fit.way.pool][: len(accelerators)] -= accelerators
        self._units[job.tenant][: len(accelerators)] -= accelerators * fit.way.unit
        self.shares[job.job] = DeadlineShare(
            job.job,
            answer,
            accelerator=fit.way.accelerator,
            accelerators_m=round(1000 * float(accelerators[0])),
            speed=fit.speed,
            ends_s=fit.ends_s,
            slack_s=job.deadline_s - fit.ends_s,
        )

    def _cut(self, at_s: float) -> None:
        """Let a span end at this moment."""
        i = int(np.searchsorted(self._starts, at_s))
        if i == len(self._starts) or self._starts[i] != at_s:
            self._starts = np.insert(self._starts, i, at_s)
            for table in (self._free, self._units):
                for name, amounts in table.items():
                    table[name] = np.insert(amounts, i, amounts[i - 1])


@dataclass(frozen=True, slots=True)
class _Fit:
    """A way with what it takes in each span until the job is done."""

    way: Way
    pods: NDArray[np.int64]
    speed: float
    """In the first span."""
    ends_s: float
    unit_s: float
