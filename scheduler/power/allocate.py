"""Who gets the watts: the steepest loss first, within every budget of the tree.

Each node has a curve: the work that it loses per second with so many watts. Its lower hull is a list of segments, each
with watts and the work that one of its watts saves. A feed takes segments in the order of what they save until its
budget is spent; a child hands to its parent only what its own budget lets through. For convex curves this is optimal,
for a whole tree as for one feed. Segments that save the same are cut in proportion, so that equal nodes get equal
watts whatever their order: the ranks of one training job run at the speed of the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .telemetry import UNKNOWN_CURVE, CapCurve, Curves, NodePower, Phase, PhaseLoad

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

LEVELS = 16
"""Points of a node's curve."""
SPREAD = np.array([NormalDist().inv_cdf(q) for q in (0.1, 0.3, 0.5, 0.7, 0.9)])
"""Where the forecast error of a node's draw is sampled, in standard deviations; each stands for a fifth of the time."""
LEAST_DECODE = 0.1
"""Of the time for decode, taken to remain however slow the prompts are: the loss stays finite."""
LONG = math.log(100)
"""Stretches of reading in the queue that a 99th percentile of first tokens waits for, in mean stretches."""
PASSES = 0.5
"""Of a bucket's depth, what a peak is taken to find in it where nobody knows."""
REACH_S = 2.0
"""How far a round looks ahead: until the leases of the next one, which answer what is unforeseen, are in force."""
LEAST_RISE_W = 1e-3
"""Points of a curve are taken to be at least so far apart."""
MEAN_S = 1.0
"""Means of a node's draw are taken over so long."""
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
    burst_s: float = 0.0
    """Depth of the bucket in seconds of the lease."""
    bucket_j: float | None = None
    """What the bucket holds; None: unknown."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Lower hulls of n nodes: arrays of n rows."""

    watts: Floats
    saved: Floats
    """Weighted seconds of work per second that one watt of the segment saves; falling along a row."""


def segments(demands: Sequence[Demand], curves: Curves) -> Segments:
    """From the floor to the nameplate of every node."""
    nodes = [demand.node for demand in demands]
    limits = np.linspace([node.board_min_w for node in nodes], [node.board_max_w for node in nodes], LEVELS)
    host, slope = np.array([node.host_w for node in nodes]), np.array([node.slope for node in nodes])
    watts = host + slope * limits
    loads = _loads(demands)
    under = _under_limits(loads, limits, curves)
    loss = under.later
    needed = host + slope * under.drawn_w
    passes_j = _passes(demands, watts, needed)
    bursts = np.flatnonzero([demand.burst for demand in demands])
    if len(bursts):
        spread_w = np.array([demands[int(column)].spread_w for column in bursts])
        loss[:, bursts] = _loss_of_mean(
            watts[:, bursts], needed[:, bursts], loss[:, bursts], spread_w, passes_j[:, bursts]
        )
    loss *= np.array([node.weight for node in nodes])
    targets = np.array([node.first_token for node in nodes])
    if targets.any():
        prefill_w = host + slope * loads[Phase.PREFILL].wanted_w
        held = _held_part(loads[Phase.PREFILL], prefill_w - watts, passes_j)
        loss += targets * held * under.first
    return Segments(np.diff(watts, axis=0).T, _saved(watts, loss).T)


def _passes(demands: Sequence[Demand], watts: Floats, needed: Floats) -> Floats:
    """Of each node under each lease the joules that its bucket will let pass: what it holds, and what it saves until
    the next leases are in force."""
    depth_j = np.array([demand.burst_s for demand in demands]) * watts
    level_j = np.array([math.nan if demand.bucket_j is None else demand.bucket_j for demand in demands])
    later_j = np.clip(level_j + REACH_S * (watts - needed), 0.0, depth_j)
    passes: Floats = np.where(np.isnan(level_j), PASSES * depth_j, later_j)
    return passes


@dataclass(frozen=True, slots=True)
class _Load:
    """One phase of all nodes: arrays of n."""

    share: Floats
    wanted_w: Floats
    stretch_s: Floats
    curves: dict[int, CapCurve]
    """Of nodes that have one of their own."""


class _PhaseRows(NamedTuple):
    """The same while it is collected: an array takes ten times as long to write one number."""

    share: list[float]
    wanted_w: list[float]
    stretch_s: list[float]
    curves: dict[int, CapCurve]


def _loads(demands: Sequence[Demand]) -> dict[Phase, _Load]:
    """Of every node, the share of time in each phase, the watts that a board wants in it, and how long it lasts."""
    count = len(demands)
    found = {phase: _PhaseRows([0.0] * count, [1.0] * count, [0.0] * count, {}) for phase in Phase}
    for row, demand in enumerate(demands):
        for load in demand.phases:
            share = load.share
            if share > 0:
                of = found[load.phase]
                before = of.share[row]
                of.share[row] = total = before + share
                of.wanted_w[row] = (of.wanted_w[row] * before + load.board_w * share) / total
                of.stretch_s[row] = max(of.stretch_s[row], load.stretch_s)
                if load.curve is not None:
                    of.curves[row] = load.curve
    return {
        phase: _Load(np.array(of.share), np.array(of.wanted_w), np.array(of.stretch_s), of.curves)
        for phase, of in found.items()
    }


@dataclass(frozen=True, slots=True)
class _Under:
    """Nodes under each limit of their boards: arrays of levels and nodes."""

    later: Floats
    """Work lost per second."""
    first: Floats
    """By what part first tokens come later."""
    drawn_w: Floats
    """Of a board, in the mean."""


def _under_limits(loads: Mapping[Phase, _Load], limits: Floats, curves: Curves) -> _Under:
    """What limits cost.

    Prompts go before decode, so the time that they lose is taken from decode, in which requests spend most of their
    lives. A server that decodes for a part d of its time and loses e to prompts makes its requests slower by
    slowdown(decode) · d / (d - e). Prompts also wait for each other: of a server that reads for a part p of its time,
    the queue of prompts, and so the time to the first token, grows by slowdown(prefill) · (1 - p) / (1 - p ·
    slowdown(prefill)), as of any queue with one server.

    A request feels a limit as long as it runs, and the longer it takes the more of them run at a time: what is lost is
    the part by which requests take longer, slowdown - 1. Training loses of each second what it does not do in it, 1 -
    1 / slowdown.
    """
    lost, drawn_w = np.zeros_like(limits), np.zeros_like(limits)
    first, decode_slow = np.zeros_like(limits), np.ones_like(limits)
    for phase, load in loads.items():
        share = load.share
        if not share.any():
            continue
        drawn_w += share * np.minimum(limits, load.wanted_w)
        if phase is Phase.IDLE:
            continue
        curve = np.array(curves.get(phase, UNKNOWN_CURVE).points)
        fraction = np.minimum(limits / np.maximum(load.wanted_w, 1e-9), 1.0)
        slow = np.interp(fraction, curve[:, 0], curve[:, 1])
        for own, columns in _by_curve(load.curves):
            slow[:, columns] = _slow(own, limits[:, columns], load.wanted_w[columns], limits[-1, columns])
        if phase is Phase.DECODE:
            decode_slow = slow
            continue
        lost += share * (1 - 1 / slow if phase is Phase.TRAINING else slow - 1)
        if phase is Phase.PREFILL:
            reads = np.minimum(share, 1 - LEAST_DECODE)
            first = np.where(
                share > 0, slow * (1 - reads) / np.maximum(1 - reads * slow, LEAST_DECODE**2) - 1, 0.0
            )
    decode = loads[Phase.DECODE].share
    serves = decode > 0
    whole = np.where(serves, decode, 1.0)
    slower = decode_slow * whole / np.maximum(whole - lost, LEAST_DECODE * whole) - 1
    return _Under(np.where(serves, slower, lost), first, drawn_w)


def _by_curve(curves: Mapping[int, CapCurve]) -> list[tuple[CapCurve, list[int]]]:
    """Each curve with the rows that have it."""
    rows: dict[int, tuple[CapCurve, list[int]]] = {}
    for row, curve in curves.items():
        rows.setdefault(id(curve), (curve, []))[1].append(row)
    return list(rows.values())


def _slow(curve: CapCurve, limits: Floats, wanted_w: Floats, most_w: Floats) -> Floats:
    """How much slower under each limit than without one.

    The curve counts from what the boards draw at most. Limits above what they want now cost nothing: it may be less,
    because a job's own cap holds, or because the work waits for something else.
    """
    points, most_w = np.array(curve.points), np.maximum(most_w, 1e-9)
    under = np.interp(np.minimum(limits, wanted_w) / most_w, points[:, 0], points[:, 1])
    slow: Floats = under / np.interp(wanted_w / most_w, points[:, 0], points[:, 1])
    return slow


def _held_part(prefill: _Load, excess_w: Floats, passes_j: Floats) -> Floats:
    """Of a long queue of prompts the part that is read under the limit: what the node's bucket lets pass comes first.

    Stretches of reading are taken to last exponentially long. Where nobody knows how long, all of a queue counts.
    """
    long_s = LONG * prefill.stretch_s
    passes_s = passes_j / np.maximum(excess_w, 1e-9)
    part: Floats = np.where(long_s > 0, np.maximum(1 - passes_s / np.maximum(long_s, 1e-9), 0.0), 1.0)
    return np.where(excess_w > 0, part, 0.0)


def _loss_of_mean(watts: Floats, needed: Floats, loss: Floats, spread_w: Floats, passes_j: Floats) -> Floats:
    """Expected loss if the lease bounds the mean draw, which is forecast with a normal error.

    The error is that of means over the time that a round looks ahead; of what it is above the lease, the bucket lets
    pass what it has.
    Linear between the points (needed, loss) of each column, and flat outside.
    """
    # Columns one after another on one axis, so that one interpolation serves all; strictly rising, as it wants.
    apart = 2 * float(max(needed[-1].max(), watts[-1].max(), 1.0)) * np.arange(watts.shape[1])
    rising = needed + LEAST_RISE_W * np.arange(len(needed))[:, None]
    points, values = (rising + apart).T.ravel(), loss.T.ravel()
    above_w = SPREAD[:, None, None] * (spread_w * math.sqrt(MEAN_S / REACH_S))
    reached = watts - np.where(above_w > 0, np.maximum(above_w - passes_j / REACH_S, 0.0), above_w)
    reached = np.minimum(np.maximum(reached, rising[0]), rising[-1]) + apart
    found = np.interp(reached.transpose(0, 2, 1).ravel(), points, values)
    mean: Floats = found.reshape(len(SPREAD), *watts.shape[::-1]).sum(axis=0).T / len(SPREAD)
    return mean


def _saved(watts: Floats, loss: Floats) -> Floats:
    """Slopes of the lower hull of each column: for segment k the max over a ≤ k of the min over b > k of slope(a, b).

    0 where watts do not rise from each point to the next.
    """
    flat = (np.diff(watts, axis=0) <= 0).any(axis=0)
    if flat.any():
        watts = np.where(flat, np.arange(len(watts))[:, None], watts)
    best = np.full((len(watts) - 1, *watts.shape[1:]), -np.inf)
    for a in range(len(best)):
        slope = (loss[a + 1 :] - loss[a]) / (watts[a + 1 :] - watts[a])
        least = np.minimum.accumulate(slope[::-1], axis=0)[::-1]
        np.maximum(best[a:], least, out=best[a:])
    return np.maximum(np.where(flat, 0.0, -best), 0.0)


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
