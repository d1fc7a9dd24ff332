"""What the mix decides over: columns, limits, the cost of changes, and the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ..errors import ServingModelError

TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Column:
    """One way to run a replica."""

    key: str
    pool: str
    cost_per_h: float
    rates: tuple[float, ...]
    """Requests per second by bucket; 0: it cannot serve that bucket within the SLO."""
    accelerators: int = 1
    watts: float = 0.0
    power_domain: str = ""
    failure_domain: str = ""
    power_cap: float = 1.0
    """Part of the boards' highest watts at which it runs; `watts` and `rates` are those under it."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cost_per_h) and self.cost_per_h >= 0):
            raise ServingModelError(f"{self.key}: the price is {self.cost_per_h:g} per hour; it must be >= 0")
        if any(not math.isfinite(rate) or rate < 0 for rate in self.rates):
            raise ServingModelError(f"{self.key}: a rate is negative or not a number")
        if self.accelerators < 1:
            raise ServingModelError(f"{self.key}: a replica needs at least one accelerator")
        if not 0 < self.power_cap <= 1:
            raise ServingModelError(f"{self.key}: a power cap of {self.power_cap:g} is not in (0, 1]")


class LimitKind(StrEnum):
    """What a row protects."""

    QUOTA = "quota"
    POWER = "power"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Row:
    """One limit over several pools."""

    name: str
    """For people: what it is."""
    weights: Mapping[str, float]
    """What one replica takes of it, by pool; those of the key of a column come before those of its pool."""
    most: float
    kind: LimitKind

    def weight(self, column: Column) -> float:
        """What one replica of this column takes of it."""
        return self.weights.get(column.key, self.weights.get(column.pool, 0.0))

    def used(self, columns: Iterable[Column], replicas: Mapping[str, int]) -> float:
        """What these replicas, by column, take of it."""
        return sum(self.weight(c) * replicas.get(c.key, 0) for c in columns)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the replicas must stay within. Missing entries do not limit."""

    stock: Mapping[str, int] = field(default_factory=dict)
    """Accelerators per pool."""
    quota: int | None = None
    """Accelerators over all pools."""
    watts: Mapping[str, float] = field(default_factory=dict)
    """Per power domain."""
    budget_per_h: float | None = None
    min_replicas: int = 0
    min_per_domain: Mapping[str, int] = field(default_factory=dict)
    """Replicas per failure domain."""
    min_domains: int = 0
    """Failure domains that hold a replica, at least. Columns without a domain are in none."""
    domain_reserve: float = 0.0
    """The part of the load that the replicas outside of any one failure domain must carry, too (`domain_loss.py`)."""
    rows: tuple[Row, ...] = ()
    """Whatever else is limited."""

    def over_domains(self, columns: Iterable[Column]) -> Limits:
        """With no more failure domains than have stock for these columns, and without a reserve where that is one."""
        domains = {c.failure_domain for c in columns if self.stock.get(c.pool, 1) > 0} - {""}
        return replace(
            self,
            min_domains=min(self.min_domains, len(domains)),
            domain_reserve=self.domain_reserve if len(domains) > 1 else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Effort:
    """Where the solver stops. Nodes count work, so they give the same answer on every machine."""

    nodes: int | None = 500
    seconds: float | None = 0.25
    """For the whole answer, of which the search for the best mix gets what first mixes leave. None where the same input must give
    the same bytes (the simulator)."""
    gap: float = 1e-3


@dataclass(frozen=True, slots=True)
class Switching:
    """What a change costs, as money per hour, so that small gains change nothing."""

    now: Mapping[str, int] = field(default_factory=dict)
    """Replicas by column, starting ones included."""
    start_weight: float = 0.0
    """Part of a replica's hourly cost that each new one is charged."""
    drop_weight: float = 0.0
    """Part of a replica's hourly cost that each dropped one is charged."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Replicas by column, and where each bucket goes."""

    replicas: Mapping[str, int]
    weights: tuple[Mapping[str, float], ...]
    """Per bucket: column -> share of its requests. Empty for a bucket without load or that nothing serves."""
    cost_per_h: float
    objective: float
    carried: float = 1.0
    """Part of the load, in replica-seconds on its best column, that is carried."""
    impossible: tuple[int, ...] = ()
    """Buckets with load that no column can serve within the SLO; they are not carried."""
    fullest: float = 0.0
    """Only from `spread`: the load of the fullest column over what its replicas sustain."""
    optimal: bool = True
    """False: a limit struck; this is the best that was found."""


def capped_key(pool: str, cap: float) -> str:
    """The key of the column of a pool under a power cap."""
    return pool if cap >= 1 else f"{pool}@{100 * cap:.0f}%"


def routing_shares(columns: Sequence[Column], mix: Mix) -> tuple[dict[str, float], ...]:
    """Per bucket, the share of each column that has replicas and serves the bucket within the SLO, also where that is 0."""
    live = [c for c in columns if mix.replicas.get(c.key, 0) > 0]
    return tuple(
        {c.key: weights.get(c.key, 0.0) for c in live if c.rates[bucket] > 0}
        for bucket, weights in enumerate(mix.weights)
    )


def domains_of(columns: Sequence[Column], replicas: Mapping[str, int] | None = None) -> set[str]:
    """The failure domains of these columns; with `replicas`, only those that hold one."""
    return {
        c.failure_domain
        for c in columns
        if c.failure_domain and (replicas is None or replicas.get(c.key, 0) > 0)
    }


def without(limits: Limits, kind: LimitKind) -> Limits:
    """The limits less the rows of one kind. `budget_per_h` is a budget, and `watts` are power."""
    return replace(
        limits,
        rows=tuple(row for row in limits.rows if row.kind is not kind),
        watts={} if kind is LimitKind.POWER else limits.watts,
        budget_per_h=None if kind is LimitKind.BUDGET else limits.budget_per_h,
    )


def allowed(columns: Sequence[Column], replicas: Mapping[str, int], limits: Limits) -> bool:
    """Whether these replicas keep all limits, whatever they carry."""
    count = {c.key: replicas.get(c.key, 0) for c in columns}
    if len(domains_of(columns, replicas)) < limits.min_domains:
        return False
    return all(
        low - TOLERANCE <= sum(weight * count[c.key] for c, weight in row) <= high + TOLERANCE
        for row, low, high in limit_rows(columns, limits)
    )


def too_tight(columns: Sequence[Column], limits: Limits) -> list[str]:
    """The limits of which each alone leaves no room for the least number of replicas, with what these take at least."""
    least = limits.min_replicas
    room = _least(columns, limits, lambda c: 0.0)[0]
    if room < least:
        return [f"the pools have room for {room} replicas of at least {least}"]
    measures: list[tuple[str, float | None, Callable[[Column], float]]] = [
        ("the quota of accelerators", limits.quota, lambda c: c.accelerators),
        ("the budget per hour", limits.budget_per_h, lambda c: c.cost_per_h),
        *(
            (f"the power{' of ' * bool(domain)}{domain} in watts", watts, _watts_of(domain))
            for domain, watts in sorted(limits.watts.items())
        ),
        *((row.name, row.most, row.weight) for row in limits.rows),
    ]
    replicas = f"{least} replica{'s take' if least > 1 else ' takes'}"
    return [
        f"{name} is {most:g}, and {replicas} {need:g} at least"
        for name, most, weight in measures
        if most is not None and (need := _least(columns, limits, weight)[1]) > most + TOLERANCE
    ]


def _watts_of(domain: str) -> Callable[[Column], float]:
    return lambda column: column.watts if column.power_domain == domain else 0.0


def _least(columns: Sequence[Column], limits: Limits, weight: Callable[[Column], float]) -> tuple[int, float]:
    """How many of the least number of replicas the stock allows, and the least that they can weigh."""
    left, number, total = dict(limits.stock), 0, 0.0
    for column in sorted(columns, key=lambda c: (weight(c), c.accelerators, c.key)):
        stock = left.get(column.pool)
        count = limits.min_replicas - number
        if stock is not None:
            count = min(count, stock // column.accelerators)
            left[column.pool] = stock - count * column.accelerators
        number, total = number + count, total + count * weight(column)
    return number, total


def held_back_by(columns: Sequence[Column], replicas: Mapping[str, int], limits: Limits) -> list[str]:
    """The names of the rows of which not one more replica of some column has room."""
    used = {row.name: row.used(columns, replicas) for row in limits.rows}
    names = [
        row.name
        for row in limits.rows
        if any(used[row.name] + row.weight(c) > row.most + TOLERANCE for c in columns)
    ]
    cost = sum(c.cost_per_h * replicas.get(c.key, 0) for c in columns)
    over = (
        limits.budget_per_h is not None
        and cost + max(c.cost_per_h for c in columns) > limits.budget_per_h + TOLERANCE
    )
    return [*names, "the budget per hour"] if over else names


def limit_rows(
    columns: Sequence[Column], limits: Limits
) -> list[tuple[list[tuple[Column, float]], float, float]]:
    """Each limit as (terms, low, high) over replica counts."""
    rows: list[tuple[list[tuple[Column, float]], float, float]] = []
    for pool, stock in sorted(limits.stock.items()):
        rows.append(
            ([(c, float(c.accelerators)) for c in columns if c.pool == pool], -math.inf, float(stock))
        )
    if limits.quota is not None:
        rows.append(([(c, float(c.accelerators)) for c in columns], -math.inf, float(limits.quota)))
    for domain, watts in sorted(limits.watts.items()):
        rows.append(([(c, c.watts) for c in columns if c.power_domain == domain], -math.inf, watts))
    if limits.budget_per_h is not None:
        rows.append(([(c, c.cost_per_h) for c in columns], -math.inf, limits.budget_per_h))
    for one in limits.rows:
        weights = [(c, weight) for c in columns if (weight := one.weight(c))]
        rows.append((weights, -math.inf, one.most))
    if limits.min_replicas > 0:
        rows.append(([(c, 1.0) for c in columns], float(limits.min_replicas), math.inf))
    for domain, least in sorted(limits.min_per_domain.items()):
        rows.append(([(c, 1.0) for c in columns if c.failure_domain == domain], float(least), math.inf))
    return rows
