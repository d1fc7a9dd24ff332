"""What a node's boards spend their time on, from their draw and from what their engines count. Pure.

A board that serves reads prompts at a high draw, for moments, and decodes at a low one; a board that trains draws one
level, and what changes there lasts. So a draw with a high and a low level of which the high one never lasts long is taken
for prompts and decoding, unless the board is known to train; every other one for steady work that wants what it drew at
most lately. Steady serving counts as prompts, which feel a limit most, unless its engines tell how much of their time goes
to prompts: decoding feels a limit less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from busbar.operator.power.work import PLAIN, NodeWork, WorkKind
from busbar.scheduler.power import NodePower, Phase, PhaseLoad

PEAKS_S = 60
"""So many reports, one a second, are looked at."""
LEAST = 15
"""Nothing is fitted to fewer."""
APART = 0.1
"""Of the nameplate: levels that are closer are one."""
LONGEST = 5
"""Seconds on the high level in one go; what lasts longer is no peak."""


def fitted(
    draws: Sequence[float],
    want_w: float,
    node: NodePower,
    work: NodeWork = PLAIN,
) -> tuple[tuple[PhaseLoad, ...], float]:
    """Phases, and the standard deviation of the node's draw where it has peaks.

    Args:
        draws: means of one second of one board, oldest first.
        want_w: what a board has wanted at most.
        work: what the node's boards are used for, by their holders.
    """
    steady = _steady(want_w, work)
    if len(draws) < LEAST or work.kind is WorkKind.TRAINING:
        return steady, 0.0
    low_w, high_w = sorted(draws)[len(draws) // 10], max(draws)
    if high_w - low_w < APART * node.board_max_w:
        return steady, 0.0
    middle_w = (low_w + high_w) / 2
    runs = [len(list(run)) for is_high, run in groupby(draws, middle_w.__lt__) if is_high]
    if max(runs) > LONGEST:
        return steady, 0.0
    high = sum(runs)
    rest_w = math.fsum(watts for watts in draws if watts <= middle_w) / (len(draws) - high)
    phases = (
        PhaseLoad(
            Phase.PREFILL,
            high / len(draws),
            max(want_w, high_w),
            high / len(runs),
            work.curves.get(Phase.PREFILL),
        ),
        PhaseLoad(Phase.DECODE, 1.0 - high / len(draws), rest_w, curve=work.curves.get(Phase.DECODE)),
    )
    mean_w = math.fsum(draws) / len(draws)
    variance = math.fsum((watts - mean_w) ** 2 for watts in draws) / len(draws)
    return phases, math.sqrt(variance) * node.slope


def _steady(want_w: float, work: NodeWork) -> tuple[PhaseLoad, ...]:
    if work.kind is not WorkKind.SERVING:
        return (PhaseLoad(Phase.TRAINING, 1.0, want_w, curve=work.curves.get(Phase.TRAINING)),)
    part = 1.0 if work.prompt_part is None else work.prompt_part
    shares = {Phase.PREFILL: part, Phase.DECODE: 1.0 - part}
    return tuple(
        PhaseLoad(phase, share, want_w, curve=work.curves.get(phase))
        for phase, share in shares.items()
        if share > 0
    )
