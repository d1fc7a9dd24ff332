"""What each tenant and pool has allocated, from a snapshot: for their statuses and the counting of usage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from busbar.scheduler import Snapshot


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


@dataclass(frozen=True)
class HeldElsewhere:
    """What pods that belong to no job hold of one pool (pools/held_elsewhere.py)."""

    accelerators: float = 0.0
    pods: int = 0
    namespaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class PoolAllocation:
    """One pool at one moment, in accelerators."""

    nodes: int = 0
    capacity: float = 0.0
    allocated: float = 0.0
    elsewhere: HeldElsewhere = field(default_factory=HeldElsewhere)


@dataclass(frozen=True)
class Allocations:
    """All allocations at one moment."""

    tenants: Mapping[str, TenantAllocation] = field(default_factory=dict)
    pools: Mapping[str, PoolAllocation] = field(default_factory=dict)
    free_by_type: Mapping[str, float] = field(default_factory=dict)


def allocations(snapshot: Snapshot, elsewhere: Mapping[str, HeldElsewhere] | None = None) -> Allocations:
    """The allocations in a snapshot, and by pool what pods of no job hold."""
    foreign, nothing = elsewhere or {}, HeldElsewhere()
    by_type: dict[str, dict[str, float]] = {}
    by_pool: dict[str, dict[str, float]] = {}
    by_user: dict[str, dict[str, dict[str, float]]] = {}
    running: dict[str, int] = {}
    running_in: dict[str, set[str]] = {}
    waiting: dict[str, int] = {}
    taken: dict[str, float] = {}
    for job in snapshot.jobs:
        if job.run is None:
            waiting[job.tenant] = waiting.get(job.tenant, 0) + 1
            continue
        place, count = job.run.placement, job.run.placement.accelerators_m / 1000
        running[job.tenant] = running.get(job.tenant, 0) + 1
        running_in.setdefault(job.tenant, set()).add(job.namespace)
        taken[place.pool] = taken.get(place.pool, 0.0) + count
        for table, key in ((by_type, place.accelerator), (by_pool, place.pool)):
            row = table.setdefault(job.tenant, {})
            row[key] = row.get(key, 0.0) + count
        own = by_user.setdefault(job.tenant, {}).setdefault(job.user, {})
        own[place.accelerator] = own.get(place.accelerator, 0.0) + count
    pools: dict[str, PoolAllocation] = {}
    free: dict[str, float] = {}
    for pool in snapshot.pools:
        ready = [n for n in snapshot.nodes if n.pool == pool.name and n.ready]
        sizes = [(n.capacity - pool.reserved) for n in ready]
        counts = [pool.cpu_accelerators_m(s.cpu_m) if pool.is_cpu else s.accelerators_m for s in sizes]
        capacity = sum(max(0, c) for c in counts) / 1000
        pools[pool.name] = PoolAllocation(
            len(ready),
            round(capacity, 3),
            round(taken.get(pool.name, 0.0), 3),
            foreign.get(pool.name, nothing),
        )
        free[pool.accelerator] = free.get(pool.accelerator, 0.0) + max(
            0.0, capacity - taken.get(pool.name, 0.0)
        )
    names = {t.name for t in snapshot.tenants}
    return Allocations(
        tenants={
            name: TenantAllocation(
                {k: round(v, 3) for k, v in sorted(by_type.get(name, {}).items())},
                {k: round(v, 3) for k, v in sorted(by_pool.get(name, {}).items())},
                running.get(name, 0),
                waiting.get(name, 0),
                by_user.get(name, {}),
                tuple(sorted(running_in.get(name, ()))),
            )
            for name in names
        },
        pools=pools,
        free_by_type=free,
    )
