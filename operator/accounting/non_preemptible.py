"""How much work that is not preemptible may begin, so that nobody's guarantee is out of reach for as long as others like.

What others borrowed of a guarantee is had back by stopping it. A TrainingJob with ``preemptible: false``, a replica of a
service and a pod of another controller are never stopped for it. So they begin only where their tenant's guarantee covers
them, together with what else the tenant holds that is not preemptible, or where every other tenant could still have its
guarantee beside them:

    it + sum over tenants of max(what they hold that is not preemptible, their guarantee) <= capacity of the type

Where somebody has a guarantee over all types ("*"), all are compared in exchange-rate units in the same way. Without
guarantees nothing is bounded: `borrowable` and `ceiling` of a tenant's quota are there for that.

Such jobs are offered to the scheduler in the order of their submission (replicas: of their service's), each beside all that
was offered before it, so that whatever it picks of them fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from busbar.kube.types import Tenant
from busbar.operator.accounting.allocations import accelerators_m
from busbar.scheduler import Job, JobId, JobKind, Node, Pool
from busbar.scheduler.fit.accelerators import accelerator

EPS = 1e-3
"""Thousandths of an accelerator: amounts by exchange rates are not exact."""
ALL = "*"
"""The row of a quota that is about all types together."""
Amounts = Mapping[str, float]
"""Thousandths of accelerators by type; by `ALL` thousandths of exchange-rate units."""


def guarantees(tenant: Tenant) -> Amounts:
    """What a tenant is guaranteed."""
    return {row.accelerator: 1000 * row.guaranteed for row in tenant.spec.quota or () if row.guaranteed}


def rate_of(kind: str) -> float:
    """Units of one accelerator of a type; 1 for a type without a data sheet."""
    known = accelerator(kind)
    return known.rate if known is not None else 1.0


@dataclass(frozen=True)
class _Limits:
    """What there is, and who is guaranteed how much of it."""

    pools: tuple[Pool, ...] = ()
    capacity: Amounts = field(default_factory=dict)
    guaranteed: Mapping[str, Amounts] = field(default_factory=dict)
    _known: dict[tuple[str, str], float] = field(default_factory=dict)

    def guarantee(self, tenant: str, kind: str) -> float:
        """Of one type; with `ALL` of all types, no more of each than there is."""
        known = self._known.get((tenant, kind))
        if known is None:
            known = self._known[tenant, kind] = self._guarantee(tenant, kind)
        return known

    def _guarantee(self, tenant: str, kind: str) -> float:
        rows = self.guaranteed.get(tenant) or {}
        if kind != ALL:
            return min(rows.get(kind, 0), self.capacity.get(kind, 0))
        own = {k: min(n, self.capacity.get(k, 0)) for k, n in rows.items() if k != ALL}
        return rows.get(ALL, 0) + _units(own)


class NonPreemptible:
    """Who holds how much that is not preemptible, and what more may begin."""

    def __init__(self) -> None:
        self._limits = _Limits()
        self._held: dict[str, Counter[str]] = {}
        """Amounts by tenant and type."""
        self._of: dict[JobId, tuple[str, Mapping[str, int]]] = {}
        """What each job counts with; one that waits with all types that it may take."""

    def set_limits(
        self, pools: Iterable[Pool], nodes: Iterable[Node], guaranteed: Mapping[str, Amounts]
    ) -> None:
        """What there is now, and what tenants are guaranteed of it."""
        known = {pool.name: pool for pool in pools}
        capacity = Counter[str]()
        for node in nodes:
            pool = known.get(node.pool)
            if pool is not None and node.ready:
                capacity[pool.accelerator] += accelerators_m(pool, node)
        self._limits = _Limits(tuple(known.values()), capacity, guaranteed)

    def forget(self, job: JobId) -> None:
        """The job counts no more."""
        tenant, amounts = self._of.pop(job, ("", {}))
        if amounts:
            held = self._held[tenant]
            held.subtract(amounts)
            if not any(held.values()):
                del self._held[tenant]

    def hold(self, job: Job) -> None:
        """The job has a place."""
        if job.run is not None:
            place = job.run.placement
            self._count(job, {place.accelerator: place.accelerators_m})

    def offer(self, job: Job) -> Job | None:
        """The job with the types and the number of pods that it may begin with; None: it has to wait."""
        needs = self._needs(job)
        one = {kind: need for kind, need in needs.items() if need > 0}
        if not one:
            return job
        free = needs.keys() - one.keys()  # a pod that asks for no cores takes none of a CPU pool's
        rooms = {kind: self.room(job.tenant, kind) for kind in one}
        most = {kind: int(min((rooms[kind] + EPS) / need, job.max_pods)) for kind, need in one.items()}
        kinds = tuple(kind for kind in sorted(one) if most[kind] >= job.min_pods)
        if not kinds and not free:
            return None
        pods = min(job.max_pods, *(most[kind] for kind in kinds)) if kinds else job.max_pods
        self._count(job, {kind: pods * one[kind] for kind in kinds})
        if len(kinds) < len(one):
            job = replace(job, accelerators=tuple(sorted({*kinds, *free})))
        return job if pods == job.max_pods else replace(job, max_pods=pods)

    def lacking(self, job: Job) -> str:
        """Why a job waits that was not offered, and what helps; it may be seconds old."""
        wants = []
        for kind, need in sorted(self._needs(job).items()):
            room = max(0.0, self.room(job.tenant, kind)) / 1000
            wants.append(f"{need * job.min_pods / 1000:g} {kind}, of which it may take {room:g}")
        helps = "It waits until such work has ended."
        if job.kind is JobKind.TRAINING:
            helps = "Make it preemptible to borrow more, or wait until such work has ended."
        return (
            f"It is not preemptible and needs {'; or '.join(wants)} without keeping other tenants from their guarantees. "
            f"{helps}"
        )

    def room(self, tenant: str, kind: str) -> float:
        """How many thousandths more of a type the tenant may hold that are not preemptible."""
        rate = rate_of(kind)
        return max(
            self._own_room(tenant, kind),
            self._own_room(tenant, ALL) / rate if ALL in self._limits.guaranteed.get(tenant, {}) else 0.0,
            min(
                self._common_room(tenant, kind, self._limits.capacity.get(kind, 0)),
                self._common_room(tenant, ALL, _units(self._limits.capacity)) / rate,
            ),
        )

    def _own_room(self, tenant: str, kind: str) -> float:
        return self._limits.guarantee(tenant, kind) - self._holds(tenant, kind)

    def _common_room(self, tenant: str, kind: str, capacity: float) -> float:
        """What all other guarantees leave; without one in such a row, placement alone is the limit."""
        limits = self._limits
        rows = ((name, rows.get(kind)) for name, rows in limits.guaranteed.items() if name != tenant)
        if not any(row and limits.guarantee(name, kind) for name, row in rows):
            return math.inf
        others = (self._held.keys() | self._limits.guaranteed.keys()) - {tenant}
        kept = sum(max(self._holds(name, kind), self._limits.guarantee(name, kind)) for name in others)
        return capacity - kept - self._holds(tenant, kind)

    def _holds(self, tenant: str, kind: str) -> float:
        held = self._held.get(tenant)
        if held is None:
            return 0.0
        return _units(held) if kind == ALL else held[kind]

    def _needs(self, job: Job) -> Mapping[str, int]:
        """What one pod takes, by each type that the job may take."""
        found: dict[str, int] = {}
        for pool in self._limits.pools:
            if job.accelerators and pool.accelerator not in job.accelerators:
                continue
            if job.pools and pool.name not in job.pools:
                continue
            if pool.tenants is not None and job.tenant not in pool.tenants:
                continue
            asked = job.per_pod
            amount_m = pool.cpu_accelerators_m(asked.cpu_m) if pool.is_cpu else asked.accelerators_m
            found[pool.accelerator] = max(found.get(pool.accelerator, 0), amount_m)
        return found

    def _count(self, job: Job, amounts: Mapping[str, int]) -> None:
        self.forget(job.id)
        self._of[job.id] = job.tenant, amounts
        self._held.setdefault(job.tenant, Counter()).update(amounts)


def _units(amounts: Amounts) -> float:
    return sum(n * rate_of(kind) for kind, n in amounts.items())
