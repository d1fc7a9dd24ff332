"""One power cap for each pool of a service: replicas at lower limits where watts bind, at higher ones where there is room. Pure.

    ways    each pool's column without a cap, and one for each cap under which its replicas can run
    caps    by pool, the cap of all of its replicas; a pool that is left out has none

A cap is lowered for two reasons: the replicas that are wanted draw more than their power domains leave (`within`), or more
replicas at lower limits carry load that the watts do not let fewer carry (`carrying`). The mix (`mix.py`) says which caps
carry it best; as all replicas of a pool have one cap, those that it names for a pool are tried for the whole pool. A cap is
raised as far as the replicas that are wanted have watts for it (`lifted`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import ServingModelError
from .columns import TOLERANCE, Column, Effort, LimitKind, Limits, Mix, Row
from .mix import CARRIED_MORE, cheapest

Caps = Mapping[str, float]
"""By pool, below 1."""


@dataclass(frozen=True, slots=True)
class Ways:
    """The columns of a service by pool and cap."""

    by_pool: Mapping[str, tuple[Column, ...]]
    """The highest cap first, beginning with the column without one."""

    @classmethod
    def of(cls, columns: Iterable[Column]) -> Ways:
        found: dict[str, list[Column]] = {}
        for column in sorted(columns, key=lambda c: (c.pool, -c.power_cap)):
            found.setdefault(column.pool, []).append(column)
        return cls({pool: tuple(own) for pool, own in found.items()})

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(column for own in self.by_pool.values() for column in own)

    def known(self, caps: Caps) -> dict[str, float]:
        """These caps without those for which there is no column."""
        return {
            pool: cap
            for pool, cap in caps.items()
            if cap < 1 and any(c.power_cap == cap for c in self.by_pool.get(pool, ()))
        }

    def under(self, caps: Caps) -> tuple[Column, ...]:
        """One column for each pool, its key the pool's name: under its cap."""
        return tuple(replace(self.at(pool, caps), key=pool) for pool in self.by_pool)

    def at(self, pool: str, caps: Caps) -> Column:
        """The column of a pool under its cap."""
        own, cap = self.by_pool[pool], caps.get(pool, 1.0)
        own = self.by_pool[pool]
        return next((c for c in own if c.power_cap == cap), own[0])

    def step(self, caps: Caps, pool: str, *, up: bool) -> dict[str, float] | None:
        """The caps with that of one pool a step higher or lower; None: there is no such step."""
        own = [c.power_cap for c in self.by_pool[pool]]
        at = own.index(self.at(pool, caps).power_cap) + (-1 if up else 1)
        if not 0 <= at < len(own):
            return None
        found = dict(caps) | {pool: own[at]}
        return {name: cap for name, cap in found.items() if cap < 1}


def weighed(rows: Iterable[Row], columns: Iterable[Column]) -> tuple[Row, ...]:
    """The rows with what columns under caps take of power: their watts, in place of what their pools take without caps."""
    capped = [c for c in columns if c.power_cap < 1]
    return tuple(
        replace(row, weights={**row.weights, **{c.key: c.watts for c in capped if c.pool in row.weights}})
        if row.kind is LimitKind.POWER
        else row
        for row in rows
    )


def decided(columns: Iterable[Column]) -> tuple[Column, ...]:
    """These columns as if they had no caps: whoever decides over them has no other cap to choose."""
    return tuple(replace(column, power_cap=1.0) for column in columns)


def within(ways: Ways, caps: Caps, replicas: Mapping[str, int], rows: Sequence[Row]) -> dict[str, float]:
    """The caps, lowered until these replicas (by pool) keep the rows of power, or as far as that helps. Of the pools on a row
    that is exceeded, the one goes down a step that loses least of its rate for a watt."""
    found = dict(caps)
    powers = [row for row in rows if row.kind is LimitKind.POWER]
    while (over := _exceeded(ways, found, replicas, powers)) is not None:
        steps = [
            (_loss(ways, found, step, pool), pool, step)
            for pool in sorted(over.weights.keys() & ways.by_pool.keys())
            if replicas.get(pool, 0) and (step := ways.step(found, pool, up=False)) is not None
        ]
        if not steps:
            break
        found = min(steps, key=lambda one: one[:2])[2]
    return found


def fits(ways: Ways, caps: Caps, replicas: Mapping[str, int], rows: Sequence[Row]) -> bool:
    """Whether these replicas keep the rows of power under these caps."""
    powers = [row for row in rows if row.kind is LimitKind.POWER]
    return _exceeded(ways, caps, replicas, powers) is None


def lifted(
    ways: Ways,
    caps: Caps,
    replicas: Mapping[str, int],
    rows: Sequence[Row],
    short: Iterable[str] = (),
) -> dict[str, float]:
    """The caps, raised as far as these replicas keep the rows of power; the step that gains most rate for a watt comes first.
    Pools without a replica have no cap.

    Args:
        short: names of rows on which others lack watts: there nothing is raised.
    """
    found, lacking = {pool: cap for pool, cap in caps.items() if replicas.get(pool, 0)}, set(short)
    powers = [row for row in rows if row.kind is LimitKind.POWER]
    kept = {pool for row in powers if row.name in lacking for pool in row.weights}
    while steps := [
        (-_loss(ways, step, found, pool), pool, step)
        for pool in sorted(found.keys() - kept)
        if (step := ways.step(found, pool, up=True)) is not None
        and _exceeded(ways, step, replicas, [row for row in powers if pool in row.weights]) is None
    ]:
        found = min(steps, key=lambda one: one[:2])[2]
    return found


def carrying(
    ways: Ways,
    caps: Caps,
    load: Sequence[float],
    limits: Limits,
    live: Mapping[str, int],
    effort: Effort,
) -> dict[str, float]:
    """The caps under which more of a load is carried; the same caps if none do so by `CARRIED_MORE`.

    Args:
        load: requests per second by bucket.
        limits: with the rows of power without caps.
        live: replicas by pool, which stay.

    Raises:
        ServingModelError: no replicas keep the limits, whatever the caps.
        SolverError: as `cheapest`.
    """
    every = ways.columns
    if all(column.power_cap == 1 for column in every):
        return dict(caps)
    offered = cheapest(every, load, replace(limits, rows=weighed(limits.rows, every)), effort=effort)
    best, best_mix = dict(caps), _mix(ways, caps, load, limits, live, effort)
    for other in _of_pools(ways, caps, offered):
        mix = _mix(ways, other, load, limits, live, effort)
        if mix is None:
            continue
        if best_mix is None or _better(mix, best_mix):
            best, best_mix = other, mix
    if best_mix is None or best == dict(caps):
        return best
    return lifted(ways, best, best_mix.replicas, limits.rows)


def _better(mix: Mix, than: Mix) -> bool:
    more = mix.carried - than.carried
    return more > CARRIED_MORE or (more > -TOLERANCE and mix.cost_per_h < than.cost_per_h - TOLERANCE)


def _of_pools(ways: Ways, caps: Caps, offered: Mix) -> Iterator[dict[str, float]]:
    """One cap for each pool: the highest, and the lowest, under which the mix has replicas there."""
    for choose in (max, min):
        found = dict(caps)
        for pool, own in ways.by_pool.items():
            used = [c.power_cap for c in own if offered.replicas.get(c.key, 0)]
            if used:
                found[pool] = choose(used)
        yield {pool: cap for pool, cap in found.items() if cap < 1}


def _mix(
    ways: Ways, caps: Caps, load: Sequence[float], limits: Limits, live: Mapping[str, int], effort: Effort
) -> Mix | None:
    """The cheapest mix under these caps beside what is live; None: that does not keep the limits."""
    columns = ways.under(caps)
    rows = weighed(limits.rows, columns)
    try:
        return cheapest(decided(columns), load, replace(limits, rows=rows), effort=effort, least=live)
    except ServingModelError:
        return None


def _exceeded(ways: Ways, caps: Caps, replicas: Mapping[str, int], rows: Sequence[Row]) -> Row | None:
    """The first of these rows that the replicas exceed."""
    columns = ways.under(caps)
    over = (row for row in weighed(rows, columns) if row.used(columns, replicas) > row.most + TOLERANCE)
    return next(over, None)


def _loss(ways: Ways, before: Caps, after: Caps, pool: str) -> float:
    """What a lower cap takes of a replica's rate, as a part of it, for each watt."""
    high, low = ways.at(pool, before), ways.at(pool, after)
    lost = sum(1 - less / more for more, less in zip(high.rates, low.rates, strict=True) if more > 0)
    return lost / max(high.watts - low.watts, TOLERANCE)
