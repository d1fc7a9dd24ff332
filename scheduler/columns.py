"""Candidates: every way a job could run, as a column of (value, resource vector, watts).

One column per pool, engine mode and number of pods. Elastic goodput, serving replicas, power caps and
deadlines only ever add columns or change a value; nothing else in the planner needs to know.

Jobs that ask for the same thing share what does not depend on their age: where they may run and how fast
(`Row`). What is left per job is one factor, its weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from .plans import Objective, Policy
from .table import Estimate, TableView
from .types import Job, Placement, Pool, Resources, Snapshot
from .value import remaining_s, weight

NEARLY_FREE = 0.01
"""Cost: a pool without a price counts as this part of the dearest, so that free pools still differ by speed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One column. `value` is per hour; 1.0 of it is one job of weight 1 at its best speed."""

    pool: str
    accelerator: str
    mode: str
    pods: int
    per_pod: Resources
    speed: float
    """Work units per second (mean)."""
    value: float
    watts: float

    @property
    def accelerators_m(self) -> int:
        return self.pods * self.per_pod.accelerators_m

    def placed(self, nodes: tuple[str, ...], devices: tuple[int, ...] = ()) -> Placement:
        """This candidate on these nodes, shares on these devices of them (one per rank)."""
        return Placement(self.pool, self.accelerator, self.mode, nodes, self.per_pod, devices)


@dataclass(frozen=True, slots=True)
class Part:
    """A smaller place: the column, the nodes that stay and those that are given back, by pod."""

    column: Candidate
    stays: tuple[str, ...]
    leaves: tuple[str, ...]

    @property
    def freed_m(self) -> int:
        """Thousandths of an accelerator given back."""
        return len(self.leaves) * self.column.per_pod.accelerators_m


Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """What jobs that ask for the same thing have in common: columns worth `value` per unit of weight."""

    columns: tuple[Candidate, ...]
    best_speed: float
    excluded: tuple[str, ...]
    sizes: Sizes
    """The different (accelerator, amount) of the columns."""


@dataclass(frozen=True, slots=True)
class Options:
    """All columns of a job, best value first, and the scale of their values."""

    job: Job
    columns: tuple[Candidate, ...]
    weight: float
    best_speed: float
    row: Row

    @property
    def excluded(self) -> tuple[str, ...]:
        """Why nothing fits: "accelerator", "tenant", "memory" (in the order of the checks)."""
        return self.row.excluded

    @property
    def sizes(self) -> Sizes:
        """The different (accelerator, amount) of the columns."""
        return self.row.sizes

    def column_of(self, placement: Placement) -> Candidate | None:
        """The column that a placement is an instance of; None if the job could not be started so today."""
        for column in self.columns:
            if (
                column.pool == placement.pool
                and column.mode == placement.mode
                and column.pods == placement.pods
                and column.per_pod == placement.per_pod
            ):
                return column
        return None


def per_pod_on(job: Job, pool: Pool, estimate: Estimate | None) -> Resources:
    """What one pod of the job requests in this pool."""
    found = _request(job.per_pod, pool)
    if estimate is not None and estimate.host_memory_mib > found.memory_mib:
        return replace(found, memory_mib=estimate.host_memory_mib)
    return found


@lru_cache(maxsize=4096)
def _request(ask: Resources, pool: Pool) -> Resources:
    if pool.is_cpu:
        cpu_m = ask.cpu_m or -(-ask.accelerators_m * pool.unit_m // 1000)
        return replace(ask, accelerators_m=pool.cpu_accelerators_m(cpu_m), cpu_m=cpu_m)
    devices_m = ask.accelerators_m
    if not (pool.shareable and devices_m < 1000):
        devices_m = -(-devices_m // 1000) * 1000
    return replace(ask, accelerators_m=devices_m)


def ladder(job: Job) -> tuple[int, ...]:
    """Numbers of pods worth trying: the smallest, doublings, the largest."""
    sizes = [job.min_pods]
    while sizes[-1] * 2 < job.max_pods:
        sizes.append(sizes[-1] * 2)
    if job.max_pods > sizes[-1]:
        sizes.append(job.max_pods)
    return tuple(sizes)


class Columns:
    """The columns of jobs, at one moment (`at_s`, from which their ages count)."""

    def __init__(self, snapshot: Snapshot, table: TableView, policy: Policy, at_s: float) -> None:
        self._pools = sorted(snapshot.pools, key=lambda pool: pool.name)
        self._table = table
        self._policy = policy
        self._at_s = at_s
        self._rows: dict[tuple[object, ...], Row] = {}
        """By what jobs ask for; the workload class comes first."""
        self._by_tenant = self._differs_by_tenant()
        self._least_price = NEARLY_FREE * max((pool.price_per_hour for pool in self._pools), default=0.0)
        self._longest_s = 0.0
        if policy.objective is Objective.MAKESPAN:
            self._longest_s = self._longest(snapshot.jobs)

    def _differs_by_tenant(self) -> bool:
        return self._table.differs_by_tenant or any(pool.tenants is not None for pool in self._pools)

    def follow(self, table: TableView) -> None:
        """Go by another table from now on, which was built from the one before."""
        self._table = table
        self._by_tenant = self._differs_by_tenant()
        if table.changed:
            self._rows = {key: row for key, row in self._rows.items() if key[0] not in table.changed}

    def of(self, job: Job) -> Options:
        """All columns of the job."""
        row = self.row(job)
        scale = weight(job, row.best_speed, self._policy, self._at_s, self._longest_s)
        columns = tuple(
            Candidate(c.pool, c.accelerator, c.mode, c.pods, c.per_pod, c.speed, scale * c.value, c.watts)
            for c in row.columns
        )
        return Options(job, columns, scale, row.best_speed, row)

    def row(self, job: Job) -> Row:
        """What the job has in common with others like it."""
        key = (
            job.workload_class,
            job.min_pods,
            job.max_pods,
            job.per_pod,
            job.accelerators,
            job.pools,
            job.modes,
            job.tenant if self._by_tenant else "",
        )
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._row(job)
        return row

    def _row(self, job: Job) -> Row:
        found, excluded = _speeds(job, self._pools, self._table)
        best = max((speed for *_, speed, _ in found), default=0.0)
        columns = [
            Candidate(
                pool.name,
                pool.accelerator,
                mode,
                pods,
                per_pod,
                speed,
                self._value(pool, pods * per_pod.accelerators_m, speed / best),
                estimate.watts,
            )
            for pool, mode, pods, per_pod, speed, estimate in found
        ]
        columns.sort(key=lambda c: (-c.value, c.accelerators_m, c.pool, job.modes.index(c.mode)))
        sizes = tuple(dict.fromkeys((c.accelerator, c.accelerators_m) for c in columns))
        return Row(tuple(columns), best, excluded, sizes)

    def _value(self, pool: Pool, accelerators_m: int, relative: float) -> float:
        """Speed against the job's best; with the objective cost, that per money."""
        price = max(pool.price_per_hour, self._least_price)
        if self._policy.objective is Objective.COST and price > 0:
            return relative / max(price * accelerators_m / 1000, 1e-9)
        return relative

    def _longest(self, jobs: Iterable[Job]) -> float:
        """Seconds the longest job still needs at its best speed (makespan objective)."""
        longest = 0.0
        for job in jobs:
            best = self.row(job).best_speed
            if job.remaining_work is not None and best > 0:
                longest = max(longest, remaining_s(job, best))
        return longest


_Found = tuple[Pool, str, int, Resources, float, Estimate]


def _speeds(job: Job, pools: list[Pool], table: TableView) -> tuple[list[_Found], tuple[str, ...]]:
    found: list[_Found] = []
    typed = [p for p in pools if _type_allowed(job, p)]
    allowed = [p for p in typed if p.tenants is None or job.tenant in p.tenants]
    for pool in allowed:
        for mode in job.modes:
            for pods in ladder(job):
                size = pods * per_pod_on(job, pool, None).accelerators_m
                estimate = table.estimate(job.workload_class, pool.accelerator, mode, size, job.tenant)
                if estimate is None or estimate.speed <= 0:
                    continue
                if pool.memory_mib and not pool.is_cpu and estimate.memory_mib > pool.memory_mib:
                    continue
                per_pod = per_pod_on(job, pool, estimate)
                found.append((pool, mode, pods, per_pod, estimate.speed, estimate))
    if found:
        return found, ()
    if not typed:
        return found, ("accelerator",)
    return found, ("tenant",) if not allowed else ("memory",)


def _type_allowed(job: Job, pool: Pool) -> bool:
    if job.pools and pool.name not in job.pools:
        return False
    if job.accelerators and pool.accelerator not in job.accelerators:
        return False
    return job.per_pod.accelerators_m > 0 or pool.is_cpu
