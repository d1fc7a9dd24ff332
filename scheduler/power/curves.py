"""What power limits cost a class of jobs, learned from how fast its runs were under the limits that they had. Pure.

A limit is a part of what the boards draw at most, in steps of five per cent. Runs differ in speed for many reasons, so
a run is only ever compared with itself: each stretch of it under one limit with what it did lately under the others.
What is kept of a comparison is by how much the run was slower at the lower limit, in the logarithm, and what that is
worth in seconds of running. Comparisons of many runs are added up; nothing else of them needs to be kept.

A curve is what fits the comparisons best: least squares, weighted by seconds. Published curves are one more comparison
between neighbouring steps, worth a minute each, so they give the shape where nothing was measured, made steeper or
flatter as a whole by what was. A lower limit never makes a run faster, whatever the noise says.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .allocate import Floats
from .telemetry import COMPUTE_CURVE, PRIOR_CURVES, CapCurve, Phase

STEP = 5
"""Percent of what the boards draw at most."""
LEVELS = tuple(range(20, 101, STEP))
HALF_LIFE_S = 1800.0
"""What a run did under another limit counts half as much for each so many seconds of running: runs change."""
PRIOR_S = 60.0
"""What the published curve is worth between two neighbouring levels, and as a whole."""
MOST_S = 36_000.0
"""Of one pair of levels; then older comparisons give way to newer ones: drivers and machines change."""
USED_S = 60.0
"""A curve counts from here on: what is not measured in it has the published shape."""
KNOWN_S = 300.0
"""Worth so much, it needs no more trials."""
MOST_SLOWER = math.log(10)
"""A limit that makes a run slower than this is something else."""

Pair = tuple[int, int]
"""A level and a higher one."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Runs at one level and at a higher one."""

    seconds: float
    """Of running, that the comparison is worth."""
    log_slower: float
    """Mean of the logarithm of the time for the same work at the lower level, over that at the higher one."""

    def __post_init__(self) -> None:
        # Read back from the API server: whatever stands there must not stop the controller.
        if not (0 < self.seconds < math.inf and abs(self.log_slower) <= MOST_SLOWER):
            raise ValueError(f"no comparison: {self.seconds} s, {self.log_slower}")


Evidence = Mapping[Pair, Compared]


def added(one: Evidence, other: Evidence) -> dict[Pair, Compared]:
    """Both together; what is more than `MOST_S` of a pair is forgotten, the first one's part of it first."""
    total = dict(one)
    for pair, new in other.items():
        old = total.get(pair)
        if old is not None:
            kept_s = min(old.seconds, max(MOST_S - new.seconds, 0.0))
            both_s = kept_s + new.seconds
            mean = (kept_s * old.log_slower + new.seconds * new.log_slower) / both_s
            new = Compared(min(both_s, MOST_S), min(max(mean, -MOST_SLOWER), MOST_SLOWER))
        total[pair] = new
    return total


def seconds_of(evidence: Evidence) -> float:
    """What all comparisons are worth."""
    return math.fsum(each.seconds for each in evidence.values())


def level_of(part: float) -> int:
    """The nearest level of a limit that is this part of what the boards draw at most."""
    return min(max(round(100 * part / STEP) * STEP, LEVELS[0]), LEVELS[-1])


def slowdown(curve: CapCurve, part: float) -> float:
    """By what factor work takes longer under a limit that is this part of what the curve counts from."""
    xs, ys = zip(*curve.points, strict=True)
    return float(np.interp(part, xs, ys))


def curve_of(evidence: Evidence, prior: CapCurve = COMPUTE_CURVE) -> CapCurve:
    """The curve that fits best; without evidence the prior, at the levels."""
    expected = np.log([slowdown(prior, level / 100) for level in LEVELS])
    rows = [(LEVELS.index(low), LEVELS.index(high), known) for (low, high), known in evidence.items()]
    rises = [expected[low] - expected[high] for low, high, _ in rows]
    weights = [known.seconds for _, _, known in rows]
    slower = [known.log_slower for _, _, known in rows]
    # How much steeper than expected, as one factor; a minute for 1, where the levels are as far apart as half is from all.
    far = float(np.interp(50, LEVELS, expected)) ** 2 * PRIOR_S
    steepness = (far + np.dot(weights, np.multiply(rises, slower))) / (
        far + np.dot(weights, np.square(rises))
    )
    count = len(LEVELS)
    matrix, wanted = np.zeros((count, count)), np.zeros(count)

    def compare(low: int, high: int, weight: float, log_slower: float) -> None:
        matrix[[low, high], [low, high]] += weight
        matrix[[low, high], [high, low]] -= weight
        wanted[low] += weight * log_slower
        wanted[high] -= weight * log_slower

    for low in range(count - 1):
        compare(low, low + 1, PRIOR_S, max(float(steepness), 0.0) * (expected[low] - expected[low + 1]))
    for (low, high, known), log_slower in zip(rows, slower, strict=True):
        compare(low, high, known.seconds, log_slower)
    found = np.append(np.linalg.solve(matrix[:-1, :-1], wanted[:-1]), 0.0)
    logs = _falling(found, np.diag(matrix))
    return CapCurve(
        tuple((level / 100, math.exp(log)) for level, log in zip(LEVELS, logs.tolist(), strict=True))
    )


def fitted(phase: Phase, evidence: Evidence) -> CapCurve:
    """The curve of a phase that fits best, with the shape that is published for it."""
    return curve_of(evidence, PRIOR_CURVES[phase])


def _falling(values: Floats, weights: Floats) -> Floats:
    """The nearest row of numbers, by weighted squares, that never rises and is never below 0: neighbours that rise are
    pooled until none does."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, a_weight, a_count), (b, b_weight, b_count) = pools[-2:]
            both = a_weight + b_weight
            pools[-2:] = [((a * a_weight + b * b_weight) / both, both, a_count + b_count)]
    row = np.concatenate([np.full(count, value) for value, _, count in pools])
    fallen: Floats = np.clip(row - row[-1], 0.0, MOST_SLOWER)
    return fallen


PUBLISHED = {phase: fitted(phase, {}) for phase in PRIOR_CURVES}
"""At the levels, by phase."""


@dataclass(slots=True)
class Pace:
    """What one run did lately at each level."""

    levels: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds, and the mean logarithm of the speed."""

    def heard(self, part: float, speed: float, seconds: float, curve: CapCurve) -> dict[Pair, Compared]:
        """What a stretch of the run teaches.

        Args:
            part: the limit in the stretch.
            speed: in it, in any unit.
            curve: what is known of the class; moves the speed to the nearest level.
        """
        level = level_of(part)
        log_speed = math.log(speed * slowdown(curve, part) / slowdown(curve, level / 100))
        keep = 0.5 ** (seconds / HALF_LIFE_S)
        self.levels = {at: (before_s * keep, log) for at, (before_s, log) in self.levels.items()}
        total_s = seconds + math.fsum(before_s for before_s, _ in self.levels.values())
        found = {}
        for other, (before_s, log) in self.levels.items():
            slower = log_speed - log if other < level else log - log_speed
            if other != level and abs(slower) <= MOST_SLOWER and before_s >= 1.0:
                pair = (min(other, level), max(other, level))
                found[pair] = Compared(seconds * before_s / total_s, slower)
        before_s, log = self.levels.get(level, (0.0, 0.0))
        both_s = before_s + seconds
        self.levels[level] = both_s, (before_s * log + seconds * log_speed) / both_s
        return found


TRIAL_S = 60.0
"""A run whose curve is not measured weighs half for so long, and then twice."""
TRIAL_WEIGHTS = (0.5, 2.0)
BETWEEN_S = 900.0
"""From one such trial of a run to the next. Where feeds are calm a run would otherwise have one limit for hours."""


def trial_weight(run: str, now_s: float) -> float:
    """What a run of which limits are not known yet weighs now, as a factor. Runs take turns, by their names."""
    at_s = (now_s + zlib.crc32(run.encode()) % int(BETWEEN_S)) % BETWEEN_S
    trial = int(at_s // TRIAL_S)
    return TRIAL_WEIGHTS[trial] if trial < len(TRIAL_WEIGHTS) else 1.0
