"""Who gets the watts: the steepest loss first, within every budget of the tree.

Each node has a curve: the work that it loses per second with so many watts. Its lower hull is a list of segments, each
with watts and the work that one of its watts saves. A feed takes segments in the order of what they save until its
budget is spent; a child hands to its parent only what its own budget lets through. For convex curves this is optimal,
for a whole tree as for one feed. Segments that save the same are cut in proportion, so that equal nodes get equal
watts whatever their order: the ranks of one training job run at the speed of the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from .telemetry import UNKNOWN_CURVE, Curves, NodePower, Phase, PhaseLoad

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

LEVELS = 16
"""Points of a node's curve."""
SPREAD = np.array([NormalDist().inv_cdf(q) for q in (0.1, 0.3, 0.5, 0.7, 0.9)])
"""Where the forecast error of a node's draw is sampled, in standard deviations; each stands for a fifth of the time."""
LEAST_DECODE = 0.1
"""Of the time for decode, taken to remain however slow the prompts are: the loss stays finite."""
TIE = 1e-9
"""Savings closer than this, relatively, count as equal."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One node that shares in the watts."""

    node: NodePower
    phases: tuple[PhaseLoad, ...]
    spread_w: float
    burst: bool
    """The lease bounds the mean (token bucket), not every instant."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Lower hulls of n nodes: arrays of n rows."""

    watts: Floats
    saved: Floats
    """Weighted seconds of work per second that one watt of the segment saves; falling along a row."""


def segments(demands: Sequence[Demand], curves: Curves) -> Segments:
    """From the floor to the nameplate of every node."""
    limits = np.linspace(
        [demand.node.board_min_w for demand in demands],
        [demand.node.board_max_w for demand in demands],
        LEVELS,
        axis=1,
    )
    host = np.array([demand.node.host_w for demand in demands])[:, None]
    slope = np.array([demand.node.slope for demand in demands])[:, None]
    watts = host + slope * limits
    loss, drawn = _under_limits(demands, limits, curves)
    needed = host + slope * drawn
    for row, demand in enumerate(demands):
        if demand.burst:
            loss[row] = _loss_of_mean(watts[row], needed[row], loss[row], demand.spread_w)
    loss *= np.array([demand.node.weight for demand in demands])[:, None]
    return Segments(np.diff(watts, axis=1), _saved(watts, loss))


def _under_limits(demands: Sequence[Demand], limits: Floats, curves: Curves) -> tuple[Floats, Floats]:
    """Work lost per second, and the mean watts of a board, under each limit of a board.

    Prompts go before decode, so the time that they lose is taken from decode, in which requests spend most of their
    lives. A server that decodes for a part d of its time and loses e to prompts makes its requests slower by
    slowdown(decode) · d / (d - e).
    """
    lost, drawn = np.zeros_like(limits), np.zeros_like(limits)
    decode, decode_slow = np.zeros(len(demands)), np.ones_like(limits)
    for phase, (share, wanted) in _shares(demands).items():
        if not share.any():
            continue
        drawn += share[:, None] * np.minimum(limits, wanted[:, None])
        if phase is Phase.IDLE:
            continue
        curve = np.array(curves.get(phase, UNKNOWN_CURVE).points)
        fraction = np.minimum(limits / np.maximum(wanted, 1e-9)[:, None], 1.0)
        slow = np.interp(fraction, curve[:, 0], curve[:, 1])
        if phase is Phase.DECODE:
            decode, decode_slow = share, slow
        else:
            lost += share[:, None] * (slow - 1)
    serves = decode[:, None] > 0
    whole = np.where(serves, decode[:, None], 1.0)
    slower = decode_slow * whole / np.maximum(whole - lost, LEAST_DECODE * whole) - 1
    return np.where(serves, slower, lost), drawn


def _shares(demands: Sequence[Demand]) -> dict[Phase, tuple[Floats, Floats]]:
    """Of every node, the share of time in each phase and the watts that a board wants in it."""
    count = len(demands)
    found = {phase: (np.zeros(count), np.ones(count)) for phase in Phase}
    for row, demand in enumerate(demands):
        for load in demand.phases:
            if load.share > 0:
                share, wanted = found[load.phase]
                total = share[row] + load.share
                wanted[row] = (wanted[row] * share[row] + load.board_w * load.share) / total
                share[row] = total
    return found


def _loss_of_mean(watts: Floats, needed: Floats, loss: Floats, spread_w: float) -> Floats:
    """Expected loss if the lease bounds the mean draw, which is forecast with a normal error."""
    errors = SPREAD * spread_w
    rising = needed + 1e-6 * np.arange(len(needed))  # interpolation wants strictly rising points
    found = np.interp((watts[:, None] - errors[None, :]).ravel(), rising, loss)
    mean: Floats = found.reshape(len(watts), len(errors)).sum(axis=1) / len(errors)
    return mean


def _saved(watts: Floats, loss: Floats) -> Floats:
    """Slopes of the lower hull of each row: for segment k the max over a ≤ k of the min over b > k of slope(a, b)."""
    count = watts.shape[1]
    run = watts[:, None, :] - watts[:, :, None]
    ahead = np.triu(np.ones((count, count), dtype=bool), 1)
    slopes = np.where(
        ahead & (run > 0), (loss[:, None, :] - loss[:, :, None]) / np.where(run > 0, run, 1.0), np.inf
    )
    least = np.minimum.accumulate(slopes[:, :, ::-1], axis=2)[:, :, ::-1]  # over b ≥ column
    best = np.maximum.accumulate(np.where(np.isinf(least), -np.inf, least), axis=1)  # over a ≤ row
    steps = np.arange(count - 1)
    hull = best[:, steps, steps + 1]
    return np.maximum(np.where(np.isfinite(hull), -hull, 0.0), 0.0)


def fill(saved: Floats, watts: Floats, capacity_w: float) -> Floats:
    """Of each segment the watts that fit in the capacity, the most saving first; equals are cut in proportion."""
    if watts.sum() <= capacity_w:
        return watts
    flat, width = saved.ravel(), watts.ravel()
    order = np.argsort(-flat, kind="stable")
    total = np.cumsum(width[order])
    margin = float(flat[order[min(int(np.searchsorted(total, capacity_w)), len(order) - 1)]])
    tie = TIE * max(abs(margin), 1e-12)
    above, equal = flat > margin + tie, np.abs(flat - margin) <= tie
    left = max(capacity_w - width[above].sum(), 0.0)
    at_margin = width[equal].sum()
    part = min(left / at_margin, 1.0) if at_margin > 0 else 0.0
    given: Floats = np.where(above, width, np.where(equal, width * part, 0.0)).reshape(watts.shape)
    return given


def allocate(found: Segments, rooms: Sequence[tuple[Indices, float]]) -> Floats:
    """Watts above its floor for every node.

    Args:
        rooms: of each domain, children before parents: the rows of its nodes, and the watts above their floors.
    """
    watts = found.watts.copy()
    for rows, capacity_w in rooms:
        if len(rows):
            watts[rows] = fill(found.saved[rows], watts[rows], max(capacity_w, 0.0))
    total: Floats = watts.sum(axis=1)
    return total
