"""How jobs went here: which have ended after how long, and what became of the forecasts that were told.

Everything is read off TrainingJobs, so a restarted operator knows what stands in the objects that still exist:
ended jobs by their usage, promises by ``status.promise``, which holds what was told and when the job started. Lost
with the process is what only it remembered: jobs that were deleted since, and the promises of waits before a job's
last one. ``observe`` may be called as often as an object changes; the same object twice says nothing new.

One forecast per wait is a promise, the first. Were the latest kept, the one made just before the start would
always be it, and every forecast would look too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from busbar.kube.types import TrainingJob
from busbar.kube.types.forecast import Promise
from busbar.kube.types.training_job import TERMINAL_PHASES
from busbar.operator.job_status import counted_to
from busbar.scheduler import Finished, Outcome
from busbar.scheduler.history import OUTCOMES

ENDED = 8000
"""Ended jobs that are remembered; forecasts are made from the latest."""

TenantOf = Callable[[str], str]
"""Namespace to tenant; empty where it has none."""


@dataclass(frozen=True, slots=True)
class Told:
    """A promise, and the start that it was about."""

    outcome: Outcome
    p50_at_s: float
    p90_at_s: float


@dataclass(frozen=True, slots=True)
class Kept:
    """How promises turned out."""

    promises: int
    """Those whose moment has passed: one that may still be kept is not counted, or only quick starts would be."""
    share: float | None
    """Of these, how many jobs had started by then."""


class Past:
    """See the module's head. Times are seconds since the epoch."""

    def __init__(self) -> None:
        self._ended: dict[str, Finished] = {}  # by uid, in the order in which they ended
        self._told: dict[str, Told] = {}  # by uid and attempt
        self._last: dict[str, str] = {}  # uid to the key of its last promise

    def rebuild(self, jobs: Iterable[TrainingJob], tenant_of: TenantOf) -> None:
        """From the objects that exist, at the start."""
        known = [job for job in jobs if job.status is not None]
        known.sort(key=_ended_at)
        for job in known:
            self.observe(job, tenant_of)

    def observe(self, job: TrainingJob, tenant_of: TenantOf) -> None:
        """A job as it is now."""
        status, uid = job.status, job.metadata.uid
        if status is None:
            return
        self._promise(job, status.promise, tenant_of)
        if status.phase in TERMINAL_PHASES and uid not in self._ended:
            self._end(job, _seconds(status.completion_time), tenant_of)

    def forget(self, job: TrainingJob, tenant_of: TenantOf, now: datetime) -> None:
        """A job was deleted: if it ran, it ran so long; if it waited, its promise says nothing."""
        self._withdraw(job.metadata.uid)
        self._last.pop(job.metadata.uid, None)
        if job.metadata.uid not in self._ended:
            self._end(job, now.timestamp(), tenant_of)

    @property
    def ended(self) -> tuple[Finished, ...]:
        return tuple(self._ended.values())

    @property
    def outcomes(self) -> tuple[tuple[str, Outcome], ...]:
        """By wait, the earliest made first."""
        rows = [(key, told.outcome) for key, told in self._told.items()]
        return tuple(sorted(rows, key=lambda row: (row[1].made_at_s, row[0])))

    def kept(self, now: float) -> tuple[Kept, Kept]:
        """How the medians and the ninth deciles turned out so far."""
        return self._kept(now, lambda told: told.p50_at_s), self._kept(now, lambda told: told.p90_at_s)

    def _kept(self, now: float, moment: Callable[[Told], float]) -> Kept:
        due = [told for told in self._told.values() if moment(told) <= now]
        starts = ((told.outcome.made_at_s, told.outcome.waited_s, moment(told)) for told in due)
        in_time = sum(waited is not None and made + waited <= at for made, waited, at in starts)
        return Kept(len(due), in_time / len(due) if due else None)

    def _promise(self, job: TrainingJob, promise: Promise | None, tenant_of: TenantOf) -> None:
        uid = job.metadata.uid
        if promise is None:
            self._withdraw(uid)
            return
        key = f"{uid}/{promise.attempt}"
        if self._last.get(uid) != key:
            self._withdraw(uid)
        if self._knows(key, promise):
            return
        tenant = tenant_of(job.metadata.namespace or "")
        if not tenant:
            return
        self._last[uid] = key
        self._told.pop(key, None)
        self._told[key] = _told(job, promise, tenant)
        while len(self._told) > OUTCOMES:
            del self._told[next(iter(self._told))]

    def _knows(self, key: str, promise: Promise) -> bool:
        told = self._told.get(key)
        if told is None or told.outcome.made_at_s != _seconds(promise.made_at):
            return False
        return told.outcome.waited_s is not None or promise.started_at is None

    def _withdraw(self, uid: str) -> None:
        """The wait of the last promise ended without a start."""
        key = self._last.get(uid, "")
        told = self._told.get(key)
        if told is not None and told.outcome.waited_s is None:
            del self._told[key]

    def _end(self, job: TrainingJob, at_s: float, tenant_of: TenantOf) -> None:
        seconds, tenant = ran_s(job, at_s), tenant_of(job.metadata.namespace or "")
        made = job.metadata.creation_timestamp
        if seconds <= 0 or not tenant:
            return
        submitted = made.timestamp() if made is not None else None
        row = Finished(tenant, size_m(job), seconds, submitted, at_s, job.spec.shape.min_pods)
        self._ended[job.metadata.uid] = row
        while len(self._ended) > ENDED:
            del self._ended[next(iter(self._ended))]


def _ended_at(job: TrainingJob) -> tuple[float, str]:
    ended = job.status.completion_time if job.status is not None else None
    return _seconds(ended), job.metadata.uid


def size_m(job: TrainingJob) -> int:
    """Thousandths of an accelerator that the job asks for, as forecasts group jobs."""
    return max(1, 1000 * job.spec.shape.min_pods * job.spec.shape.accelerators_per_pod)


def ran_s(job: TrainingJob, now_s: float) -> float:
    """For how long it held its accelerators in all; 0 for one that never ran."""
    status = job.status
    if status is None:
        return 0.0
    counted = status.usage.accelerator_seconds * 1000 / size_m(job) if status.usage is not None else 0.0
    since = counted_to(status) if status.phase not in TERMINAL_PHASES else None
    return counted + (max(0.0, now_s - since.timestamp()) if since is not None else 0.0)


def _told(job: TrainingJob, promise: Promise, tenant: str) -> Told:
    started = promise.started_at
    waited = None if started is None else max(0.0, (started - promise.made_at) / timedelta(seconds=1))
    raw = promise.simulated_p50_seconds, promise.simulated_p90_seconds
    made_s, p50_s, p90_s = map(_seconds, (promise.made_at, promise.start_p50, promise.start_p90))
    promised = p50_s - made_s, p90_s - made_s
    return Told(Outcome(made_s, tenant, size_m(job), raw, waited, promised), p50_s, p90_s)


def _seconds(moment: datetime | None) -> float:
    return moment.timestamp() if moment is not None else 0.0
