"""Prices: what an accelerator-hour of each type is worth when every job bids.

The dual of choosing one candidate per job under the types' capacities,

    D(p) = sum_t p_t N_t + sum_j max(0, max_c (v_jc - p_t(c) g_jc)),

is convex. Along one price it can be minimised exactly (the demand for a type is a step function of its price:
sort the jobs by the most they would pay), so descent along directions needs no solver and no step size.

One price at a time is not enough. Types substitute for each other: if two are both too cheap, raising one
alone only sends its jobs to the other, and the descent stops away from the minimum. So prices of types that
are neighbours in price are also moved together, by the same amount, which is the same search with their
capacities added. For jobs of one accelerator D is convex in the sense of substitutes (L-natural), and such
moves lead to the minimum.

D at the end is an upper bound on every plan's value. Where power domains hold jobs back, watts have prices, too
(`watt_market.py`).

Prices depend on the jobs and the capacities, never on where the jobs run now: carrying a plan out changes no
price, which is one reason why planning again gives no actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..model.plans import Price
from ..model.snapshot import JobId
from .candidate import Candidate
from .watt_market import WattLimit, Watts, sweep

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Booleans = NDArray[np.bool_]

SWEEPS = 25
TOLERANCE = 1e-6
LITTLE = 64
"""So many bids more than were needed the last time, and an eighth, are sorted the next time."""
ROUNDING = 1e-6
"""Tolerance in accelerators when sums of sizes are compared."""


@dataclass(frozen=True)
class Market:
    """Prices per type, in value per accelerator-hour, and the bound they prove."""

    prices: dict[str, float]
    bound: float
    domains: dict[str, float] = field(default_factory=dict)
    """Price of a watt-hour on the power domains that hold jobs back, by name."""
    watts: Mapping[str, float] = field(default_factory=dict)
    """The same by pool."""

    def price(self, accelerator: str) -> float:
        return self.prices.get(accelerator, 0.0)

    def cost(self, candidate: Candidate) -> float:
        """What an hour of the candidate costs: its accelerators and, where they are scarce, its watts."""
        cost = self.prices.get(candidate.accelerator, 0.0) * candidate.accelerators_m / 1000
        watts = self.watts.get(candidate.pool, 0.0) if self.watts else 0.0
        return cost + watts * candidate.pods * candidate.draw_w if watts else cost


def solve(
    jobs: Mapping[JobId, Sequence[Candidate]],
    capacity_m: Mapping[str, int],
    start: Mapping[str, float] | None = None,
    limits: Sequence[WattLimit] = (),
) -> Market:
    """Prices that clear the market for these jobs, by type, for capacities in thousandths of accelerators.

    Args:
        jobs: the candidates with which each job bids.
        start: initial prices. They only save sweeps if the market is the same; results from different starts may differ
            within the tolerance, so a planner that must be reproducible passes none.
        limits: on the watts of these pools.
    """
    types = sorted(accelerator for accelerator, amount in capacity_m.items() if amount > 0)
    if not types or not jobs:
        return Market(dict.fromkeys(types, 0.0), 0.0)
    index = {accelerator: i for i, accelerator in enumerate(types)}
    rows, kinds, sizes, values, watts = _flattened(jobs, index, limits)
    if not len(rows):
        return Market(dict.fromkeys(types, 0.0), 0.0)
    capacity = np.array([capacity_m[accelerator] / 1000 for accelerator in types])
    prices = np.array([0.0 if start is None else start.get(accelerator, 0.0) for accelerator in types])
    bids, watt_prices = _Bids(rows, kinds, sizes, values), np.zeros(len(limits))
    for _ in range(SWEEPS):
        before = np.append(prices, watt_prices)
        if limits:
            sweep(values, kinds, sizes, rows, capacity, prices, watts, watt_prices)
            bids = _Bids(rows, kinds, sizes, values - watts.cost(watt_prices))
        for together in range(1, len(types) + 1):
            _sweep(bids, prices, capacity, together)
        change = float(np.abs(np.append(prices, watt_prices) - before).max())
        if change <= TOLERANCE * max(1.0, float(prices.max())):
            break
    bound = float(prices @ capacity + bids.best(prices).sum())
    bound += sum(price * limit.watts for price, limit in zip(watt_prices.tolist(), limits, strict=True))
    return Market(
        {accelerator: float(prices[i]) for accelerator, i in index.items()},
        bound,
        {name: float(watt_prices[i]) for i, limit in enumerate(limits) for name in limit.domains},
        {pool: float(watt_prices[i]) for i, limit in enumerate(limits) for pool in limit.pools},
    )


def _flattened(
    jobs: Mapping[JobId, Sequence[Candidate]], index: Mapping[str, int], limits: Sequence[WattLimit]
) -> tuple[Ints, Ints, Floats, Floats, Watts]:
    known = [[one for one in jobs[job] if one.accelerator in index] for job in sorted(jobs)]
    flat = list(chain.from_iterable(known))
    number = {pool: i for i, limit in enumerate(limits) for pool in limit.pools}
    limited = flat if limits else []
    return (
        np.repeat(np.arange(len(known), dtype=np.int64), [len(own) for own in known]),
        np.array([index[one.accelerator] for one in flat], np.int64),
        np.array([one.pods * one.per_pod.accelerators_m for one in flat], np.float64) / 1000,
        np.array([one.value for one in flat], np.float64),
        Watts(
            tuple(limits),
            np.array([number.get(one.pool, -1) for one in limited], np.int64),
            np.array([one.pods * one.draw_w for one in limited], np.float64),
        ),
    )


@dataclass(slots=True)
class _Own:
    """The bids for some types."""

    others: _Bids | None
    """The bids for all other types; None: there are none."""
    rows: Ints
    kinds: Ints
    sizes: Floats
    values: Floats
    single: bool
    """Whether each job has one of them at most."""
    needed: int
    """How many of them had to be sorted the last time; an estimate for the next."""


class _Bids:
    """All candidates of all jobs: arrays with one entry per candidate, each job's candidates adjacent."""

    def __init__(
        self, rows: Ints, kinds: Ints, sizes: Floats, values: Floats, jobs: int | None = None
    ) -> None:
        """Index the bids.

        Args:
            jobs: how many there are; None: all of them bid.
            rows: number of the job, ascending.
            kinds: number of the type.
            sizes: accelerators.
            values: per hour.
        """
        self.rows, self.kinds, self.sizes, self.values = rows, kinds, sizes, values
        self.jobs = int(rows.max()) + 1 if jobs is None else jobs
        starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
        self._starts, self._bidders = starts, rows[starts]
        self._own: dict[bytes, _Own] = {}

    def own(self, chosen: Ints) -> _Own:
        """The bids for these types."""
        key = np.sort(chosen).tobytes()
        if key not in self._own:
            mask = np.isin(self.kinds, chosen)
            rows = self.rows[mask]
            single = not bool((rows[1:] == rows[:-1]).any())
            self._own[key] = _Own(
                self._only(~mask),
                rows,
                self.kinds[mask],
                self.sizes[mask],
                self.values[mask],
                single,
                len(rows),
            )
        return self._own[key]

    def _only(self, mask: Booleans) -> _Bids | None:
        if not mask.any():
            return None
        return _Bids(self.rows[mask], self.kinds[mask], self.sizes[mask], self.values[mask], self.jobs)

    def best(self, prices: Floats) -> Floats:
        """The most profit each job can make at these prices (0 if it stays out)."""
        out = np.zeros(self.jobs)
        profit = self.values - prices[self.kinds] * self.sizes
        out[self._bidders] = np.maximum(np.maximum.reduceat(profit, self._starts), 0.0)
        return out


def _sweep(bids: _Bids, prices: Floats, capacity: Floats, together: int) -> None:
    """Move each group of this many types that are neighbours in price to its best common level, in place."""
    order = np.argsort(prices, kind="stable") if together > 1 else np.arange(len(prices))
    for first in range(len(prices) - together + 1):
        chosen = order[first : first + together]
        base = prices.copy()
        base[chosen] -= base[chosen].min()
        base[chosen] += _clear(bids, base, chosen, float(capacity[chosen].sum()))
        prices[:] = base


def _clear(bids: _Bids, prices: Floats, chosen: Ints, capacity: float) -> float:
    """What must be added to the prices of these types so that the demand for them just fits; at least 0."""
    own = bids.own(chosen)
    profit = own.values - prices[own.kinds] * own.sizes
    if own.others is not None:
        profit -= own.others.best(prices)[own.rows]
    pays = profit / np.maximum(own.sizes, 1e-9)
    some = np.flatnonzero(pays > 0)  # at a price of 0 no other bid is made
    count = own.needed
    while True:  # many bids are far below the price: only the highest are sorted, as many as are needed
        top = some
        if count < len(some):
            top = some[pays[some] >= np.partition(pays[some], len(some) - count)[len(some) - count]]
        order = top[np.argsort(-pays[top])]  # in which order equal bids stand changes nothing
        sizes = own.sizes[order]
        total = np.cumsum(sizes if own.single else _growth(own.rows[order], sizes)) - ROUNDING
        last = int(np.searchsorted(total, capacity, side="right"))
        if last < len(order):
            own.needed = last + last // 8 + LITTLE
            return float(pays[order[last]])
        if len(top) == len(some):
            return 0.0
        count *= 2


def _growth(rows: Ints, sizes: Floats) -> Floats:
    """By how much each bid, in this order, raises the most that its job has asked for so far."""
    by_job = _in_order(rows)
    job, size = rows[by_job], sizes[by_job]
    step = float(size.max(initial=0.0)) + 1.0
    most = np.maximum.accumulate(job * step + size) - job * step
    new_job = np.append(True, job[1:] != job[:-1])
    grown = np.where(new_job, most, most - np.append(0.0, most[:-1]))
    out = np.empty(len(rows))
    out[by_job] = grown
    return out


def _in_order(numbers: Ints) -> Ints:
    """Indices that sort these numbers of jobs, equal ones as they stand. Numbers of 16 bits are sorted in linear time."""
    order = np.argsort((numbers & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, int(numbers.max(initial=0)).bit_length(), 16):
        order = order[np.argsort((numbers[order] >> shift & 0xFFFF).astype(np.uint16), kind="stable")]
    return order


def prices_of(prices: Iterable[Price]) -> dict[str, float]:
    """A plan's list of prices as a mapping by accelerator."""
    return {price.accelerator: price.price for price in prices}
