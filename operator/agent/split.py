"""How a node splits its lease over its boards: by the rule with which the controller splits a feed over nodes. Pure.

Of a board only its draw is known. One that draws as much as its limit lets it wants all that it can draw; another
wants what it drew at most lately. No board wants more than it may have: one whose holder has a power cap works as it
should at that cap, and loses by a limit what it loses of that. What limits cost is what the controller takes where nobody
has measured it. Watts that nobody wants are shared in proportion, so that a board that wakes up does not wait for the
next split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from busbar.scheduler.power import PRIOR_CURVES, NodePower, Phase, PhaseLoad
from busbar.scheduler.power.allocate import Demand, allocate, segments

AT_LIMIT = 0.95
"""A board that draws this part of its limit wants more."""
WANT_STEP = 0.05
"""Of the nameplate: wants are rounded up to it, so that noise moves no limits."""
FORGET_S = 10.0
"""A peak of a board's draw is forgotten after so long."""


@dataclass(frozen=True, slots=True)
class BoardWant:
    """What a board has wanted lately."""

    watts: float
    since_s: float


@dataclass(frozen=True, slots=True)
class Board:
    """A board that takes limits."""

    uuid: str
    floor_w: float
    most_w: float
    """What it may draw: its default limit, or less by the cap of who holds it."""
    want_w: float
    """What it would draw; more than `most_w` counts as that."""


def wanted(
    last: BoardWant | None,
    drawn_w: float,
    limit_w: float,
    nameplate_w: float,
    clock_s: float,
    forget_s: float = FORGET_S,
) -> BoardWant:
    """What the board wants after this reading: rising at once, falling when a peak is forgotten."""
    step_w = WANT_STEP * nameplate_w
    want_w = min(nameplate_w, step_w * (int(drawn_w / step_w) + 1))
    if limit_w < nameplate_w and drawn_w >= AT_LIMIT * limit_w:
        want_w = nameplate_w
    if last is None or want_w >= last.watts or clock_s - last.since_s > forget_s:
        return BoardWant(want_w, clock_s)
    return last


def split(boards_w: float, boards: Sequence[Board]) -> Mapping[str, float]:
    """The limit of each board; together they are at most `boards_w`, or the lowest limits where these are more."""
    if not boards:
        return {}
    demands = [
        Demand(
            NodePower(board.uuid, 0.0, 1, board.floor_w, board.most_w),
            (PhaseLoad(Phase.TRAINING, 1.0, max(min(board.want_w, board.most_w), 1.0)),),
            spread_w=0.0,
            burst=False,
        )
        for board in boards
    ]
    floors_w = np.array([board.floor_w for board in boards])
    room_w = max(boards_w - float(floors_w.sum()), 0.0)
    more_w = allocate(segments(demands, PRIOR_CURVES), [(np.arange(len(boards)), room_w)])
    # Less by what sums of numbers are inexact.
    limits = floors_w + more_w * (1 - 1e-9)
    return {board.uuid: float(limit) for board, limit in zip(boards, limits, strict=True)}
