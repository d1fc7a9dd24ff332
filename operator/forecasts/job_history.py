"""The history that forecasts are computed from: how long ended jobs ran, and whether earlier forecasts came true.

Everything is read from TrainingJobs, so a restarted operator rebuilds it from the objects that still exist:
ended jobs from their usage, promises from ``status.promise``, which records the forecast and the start. A restart
loses only what no object records: jobs that were deleted, and the promises of a job's earlier waits.
``observe`` may be called whenever an object changes; observing the same object twice has no effect.

The first forecast of each wait is the promise that is compared with the start. Comparing the last one instead
would always compare the forecast made just before the start, and forecasts would look too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from busbar.kube.types import TrainingJob
from busbar.kube.types.forecast import Promise
from busbar.kube.types.training_status import TERMINAL_PHASES
from busbar.operator.training.status import counted_to
from busbar.scheduler import Finished, Outcome
from busbar.scheduler.forecast.history import OUTCOMES

ENDED = 8000
"""How many ended jobs are remembered, the latest."""

TenantOf = Callable[[str], str]
"""Namespace to tenant; empty where it has none."""


@dataclass(frozen=True, slots=True)
class PromiseRecord:
    """A promise and its outcome, and the moments of its quantiles."""

    outcome: Outcome
    p50_at_s: float
    p90_at_s: float


@dataclass(frozen=True, slots=True)
class PromiseStatistics:
    """How many promises were kept."""

    promises: int
    """Promises whose moment has passed. With the others included, quick starts would be overrepresented."""
    share: float | None
    """The share of these whose job had started by then."""


class JobHistory:
    """See the module's head. Times are seconds since the epoch."""

    def __init__(self) -> None:
        self._ended: dict[str, Finished] = {}  # by uid, in the order in which they ended
        self._promises: dict[str, PromiseRecord] = {}  # by uid and attempt
        self._last: dict[str, str] = {}  # uid to the key of its last promise

    def rebuild(self, jobs: Iterable[TrainingJob], tenant_of: TenantOf) -> None:
        """Reads all existing objects, when the operator starts."""
        known = [job for job in jobs if job.status is not None]
        known.sort(key=_ended_at)
        for job in known:
            self.observe(job, tenant_of)

    def observe(self, job: TrainingJob, tenant_of: TenantOf) -> None:
        """Takes in a job as it is now."""
        status, uid = job.status, job.metadata.uid
        if status is None:
            return
        self._promise(job, status.promise, tenant_of)
        if status.phase in TERMINAL_PHASES and uid not in self._ended:
            self._end(job, _seconds(status.completion_time), tenant_of)

    def forget(self, job: TrainingJob, tenant_of: TenantOf, now: datetime) -> None:
        """Takes in the deletion of a job: if it ran, its running time counts; if it waited, its promise is dropped."""
        self._withdraw(job.metadata.uid)
        self._last.pop(job.metadata.uid, None)
        if job.metadata.uid not in self._ended:
            self._end(job, now.timestamp(), tenant_of)

    @property
    def ended(self) -> tuple[Finished, ...]:
        return tuple(self._ended.values())

    @property
    def outcomes(self) -> tuple[tuple[str, Outcome], ...]:
        """The outcome of each wait's promise, the earliest made first."""
        rows = [(key, record.outcome) for key, record in self._promises.items()]
        return tuple(sorted(rows, key=lambda row: (row[1].made_at_s, row[0])))

    def kept(self, now: float) -> tuple[PromiseStatistics, PromiseStatistics]:
        """How many promises were kept so far: of the medians (p50), and of the ninth deciles (p90)."""
        return self._kept(now, lambda record: record.p50_at_s), self._kept(
            now, lambda record: record.p90_at_s
        )

    def _kept(self, now: float, moment: Callable[[PromiseRecord], float]) -> PromiseStatistics:
        due = [record for record in self._promises.values() if moment(record) <= now]
        starts = ((record.outcome.made_at_s, record.outcome.waited_s, moment(record)) for record in due)
        in_time = sum(waited is not None and made + waited <= at for made, waited, at in starts)
        return PromiseStatistics(len(due), in_time / len(due) if due else None)

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
        self._promises.pop(key, None)
        self._promises[key] = _promise_record(job, promise, tenant)
        while len(self._promises) > OUTCOMES:
            del self._promises[next(iter(self._promises))]

    def _knows(self, key: str, promise: Promise) -> bool:
        record = self._promises.get(key)
        if record is None or record.outcome.made_at_s != _seconds(promise.made_at):
            return False
        return record.outcome.waited_s is not None or promise.started_at is None

    def _withdraw(self, uid: str) -> None:
        """Drops a job's last promise if its wait ended without a start."""
        key = self._last.get(uid, "")
        record = self._promises.get(key)
        if record is not None and record.outcome.waited_s is None:
            del self._promises[key]

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
    """For how many seconds in all the job held its accelerators; 0 for one that never ran."""
    status = job.status
    if status is None:
        return 0.0
    counted = status.usage.accelerator_seconds * 1000 / size_m(job) if status.usage is not None else 0.0
    since = counted_to(status) if status.phase not in TERMINAL_PHASES else None
    return counted + (max(0.0, now_s - since.timestamp()) if since is not None else 0.0)


def _promise_record(job: TrainingJob, promise: Promise, tenant: str) -> PromiseRecord:
    started = promise.started_at
    waited = None if started is None else max(0.0, (started - promise.made_at) / timedelta(seconds=1))
    raw = promise.simulated_p50_seconds, promise.simulated_p90_seconds
    made_s, p50_s, p90_s = map(_seconds, (promise.made_at, promise.start_p50, promise.start_p90))
    promised = p50_s - made_s, p90_s - made_s
    return PromiseRecord(Outcome(made_s, tenant, size_m(job), raw, waited, promised), p50_s, p90_s)


def _seconds(moment: datetime | None) -> float:
    return moment.timestamp() if moment is not None else 0.0
