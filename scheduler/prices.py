"""Prices: what an accelerator-hour of each type is worth when everybody bids.

The dual of choosing one column per job under the types' capacities,

    D(p) = sum_t p_t N_t + sum_j max(0, max_c (v_jc - p_t(c) g_jc)),

is convex. Along one price it can be minimised exactly (the demand for a type is a step function of its price:
sort the jobs by what they would pay at most), so cyclic coordinate descent needs no solver and no step size;
types substitute each other, and a few sweeps settle. D at the end bounds every plan's value from above.

Prices depend on the jobs and the capacities, never on where the jobs run now: carrying a plan out changes no
price, which is half of why planning again gives no actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .columns import Options
from .types import JobId

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SWEEPS = 25
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Market:
    """Prices per type, in value per accelerator-hour, and the bound they prove."""

    prices: dict[str, float]
    bound: float

    def price(self, accelerator: str) -> float:
        return self.prices.get(accelerator, 0.0)


def solve(
    jobs: Mapping[JobId, Options], capacity_m: Mapping[str, int], start: Mapping[str, float] | None = None
) -> Market:
    """Prices that clear the market for these jobs on so many thousandths of accelerators per type.

    Args:
        start: prices to begin with. They only save sweeps where the market is the same; results of two
            different starts may differ within the tolerance, so a planner that must be reproducible
            passes none.
    """
    types = sorted(accelerator for accelerator, amount in capacity_m.items() if amount > 0)
    if not types or not jobs:
        return Market(dict.fromkeys(types, 0.0), 0.0)
    index = {accelerator: i for i, accelerator in enumerate(types)}
    rows, kinds, sizes, values = _columns(jobs, index)
    if not len(rows):
        return Market(dict.fromkeys(types, 0.0), 0.0)
    capacity = np.array([capacity_m[accelerator] / 1000 for accelerator in types])
    prices = np.array([0.0 if start is None else start.get(accelerator, 0.0) for accelerator in types])
    count = int(rows.max()) + 1
    by_type = [np.flatnonzero(kinds == i) for i in range(len(types))]
    for _ in range(SWEEPS):
        before = prices.copy()
        for i, own in enumerate(by_type):
            if len(own):
                prices[i] = _clear(i, own, rows, kinds, sizes, values, prices, capacity[i], count)
        if float(np.abs(prices - before).max()) <= TOLERANCE * max(1.0, float(prices.max())):
            break
    profit = _best(rows, values - prices[kinds] * sizes, count)
    bound = float(prices @ capacity + profit.sum())
    return Market({accelerator: float(prices[i]) for accelerator, i in index.items()}, bound)


def _columns(jobs: Mapping[JobId, Options], index: Mapping[str, int]) -> tuple[Ints, Ints, Floats, Floats]:
    rows: list[int] = []
    kinds: list[int] = []
    sizes: list[float] = []
    values: list[float] = []
    for row, job in enumerate(sorted(jobs)):
        for column in jobs[job].columns:
            if column.accelerator in index:
                rows.append(row)
                kinds.append(index[column.accelerator])
                sizes.append(column.accelerators_m / 1000)
                values.append(column.value)
    return np.array(rows, np.int64), np.array(kinds, np.int64), np.array(sizes), np.array(values)


def _best(rows: Ints, profit: Floats, count: int) -> Floats:
    out = np.zeros(count)
    np.maximum.at(out, rows, profit)
    return out


def _clear(
    kind: int,
    own: NDArray[np.intp],
    rows: Ints,
    kinds: Ints,
    sizes: Floats,
    values: Floats,
    prices: Floats,
    capacity: float,
    count: int,
) -> float:
    """The price of one type at which its demand just fits, the other prices held."""
    others = kinds != kind
    elsewhere = _best(rows[others], (values - prices[kinds] * sizes)[others], count)
    pays = (values[own] - elsewhere[rows[own]]) / np.maximum(sizes[own], 1e-9)
    order = np.argsort(-pays, kind="stable")
    wanted = np.zeros(count)
    total = 0.0
    for at in order:
        pay = float(pays[at])
        if pay <= 0:
            return 0.0
        row = int(rows[own[at]])
        size = float(sizes[own[at]])
        if size > wanted[row]:
            total += size - wanted[row]
            wanted[row] = size
        if total > capacity:
            return pay
    return 0.0
