"""Candidates: every way a job could run, as a column of (value, resource vector, watts).

One column per pool, engine mode and number of pods. Elastic goodput, serving replicas, power caps and
deadlines only ever add columns or change a value; nothing else in the planner needs to know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from .plans import Policy
from .table import Estimate, TableView
from .types import Job, Placement, Pool, Resources, Snapshot
from .value import weight


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

    def placed(self, nodes: tuple[str, ...]) -> Placement:
        """This candidate on these nodes (one name per rank)."""
        return Placement(self.pool, self.accelerator, self.mode, nodes, self.per_pod)


@dataclass(frozen=True)
class Options:
    """All columns of a job, best value first, and the scale of their values."""

    job: Job
    columns: tuple[Candidate, ...]
    weight: float
    best_speed: float
    excluded: tuple[str, ...] = ()
    """Why nothing fits: "accelerator", "tenant", "memory" (in the order of the checks); empty if columns."""

    @cached_property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The different (accelerator, amount) of the columns."""
        return tuple(dict.fromkeys((c.accelerator, c.accelerators_m) for c in self.columns))

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


def options(snapshot: Snapshot, table: TableView, policy: Policy, now: float) -> dict[str, Options]:
    """The columns of every job, by job id.

    A running job's own placement is always among its columns, even if today's table would not offer it.
    """
    pools = sorted(snapshot.pools, key=lambda pool: pool.name)
    longest = _longest_remaining(snapshot, table, pools) if policy.objective == "makespan" else 0.0
    return {job.id: _options(job, pools, table, policy, now, longest) for job in snapshot.jobs}


def _options(
    job: Job, pools: list[Pool], table: TableView, policy: Policy, now: float, longest_s: float
) -> Options:
    found, excluded = _speeds(job, pools, table)
    best = max((speed for _, _, _, _, speed, _ in found), default=0.0)
    scale = weight(job, best, policy, now, longest_s)
    columns = [
        Candidate(
            pool.name,
            pool.accelerator,
            mode,
            pods,
            per_pod,
            speed,
            _value(pool, pods * per_pod.accelerators_m, speed, scale, best, policy),
            estimate.watts,
        )
        for pool, mode, pods, per_pod, speed, estimate in found
    ]
    columns.sort(key=lambda c: (-c.value, c.accelerators_m, c.pool, job.modes.index(c.mode)))
    return Options(job, tuple(columns), scale, best, excluded)


def _value(pool: Pool, accelerators_m: int, speed: float, scale: float, best: float, policy: Policy) -> float:
    relative = speed / best if best > 0 else 0.0
    if policy.objective == "cost" and pool.price_per_hour > 0:
        relative /= max(pool.price_per_hour * accelerators_m / 1000, 1e-9)
    return scale * relative


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


def _longest_remaining(snapshot: Snapshot, table: TableView, pools: list[Pool]) -> float:
    """Seconds the longest job still needs at its best speed (makespan objective)."""
    longest = 0.0
    for job in snapshot.jobs:
        if job.remaining_work is not None:
            best = max((speed for _, _, _, _, speed, _ in _speeds(job, pools, table)[0]), default=0.0)
            if best > 0:
                longest = max(longest, job.remaining_work / best)
    return longest
