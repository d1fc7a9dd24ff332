"""Better mixes by small exchanges of replicas, where the clock may end the search for the best one early (`mix.py`).

    better = improved(replicas, exchange, deadline)

Whether a mix carries the load takes a linear program. One that does not carry it leaves prices, and these rule others out without
a program of their own: with u_j >= 0 per replica of column j, and w_bj the replicas of j that bucket b takes alone, a share x_bj
of the buckets that is carried has

    Σ_j u_j·n_j  >=  Σ_j u_j Σ_b w_bj·x_bj  >=  Σ_b min_j u_j·w_bj

whatever the prices are (Farkas' lemma; the cuts of Benders, Numerische Mathematik 4, 1962).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

from ..highs import Deadline
from .columns import TOLERANCE

TESTS = 60
"""Linear programs (2 ms each for a hundred buckets by six types) that improve a first mix, at most."""


@dataclass(slots=True)
class Cuts:
    """What prices have told of mixes that carry the load."""

    work: Mapping[str, Mapping[int, float]]
    """By column, of the buckets with load that it serves: the replicas that each takes alone."""
    _rows: list[tuple[dict[str, float], float]] = field(default_factory=list)

    def add(self, prices: Mapping[str, float]) -> None:
        """Remember prices, by column; a column without one gets the least that changes nothing."""
        least: dict[int, float] = {}
        for key, price in prices.items():
            for bucket, work in self.work[key].items():
                least[bucket] = min(least.get(bucket, float("inf")), max(price, 0.0) * work)
        full = {key: max(price, 0.0) for key, price in prices.items()}
        for key, row in self.work.items():
            if key not in full:
                full[key] = max((least.get(bucket, 0.0) / work for bucket, work in row.items()), default=0.0)
        total = sum(least.values())
        if total > 0:
            self._rows.append((full, total))

    def forbid(self, replicas: Mapping[str, int]) -> bool:
        """Whether these replicas surely do not carry the load."""
        return any(
            sum(price * replicas[key] for key, price in prices.items()) < total * (1 - TOLERANCE)
            for prices, total in self._rows
        )


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the search asks of a mix."""

    cost: Callable[[str, int], float]
    """Of so many replicas of a column; the mix costs their sum."""
    allowed: Callable[[Mapping[str, int]], bool]
    """Whether the limits allow it."""
    missing: Callable[[Mapping[str, int]], Mapping[str, float] | None]
    """Prices of a mix that does not carry the load; None: it does."""
    cuts: Cuts


def improved(replicas: Mapping[str, int], exchange: Exchange, deadline: Deadline) -> dict[str, int]:
    """One replica less, or one of another column in its place, as long as that is cheaper and carries the load; what saves
    most first, since the cuts rule most of it out. Then the same with two for one and one for two."""
    best, tests = dict(replicas), 0
    failed: set[tuple[int, ...]] = set()
    one, two = _exchanges(sorted(best))
    for changes in (one, one + two):
        better: dict[str, int] | None = best
        while better is not None:
            best, better = better, None
            for step in _cheaper(best, changes, exchange):
                name = tuple(step[key] for key in sorted(step))
                if name in failed or exchange.cuts.forbid(step):
                    continue
                if tests >= TESTS or deadline.is_past:
                    return best
                tests += 1
                prices = exchange.missing(step)
                if prices is None:
                    better = step
                    break
                failed.add(name)
                exchange.cuts.add(prices)
    return best


def _cheaper(
    replicas: Mapping[str, int], changes: Sequence[Mapping[str, int]], exchange: Exchange
) -> list[dict[str, int]]:
    """What the limits allow and costs less, the cheapest first."""
    found: list[tuple[float, tuple[int, ...], dict[str, int]]] = []
    for change in changes:
        step = dict(replicas)
        saved = 0.0
        for key, more in change.items():
            step[key] += more
            saved += exchange.cost(key, replicas[key]) - exchange.cost(key, step[key])
        if saved > TOLERANCE and min(step.values()) >= 0 and exchange.allowed(step):
            found.append((saved, tuple(step[key] for key in sorted(step)), step))
    return [step for _, _, step in sorted(found, key=lambda row: row[:2], reverse=True)]


def _exchanges(keys: Sequence[str]) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """Changes of the numbers by column: one less with at most one more, and two against one."""

    def change(less: Sequence[str], more: Sequence[str]) -> Counter[str]:
        made = Counter(more)
        made.subtract(less)
        return made

    one = [change([drop], more) for drop in keys for more in ([], *([key] for key in keys if key != drop))]
    pairs = list(combinations_with_replacement(keys, 2))
    two = [
        change(less, more)
        for pair in pairs
        for key in keys
        if key not in pair
        for less, more in ((pair, (key,)), ((key,), pair))
    ]
    return one, two
