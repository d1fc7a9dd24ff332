"""How many replicas of a service the quota and budgets of its tenant, its power domains and its pools have room for, by pool.

The rows that the mix of a service must keep (`autoscale.columns.Row`), from the snapshot that the planner decides on:

- quota: each row of the tenant's quota, less what the tenant's other work holds. What the service's replicas hold is its own.
- power: each domain that limits and that all nodes of a pool hang on, less what everybody else on it draws. A pool whose nodes
  hang on several domains counts only in those above all of them. Where replicas of a pool can run under power caps, what
  one of them draws under any cap is told, too.
- budget: what is left of a budget must pay the tenant's other work and the service for `PAID_H` hours, or until the period ends
  if that is sooner. A replica that is not paid for so long is not started. Money is at the pools' prices, accelerators count
  whole, and energy is what the table has for the class of the job there, or else the nameplate.
- stock: the nodes' capacity, less work of others that cannot be stopped.

Work that can be stopped counts as room: whether the service has the right to its place is the planner's to say. So this is the
most that the planner may admit, not a promise.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ..autoscale.columns import LimitKind, Row
from ..candidates.capped import PowerCaps
from ..candidates.draw import Draws
from ..fairness.quota import limit
from ..model.snapshot import Job, JobKind, Node, Placement, Pool, Quota, Snapshot
from ..model.table import TableView
from ..placement.feeds import NOW, Feeds

PAID_H = 1.0
"""So long a replica must earn its start (`FleetSettings.switch_horizon_s`), and so long it must be paid."""
_LEAST_H = 1 / 60
"""A period that ends sooner than this counts as this long."""


class Spent(StrEnum):
    """What a budget limits."""

    ACCELERATOR_HOURS = "accelerator-hours"
    COST = "cost"
    KILOWATT_HOURS = "kWh"


@dataclass(frozen=True, slots=True)
class BudgetLeft:
    """What is left of one limit of a tenant's budget."""

    period: str
    of: Spent
    left: float
    hours: float
    """Until the period ends."""


@dataclass(frozen=True, slots=True)
class BoardDraw:
    """What the boards of one replica draw."""

    idle_w: float
    most_w: float

    def at(self, power_cap: float) -> int:
        """Watts that it adds to its power domains at most, as the planner counts them (`Draws.per_pod`)."""
        return math.ceil(max(0.0, power_cap * self.most_w - self.idle_w))


@dataclass(frozen=True, slots=True)
class ServiceRoom:
    """What a service's replicas may be, its own of now included."""

    stock: Mapping[str, int]
    """Replicas by pool."""
    rows: tuple[Row, ...] = ()
    zones: Mapping[str, str] = field(default_factory=dict)
    """The zone of each pool whose nodes are all in one."""
    boards: Mapping[str, BoardDraw] = field(default_factory=dict)
    """Of one replica, in the pools where replicas can run under power caps: all nodes take limits, and each replica has its node
    to itself or it is known of all nodes who holds which board."""
    short: frozenset[str] = frozenset()
    """The names of the rows of power domains on which waiting work lacks watts."""


class ServiceRooms:
    """What one snapshot leaves to services."""

    def __init__(self, snapshot: Snapshot, lacking: Iterable[str] = ()) -> None:
        """
        Args:
            lacking: names of power domains on which waiting jobs lack watts.
        """
        self._lacking = frozenset(map(power_row, lacking))
        self._pools = {pool.name: pool for pool in snapshot.pools}
        self._tenants = {tenant.name: tenant for tenant in snapshot.tenants}
        self._table = TableView(snapshot.table)
        self._draws = Draws(snapshot, self._table)
        self._feeds = Feeds(snapshot, self._table)
        self._nodes: dict[str, list[Node]] = {name: [] for name in self._pools}
        for node in snapshot.nodes:
            if node.pool in self._nodes:
                self._nodes[node.pool].append(node)
        sizes = {name: [n.capacity.accelerators_m for n in nodes] for name, nodes in self._nodes.items()}
        largest_m = {name: max(own) for name, own in sizes.items() if own}
        self._caps = PowerCaps(snapshot, self._draws, largest_m)
        self._held: Counter[tuple[str, str, str]] = Counter()
        """Thousandths of accelerators, by tenant, service ("" for other work) and type."""
        self._fixed: dict[str, list[tuple[str, Placement]]] = {}
        """By node: the services ("" for other work) and places of what cannot be stopped."""
        self._drawn: Counter[tuple[int, str]] = Counter()
        """Watts by domain and service."""
        self._spending: defaultdict[tuple[str, str, Spent], float] = defaultdict(float)
        """Per hour, by tenant, service and what of."""
        for job in snapshot.jobs:
            if job.run is not None:
                self._count(job, job.run.placement)

    def _count(self, job: Job, place: Placement) -> None:
        self._held[job.tenant, job.service, place.accelerator] += place.accelerators_m
        key, cap = place.key, place.power_cap
        found = self._table.estimate(
            job.workload_class, key, place.mode, place.accelerators_m, job.tenant, cap
        )
        each = self._per_hour(place.pool, place.accelerators_m / 1000, self._draws.watts(key, found, cap))
        for what, amount in each.items():
            self._spending[job.tenant, job.service, what] += amount
        counted = self._draws.counted(job, place)
        if counted.watts:
            self._feeds.take(counted, -1, -1)
            for name in place.nodes:
                for number in self._feeds.chains.get(name, ()):
                    self._drawn[number, job.service] += counted.watts
        if not job.yields and (job.kind is JobKind.SERVING or not job.preemptible):
            for name in place.nodes:
                self._fixed.setdefault(name, []).append((job.service, place))

    def of(self, replica: Job, pools: Iterable[str]) -> ServiceRoom:
        """The room of the service that this replica belongs to, in some pools."""
        sizes = self._sizes(replica, pools)
        stock = {name: self._stock(name, size, replica.service) for name, size in sizes.items()}
        zones = {name: zone for name in sizes if (zone := self._zone(name))}
        boards = {
            name: draw for name, size in sizes.items() if (draw := self._boards(name, size)) is not None
        }
        rows = (*self._quotas(replica, sizes), *self._powers(replica, sizes))
        return ServiceRoom(stock, rows, zones, boards, self._lacking)

    def paid(self, replica: Job, pools: Iterable[str], budgets: Iterable[BudgetLeft]) -> tuple[Row, ...]:
        """A row for each limit of the tenant's budgets: what it pays per hour, less what the tenant's other work takes."""
        each = {
            name: self._per_hour(name, size / 1000, self._table.nameplate_watts(self._pools[name].key))
            for name, size in self._sizes(replica, pools).items()
        }
        rows = []
        for budget in budgets:
            hours = min(PAID_H, max(budget.hours, _LEAST_H))
            weights = {name: amounts[budget.of] for name, amounts in each.items() if amounts[budget.of] > 0}
            others = sum(
                amount
                for (tenant, service, what), amount in self._spending.items()
                if tenant == replica.tenant and service != replica.service and what is budget.of
            )
            if weights:
                name = f"the tenant's budget of {budget.of} a {budget.period}"
                rows.append(Row(name, weights, budget.left / hours - others, LimitKind.BUDGET))
        return tuple(rows)

    def _per_hour(self, pool: str, accelerators: float, watts: float) -> dict[Spent, float]:
        """What these accelerators take of a budget in an hour."""
        known = self._pools.get(pool)
        price = known.price_per_hour if known is not None else 0.0
        return {
            Spent.ACCELERATOR_HOURS: accelerators,
            Spent.COST: accelerators * price,
            Spent.KILOWATT_HOURS: accelerators * watts / 1000,
        }

    def _sizes(self, replica: Job, pools: Iterable[str]) -> dict[str, int]:
        """Thousandths of accelerators of one replica, by those of the pools that can hold it."""
        known = sorted(set(pools) & self._pools.keys())
        return {name: size for name in known if (size := _size_m(replica, self._pools[name])) > 0}

    def _zone(self, pool: str) -> str:
        """The zone that all nodes of a pool are in; "": there is none."""
        zones = {node.topology[0] if node.topology else "" for node in self._nodes[pool]}
        return zones.pop() if len(zones) == 1 else ""

    def _boards(self, name: str, size_m: int) -> BoardDraw | None:
        """None: replicas there cannot run under power caps."""
        pool = self._pools[name]
        fills = size_m == self._caps.whole_m.get(name)
        able = all(node.limits_boards and (fills or node.tells_boards) for node in self._nodes[name])
        if not able or not self._caps.nodes(pool, 1, size_m):
            return None
        idle_w, most_w = self._table.idle_watts(pool.key), self._table.nameplate_watts(pool.key)
        return BoardDraw(size_m * idle_w / 1000, size_m * most_w / 1000) if most_w > idle_w else None

    def _stock(self, pool: str, size_m: int, service: str) -> int:
        cpu = self._pools[pool]
        count = 0
        for node in self._nodes[pool]:
            fixed = self._fixed.get(node.name, ())
            own = sum(of == service for of, _ in fixed)
            whole = (
                cpu.cpu_accelerators_m(node.capacity.cpu_m) if cpu.is_cpu else node.capacity.accelerators_m
            )
            taken = sum(place.per_pod.accelerators_m for of, place in fixed if of != service)
            count += max(0, whole - taken) // size_m if node.ready else own
        return count

    def _quotas(self, replica: Job, sizes: Mapping[str, int]) -> Iterable[Row]:
        tenant = self._tenants.get(replica.tenant)
        for quota in tenant.quotas if tenant is not None else ():
            weights = {
                name: weight
                for name, size in sizes.items()
                if (weight := self._counts(quota, name, size)) > 0
            }
            others = sum(
                self._amount(quota, kind, held_m)
                for (of, service, kind), held_m in self._held.items()
                if of == replica.tenant and service != replica.service
            )
            if weights:
                kind = "accelerators" if quota.accelerator == "*" else quota.accelerator
                yield Row(
                    f"the tenant's quota of {kind}", weights, (limit(quota) - others) / 1000, LimitKind.QUOTA
                )

    def _counts(self, quota: Quota, pool: str, size_m: int) -> float:
        return self._amount(quota, self._pools[pool].accelerator, size_m) / 1000

    def _amount(self, quota: Quota, kind: str, amount_m: float) -> float:
        """What an amount of a type counts on a quota row, in its thousandths."""
        if quota.accelerator == "*":
            return amount_m * self._table.rate(kind)
        return amount_m if quota.accelerator == kind else 0.0

    def _powers(self, replica: Job, sizes: Mapping[str, int]) -> Iterable[Row]:
        rows: dict[int, dict[str, float]] = {}
        for name, size in sizes.items():
            pool = self._pools[name]
            watts = self._draws.per_pod(name, pool.accelerator, size, self._table.nameplate_watts(pool.key))
            chains = [set(self._feeds.chains.get(node.name, ())) for node in self._nodes[name]]
            for number in set.intersection(*chains) if chains and watts else ():
                rows.setdefault(number, {})[name] = float(watts)
        for number, weights in sorted(rows.items()):
            domain, left = self._feeds.domains[number], self._feeds.left[NOW][number]
            left = min(left, 0) if domain.closed else left
            own = self._drawn[number, replica.service]
            yield Row(power_row(domain.name), weights, float(left + own), LimitKind.POWER)


def power_row(domain: str) -> str:
    """The name of the row of a power domain."""
    return f"the power of domain {domain}"


def _size_m(replica: Job, pool: Pool) -> int:
    """Thousandths of accelerators that one replica takes of a pool."""
    if pool.is_cpu and replica.per_pod.cpu_m:
        return pool.cpu_accelerators_m(replica.per_pod.cpu_m)
    return replica.per_pod.accelerators_m
