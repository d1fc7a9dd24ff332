"""In which pools, modes and sizes a job may run, and how fast; and what it lacks where it may run in none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from ..model.snapshot import Job, Pool, Resources
from ..model.table import Estimate, TableView, named_nodes
from .capped import PowerCaps

FEWER_NODES_GAIN = 0.02
"""Fewer nodes are a candidate of their own if they are faster by this part: less is noise (`learning.STEADY`)."""

Way = tuple[Pool, str, int, Resources, int, float, Estimate]
"""Pool, mode, pods, what each requests, nodes (`Candidate.nodes`), power cap, and speed."""


def _by_nodes(
    job: Job, pool: Pool, mode: str, pods: int, table: TableView, largest_m: int
) -> list[tuple[int, Estimate]]:
    """How fast a number of pods is by nodes (0: any number), as far as fewer are faster by `FEWER_NODES_GAIN`."""
    size = pods * per_pod_on(job, pool, None).accelerators_m
    bounds = [0]
    if pods > 1 and size > 1000:
        fewest = -(-pods // max(1, largest_m * pods // size))
        counts = table.node_counts(job.workload_class, mode, job.tenant)
        bounds += [count for count in reversed(counts) if fewest <= count < pods]
    found: list[tuple[int, Estimate]] = []
    for bound in bounds:
        nodes = named_nodes(size, bound or pods)
        estimate = table.estimate(job.workload_class, pool.key, mode, size, job.tenant, nodes=nodes)
        if estimate is None or estimate.speed <= 0:
            continue
        if pool.memory_mib and not pool.is_cpu and estimate.memory_mib > pool.memory_mib:
            continue
        if not found or estimate.speed > found[-1][1].speed * (1 + FEWER_NODES_GAIN):
            found.append((bound, estimate))
    if len(bounds) == 1:
        return found
    # Power domains count the same watts wherever the pods stand (`draw.py`).
    general = table.estimate(job.workload_class, pool.key, mode, size, job.tenant)
    if general is None:
        return found
    return [(bound, replace(estimate, watts=general.watts)) for bound, estimate in found]


def ways_of(
    job: Job, pools: list[Pool], table: TableView, largest_m: Mapping[str, int], caps: PowerCaps
) -> tuple[list[Way], tuple[str, ...]]:
    """All ways to run the job at full speed and under power caps; where there is none, why: "accelerator", "tenant", "memory" or
    "devices"."""
    found: list[Way] = []
    typed = [p for p in pools if _type_allowed(job, p)]
    allowed = [p for p in typed if p.tenants is None or job.tenant in p.tenants]
    useful = [pool for pool in allowed if job.uses_all(pool)]
    for pool in useful:
        for mode in job.modes:
            for pods in pod_counts(job):
                for nodes, estimate in _by_nodes(job, pool, mode, pods, table, largest_m.get(pool.name, 0)):
                    per_pod = per_pod_on(job, pool, estimate)
                    ways = () if nodes else caps.nodes(pool, pods, per_pod.accelerators_m)
                    under = (
                        caps.of(job, pool, mode, pods, per_pod.accelerators_m, estimate, table)
                        if ways
                        else ()
                    )
                    capped: list[Way] = [
                        (pool, mode, pods, per_pod, way, cap, each) for way in ways for cap, each in under
                    ]
                    if not capped or job.power_cap == 1:
                        found.append((pool, mode, pods, per_pod, nodes, 1.0, estimate))
                    found += capped
    if found:
        return found, ()
    if not typed:
        return found, ("accelerator",)
    if not allowed:
        return found, ("tenant",)
    return found, ("memory" if useful else "devices",)


def per_pod_on(job: Job, pool: Pool, estimate: Estimate | None) -> Resources:
    """What one pod of the job requests in this pool."""
    found = _request(job.per_pod, pool)
    if estimate is None or not estimate.host_memory_mib:
        return found
    return replace(
        found, memory_mib=max(found.memory_mib, estimate.host_memory_mib + job.more_host_memory_mib)
    )


@lru_cache(maxsize=4096)
def _request(ask: Resources, pool: Pool) -> Resources:
    if pool.is_cpu:
        cpu_m = ask.cpu_m or -(-ask.accelerators_m * pool.unit_m // 1000)
        return replace(ask, accelerators_m=pool.cpu_accelerators_m(cpu_m), cpu_m=cpu_m)
    devices_m = ask.accelerators_m
    if not (pool.shareable and devices_m < 1000):
        devices_m = -(-devices_m // 1000) * 1000
    return replace(ask, accelerators_m=devices_m, cpu_m=ask.cpu_m or devices_m * pool.cpu_m // 1000)


def pod_counts(job: Job) -> tuple[int, ...]:
    """Numbers of pods that are candidates: the smallest, doublings, the largest. Others are made where they are
    needed (`CandidateBuilder.sized`)."""
    sizes = [job.min_pods]
    while sizes[-1] * 2 < job.max_pods:
        sizes.append(sizes[-1] * 2)
    if job.max_pods > sizes[-1]:
        sizes.append(job.max_pods)
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Device memory that is nearest to fitting."""

    accelerator: str
    mode: str
    needed_mib: int
    has_mib: int


def nearest_memory(job: Job, pools: Iterable[Pool], table: TableView) -> MemoryNeed | None:
    """Where and in which mode the job comes nearest to fitting the device memory; None: memory excludes it
    nowhere, or what it needs is not known."""
    best: MemoryNeed | None = None
    for pool in sorted(pools, key=lambda pool: (-pool.memory_mib, pool.name)):
        allowed = _type_allowed(job, pool) and (pool.tenants is None or job.tenant in pool.tenants)
        if not allowed or pool.is_cpu or not pool.memory_mib:
            continue
        for mode in job.modes:
            for pods in pod_counts(job):
                size = pods * per_pod_on(job, pool, None).accelerators_m
                need = table.memory_mib(job.workload_class, pool.key, mode, size, job.tenant)
                found = MemoryNeed(pool.accelerator, mode, need, pool.memory_mib)
                if need > pool.memory_mib and (best is None or _nearer(found, best)):
                    best = found
    return best


def _nearer(one: MemoryNeed, other: MemoryNeed) -> bool:
    return one.needed_mib * other.has_mib < other.needed_mib * one.has_mib


def _type_allowed(job: Job, pool: Pool) -> bool:
    if job.pools and pool.name not in job.pools:
        return False
    if job.accelerators and pool.accelerator not in job.accelerators:
        return False
    return job.per_pod.accelerators_m > 0 or pool.is_cpu
