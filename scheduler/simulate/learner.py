"""A simulated cluster whose speeds are unknown: jobs report them, with noise and sometimes falsely.

Only the simulator knows the truth; the policy's snapshot contains what the reports say. Noise is drawn per
(seed, job, number of the report), so that two runs that differ elsewhere get the same noise; or once per job
and place (`lasting`), as if every run had a machine of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random

from ..model.snapshot import Placement
from ..model.table import PerformanceTable, Source
from ..performance.learning import learn
from ..performance.reports import (
    Report,
    absorb,
    add_exploration,
    contradicted,
    distrusted,
    overstated,
    settle,
)
from .speeds import Learner
from .trace import TraceJob

Lie = Callable[[TraceJob, str], float]
"""What a job reports, relative to the truth, by accelerator; 1 is honest."""

FIRST_REPORT_S = 30.0
REPORT_S = 300.0
"""A job reports after its first half minute in a place, then at this interval."""


def honest(job: TraceJob, accelerator: str) -> float:
    return 1.0


def _nodes(job: TraceJob, place: Placement) -> int:
    """The nodes that a report says: only jobs whose true speed was measured by nodes depend on them."""
    return place.spread if job.measured else 0


class TableLearner(Learner):
    """Starts from the cells it is given, and learns from what jobs report."""

    def __init__(
        self, table: PerformanceTable, noise: float, seed: int, lie: Lie = honest, lasting: bool = False
    ) -> None:
        super().__init__(learn(table))
        self.noise, self.seed, self.lie, self.lasting = noise, seed, lie, lasting
        self.kinds = tuple(sorted({rate.accelerator for rate in table.rates}))
        self.measured = {
            (cell.workload_class, cell.accelerator, cell.accelerators_m, cell.nodes)
            for cell in table.cells
            if cell.source in (Source.MEASURED, Source.OVERRIDE)
        }
        self._pending: dict[str, tuple[TraceJob, Placement, float, float]] = {}
        """By job: where it is, the seconds since its last report, and the work really done in them."""
        self._count: dict[str, int] = {}
        self._claimed: dict[str, float] = {}
        self._repeated: dict[str, float] = {}
        self._reports: list[Report] = []

    def observe(
        self, job: TraceJob, place: Placement, held_s: float, progress_s: float, speed: float
    ) -> None:
        cell = (job.workload_class, place.key, place.accelerators_m, _nodes(job, place))
        amount = held_s * place.accelerators_m / 1000
        self.table = add_exploration(self.table, 0.0 if cell in self.measured else amount, amount)
        pending = self._pending.get(job.id)
        if pending is not None and pending[1] != place:
            self._report(job.id)
            pending = None
        seconds, work = (0.0, 0.0) if pending is None else pending[2:]
        self._pending[job.id] = (job, place, seconds + progress_s, work + speed * progress_s)
        wait = REPORT_S if cell in self.measured else FIRST_REPORT_S
        if seconds + progress_s >= wait:
            self._report(job.id)

    def _report(self, name: str) -> None:
        job, place, seconds, work = self._pending.pop(name)
        if seconds <= 0:
            return
        number = self._count.get(name, 0)
        self._count[name] = number + 1
        which = place.accelerator if self.lasting else number
        error = Random(f"{self.seed}/{name}/{which}").gauss(0.0, self.noise)
        speed = work / seconds * math.exp(error) * self.lie(job, place.accelerator)
        self._claimed[name] = self._claimed.get(name, 0.0) + speed * seconds
        self.measured.add((job.workload_class, place.key, place.accelerators_m, _nodes(job, place)))
        self._reports.append(
            Report(
                name,
                job.tenant,
                job.workload_class,
                place.key,
                place.accelerators_m,
                speed,
                seconds,
                place.mode,
                total_work=self._total(job),
                nodes=_nodes(job, place),
            )
        )

    def _total(self, job: TraceJob) -> float:
        return job.work + self._repeated.get(job.id, 0.0)

    def repeats(self, job: TraceJob, work: float) -> None:
        self._repeated[job.id] = self._repeated.get(job.id, 0.0) + work

    def ended(self, job: TraceJob) -> None:
        if job.id in self._pending:
            self._report(job.id)
        self._absorb()
        self.table = settle(self.table, job.id, self._total(job))

    def remaining(self, job: TraceJob, left: float) -> float:
        """An honest job's counters are right. A liar's agree with its lies; where they are not used, the job
        counts as if it had just begun."""
        if all(self.lie(job, kind) == 1.0 for kind in job.speeds):
            return left
        if job.tenant in distrusted(self.table) or contradicted(self.table, job.id):
            return self._total(job)
        left = max(self._total(job) - self._claimed.get(job.id, 0.0), 1e-3 * job.work)
        return left + overstated(self.table, job.id)

    def _absorb(self) -> None:
        self.table = absorb(self.table, self._reports)
        self._reports = []

    def current(self, jobs: Iterable[TraceJob]) -> PerformanceTable:
        self._absorb()
        here = tuple(jobs)
        rows = {(job.workload_class, job.pods * job.per_pod_m, "resident", 1.0, 0) for job in here}
        self.table = learn(self.table, rows, self.kinds, {job.tenant for job in here})
        return self.table
