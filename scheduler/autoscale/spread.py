"""Where the requests of each bucket go, over the replicas that there are: what keeps the fullest column least full.

A bucket's shares over the columns sum to one, and a column's load is what its replicas take of all buckets (`mix.py` has the
program); nothing here is an integer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .. import highs
from ..errors import ServingModelError
from .columns import TOLERANCE, Column, Mix

Shares = list[tuple[int, str, int]]
"""(bucket, column, variable)."""


def spread(columns: Sequence[Column], load: Sequence[float], replicas: Mapping[str, int]) -> Mix:
    """Routing weights over the replicas that there are: what keeps the fullest column least full.

    `carried` is 1 if no column is overloaded, else the part that each takes without overload."""
    check(columns, load)
    live = [c for c in columns if replicas.get(c.key, 0) > 0]
    level = Level(live, load)
    level.fill(replicas)
    cost = sum(c.cost_per_h * replicas.get(c.key, 0) for c in columns)
    fullest = level.fullest if math.isfinite(level.fullest) else 0.0
    nowhere = tuple(b for b, rate in enumerate(load) if rate > 0 and not any(c.rates[b] > 0 for c in live))
    carried = min(1.0, 1 / fullest) if fullest > 0 else 1.0
    weights = weights_of(level.shares, level.x, len(load))
    return Mix(dict(replicas), weights, cost, cost, carried, nowhere, fullest=fullest)


def capacity(columns: Sequence[Column], shares: Sequence[float], replicas: Mapping[str, int]) -> float:
    """Requests per second, `shares` of them in each bucket, that these replicas carry within the SLO."""
    return carried_at(spread(columns, shares, replicas), shares)


def carried_at(level: Mix, shares: Sequence[float]) -> float:
    """The same from what `spread` said for these shares."""
    return sum(shares) / level.fullest if level.fullest > 0 else 0.0


def check(columns: Sequence[Column], load: Sequence[float]) -> None:
    """Refuse what no program can be made of.

    Raises:
        ServingModelError: no columns, two of one name, rates that are not those of the load's buckets, or a bad load.
    """
    if not columns:
        raise ServingModelError("there is no pool to choose from")
    keys = [c.key for c in columns]
    if len(set(keys)) != len(keys):
        raise ServingModelError(f"a column is named twice: {', '.join(sorted(keys))}")
    for column in columns:
        if len(column.rates) != len(load):
            raise ServingModelError(
                f"{column.key} has rates for {len(column.rates)} buckets, the load has {len(load)}"
            )
    if any(not math.isfinite(rate) or rate < 0 for rate in load):
        raise ServingModelError("the load of a bucket is negative or not a number")


def served_by(columns: Sequence[Column], load: Sequence[float]) -> list[int]:
    """Buckets with load that some column can serve."""
    return [b for b, rate in enumerate(load) if rate > 0 and any(c.rates[b] > 0 for c in columns)]


class Level:
    """Shares that keep the fullest column least full, for one number of replicas after the other."""

    def __init__(self, columns: Sequence[Column], load: Sequence[float]) -> None:
        """
        Args:
            columns: those that may have replicas; what none of them serves is left out.
        """
        program = highs.Program()
        self._fullest = program.variable(1.0, 0.0, math.inf)
        self.shares, terms = share_rows(program, columns, load, {})
        self._rows = {c.key: program.row([*terms[c.key], (self._fullest, -1.0)], high=0.0) for c in columns}
        self._program = highs.Linear(program)
        self.fullest = math.inf
        """What that column is used; above 1: the load is not carried. Infinite: no replica serves some of it."""
        self.x: Sequence[float] = ()
        self.prices: Mapping[str, float] = {}
        """How much less full the fullest would be with one more replica of each column."""

    def fill(self, replicas: Mapping[str, int]) -> None:
        """Share the load among these."""
        for key, row in self._rows.items():
            self._program.set_coefficient(row, self._fullest, -float(replicas.get(key, 0)))
        solution = self._program.solve()
        if solution is None:
            self.fullest, self.x, self.prices = math.inf, (), {}
        else:
            self.fullest, self.x = solution.x[self._fullest], solution.x
            self.prices = prices_of(solution, self._rows)


def prices_of(solution: highs.Solution, rows: Mapping[str, int]) -> dict[str, float]:
    """What a replica more of each column is worth, from the rows that no replica is overloaded."""
    return {key: -solution.duals[row] for key, row in rows.items()} if solution.duals else {}


def share_rows(
    program: highs.Program, columns: Sequence[Column], load: Sequence[float], left_out: Mapping[int, int]
) -> tuple[Shares, dict[str, list[tuple[int, float]]]]:
    """Variables of the shares, the row that carries each bucket, and the work terms by column.

    Args:
        left_out: by bucket, the variable of the part that is not carried; a bucket without one is carried as a whole.
    """
    shares: Shares = []
    terms: dict[str, list[tuple[int, float]]] = {c.key: [] for c in columns}
    for bucket in served_by(columns, load):
        row: list[tuple[int, float]] = []
        for column in columns:
            if column.rates[bucket] > 0:
                variable = program.variable(0.0, 0.0, 1.0)
                shares.append((bucket, column.key, variable))
                row.append((variable, 1.0))
                terms[column.key].append((variable, load[bucket] / column.rates[bucket]))
        if bucket in left_out:
            row.append((left_out[bucket], 1.0))
        program.row(row, low=1.0, high=1.0)
    return shares, terms


def weights_of(shares: Shares, x: Sequence[float], buckets: int) -> tuple[Mapping[str, float], ...]:
    """Per bucket, the share of each column that has some of it."""
    weights: list[dict[str, float]] = [{} for _ in range(buckets)]
    for bucket, key, variable in shares:
        if x and x[variable] > TOLERANCE:
            weights[bucket][key] = x[variable]
    totals = [sum(row.values()) for row in weights]
    return tuple(
        {key: share / total for key, share in row.items()} if total > 0 else {}
        for row, total in zip(weights, totals, strict=True)
    )
