"""What each tenant and pool has allocated, from a snapshot: for their statuses and the counting of usage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from busbar.scheduler import Job, JobId, Node, Placement, Pool, Snapshot
from busbar.scheduler.model.diff import differing


@dataclass(frozen=True)
class TenantAllocation:
    """One tenant at one moment; accelerators by type."""

    allocated: Mapping[str, float] = field(default_factory=dict)
    by_pool: Mapping[str, float] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    by_user: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What each user holds, by type."""
    running_in: tuple[str, ...] = ()
    """The namespaces of what runs, in order."""

    def holds_as(self, other: TenantAllocation) -> bool:
        """Whether both differ in how many jobs run and wait, and in nothing else."""
        return replace(self, running=other.running, waiting=other.waiting) == other


@dataclass(frozen=True)
class HeldElsewhere:
    """What pods that belong to no job hold of one pool (pools/held_elsewhere.py)."""

    accelerators: float = 0.0
    pods: int = 0
    namespaces: tuple[str, ...] = ()


@dataclass(frozen=True, order=True)
class Overlap:
    """Nodes that another pool selects too."""

    other: str
    nodes: int
    ours: bool
    """Whether they belong to this pool, and not to the other."""


@dataclass(frozen=True)
class PoolRemarks:
    """What concerns pools besides the jobs, by pool; pools without are left out."""

    elsewhere: Mapping[str, HeldElsewhere] = field(default_factory=dict)
    overlaps: Mapping[str, tuple[Overlap, ...]] = field(default_factory=dict)
    without_fabric: Mapping[str, int] = field(default_factory=dict)
    """Ready nodes with too few devices of the pool's network for their accelerators."""


@dataclass(frozen=True)
class PoolAllocation:
    """One pool at one moment, in accelerators."""

    nodes: int = 0
    capacity: float = 0.0
    allocated: float = 0.0
    elsewhere: HeldElsewhere = field(default_factory=HeldElsewhere)
    overlaps: tuple[Overlap, ...] = ()
    without_fabric: int = 0
    """Of its ready nodes, those with too few devices of its network for their accelerators."""


@dataclass(frozen=True)
class Allocations:
    """All allocations at one moment."""

    tenants: Mapping[str, TenantAllocation] = field(default_factory=dict)
    pools: Mapping[str, PoolAllocation] = field(default_factory=dict)
    free_by_type: Mapping[str, float] = field(default_factory=dict)


class AllocationCounts:
    """Follows the rounds' snapshots: jobs and nodes that stayed are not counted again."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._held: dict[_Holder, tuple[int, int]] = {}
        """Thousandths of accelerators, and jobs."""
        self._running: Counter[tuple[str, str]] = Counter()
        """Jobs by tenant and namespace."""
        self._waiting: Counter[str] = Counter()
        self._classes: Counter[tuple[str, bool]] = Counter()
        self._nodes: dict[str, tuple[int, int]] = {}
        """Ready nodes of each pool, and their thousandths of accelerators."""
        self._pool_of: dict[str, str] = {}
        """The pool of each node."""
        self._spread: dict[JobId, Mapping[str, int]] = {}
        """Pods by pool of gangs that stand in several pools, as they were counted."""

    @property
    def classes(self) -> set[str]:
        """Workload classes that have a job."""
        return {name for name, _ in self._classes}

    @property
    def running_classes(self) -> set[str]:
        """Those of jobs that run."""
        return {name for name, runs in self._classes if runs}

    def follow(self, snapshot: Snapshot, remarks: PoolRemarks | None = None) -> Allocations:
        """The allocations in a snapshot."""
        self._count_nodes(snapshot)
        gone, come = differing(self._snapshot.jobs, snapshot.jobs)
        for jobs, sign in ((gone, -1), (come, 1)):
            for job in jobs:
                self._count_job(job, sign)
        self._snapshot = snapshot
        return self._allocations(remarks or PoolRemarks())

    def _count_job(self, job: Job, sign: int) -> None:
        if job.workload_class:
            _add(self._classes, (job.workload_class, job.run is not None), sign)
        if job.run is None:
            _add(self._waiting, job.tenant, sign)
            return
        place = job.run.placement
        per_pod_m = place.per_pod.accelerators_m
        for pool, pods in self._pods_by_pool(job.id, place, sign).items():
            holder = _Holder(job.tenant, job.user, place.accelerator, pool)
            held_m, jobs = self._held.get(holder, (0, 0))
            self._held[holder] = held_m + sign * pods * per_pod_m, jobs + sign
            if self._held[holder][1] == 0:
                del self._held[holder]
        _add(self._running, (job.tenant, job.namespace), sign)

    def _pods_by_pool(self, job: JobId, place: Placement, sign: int) -> Mapping[str, int]:
        """The pods of a placement by the pool of their node. They are taken from where they were counted, although a
        node may have changed its pool meanwhile."""
        if len(place.nodes) == 1:
            return {place.pool: 1}
        if sign < 0:
            return self._spread.pop(job, {place.pool: place.pods})
        pods = Counter(self._pool_of.get(name, place.pool) for name in place.nodes)
        if pods.keys() != {place.pool}:
            self._spread[job] = pods
        return pods

    def _count_nodes(self, snapshot: Snapshot) -> None:
        pools = {pool.name: pool for pool in snapshot.pools}
        gone, come = differing(self._snapshot.nodes, snapshot.nodes)
        if snapshot.pools is not self._snapshot.pools and snapshot.pools != self._snapshot.pools:
            gone, come = [], list(snapshot.nodes)
            self._nodes.clear()
        for nodes, sign in ((gone, -1), (come, 1)):
            for node in nodes:
                if sign > 0:
                    self._pool_of[node.name] = node.pool
                if node.ready and node.pool in pools:
                    count, total_m = self._nodes.get(node.pool, (0, 0))
                    size_m = sign * accelerators_m(pools[node.pool], node)
                    self._nodes[node.pool] = count + sign, total_m + size_m

    def _allocations(self, remarks: PoolRemarks) -> Allocations:
        by_type: dict[str, Counter[str]] = {}
        by_pool: dict[str, Counter[str]] = {}
        by_user: dict[str, dict[str, Counter[str]]] = {}
        taken_m: Counter[str] = Counter()
        for holder, (held_m, _) in sorted(self._held.items()):
            taken_m[holder.pool] += held_m
            by_type.setdefault(holder.tenant, Counter())[holder.accelerator] += held_m
            by_pool.setdefault(holder.tenant, Counter())[holder.pool] += held_m
            own = by_user.setdefault(holder.tenant, {}).setdefault(holder.user, Counter())
            own[holder.accelerator] += held_m
        running: Counter[str] = Counter()
        running_in: dict[str, set[str]] = {}
        for (tenant, namespace), jobs in self._running.items():
            running[tenant] += jobs
            running_in.setdefault(tenant, set()).add(namespace)
        pools: dict[str, PoolAllocation] = {}
        free_m: Counter[str] = Counter()
        for pool in self._snapshot.pools:
            nodes, size_m = self._nodes.get(pool.name, (0, 0))
            pools[pool.name] = PoolAllocation(
                nodes,
                size_m / 1000,
                taken_m[pool.name] / 1000,
                remarks.elsewhere.get(pool.name, HeldElsewhere()),
                remarks.overlaps.get(pool.name, ()),
                remarks.without_fabric.get(pool.name, 0),
            )
            free_m[pool.accelerator] += max(0, size_m - taken_m[pool.name])
        return Allocations(
            tenants={
                tenant.name: TenantAllocation(
                    _accelerators(by_type.get(tenant.name, {})),
                    _accelerators(by_pool.get(tenant.name, {})),
                    running[tenant.name],
                    self._waiting[tenant.name],
                    {user: _accelerators(held) for user, held in by_user.get(tenant.name, {}).items()},
                    tuple(sorted(running_in.get(tenant.name, ()))),
                )
                for tenant in self._snapshot.tenants
            },
            pools=pools,
            free_by_type=_accelerators(free_m),
        )


def allocations(snapshot: Snapshot) -> Allocations:
    """The allocations in a snapshot."""
    return AllocationCounts().follow(snapshot)


class _Holder(NamedTuple):
    tenant: str
    user: str
    accelerator: str
    pool: str


def accelerators_m(pool: Pool, node: Node) -> int:
    """What a node of this pool gives, in thousandths of accelerators."""
    size = node.capacity - pool.reserved
    return max(0, pool.cpu_accelerators_m(size.cpu_m) if pool.is_cpu else size.accelerators_m)


def _accelerators(held_m: Mapping[str, int]) -> dict[str, float]:
    return {name: count_m / 1000 for name, count_m in sorted(held_m.items())}


_T = TypeVar("_T", bound=Hashable)


def _add(counts: Counter[_T], key: _T, count: int) -> None:
    counts[key] += count
    if not counts[key]:
        del counts[key]
