"""What limits cost, learned from the speeds of runs."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busbar.scheduler.power.curves import (
    HALF_LIFE_S,
    LEVELS,
    MOST_S,
    MOST_SLOWER,
    TRIAL_S,
    Compared,
    Evidence,
    Pace,
    added,
    curve_of,
    level_of,
    slowdown,
    trial_weight,
)
from busbar.scheduler.power.telemetry import COMPUTE_CURVE, CapCurve

STEEP = CapCurve(((0.2, 6.0), (0.4, 2.8), (0.5, 1.8), (0.6, 1.3), (0.7, 1.1), (1.0, 1.0)))
FLAT = CapCurve(((0.2, 1.0), (1.0, 1.0)))


def ran(true: CapCurve, parts: list[float], noise: float = 0.0, seed: int = 0) -> Evidence:
    """What half minutes under these limits teach."""
    random, pace, evidence = Random(seed), Pace(), dict[tuple[int, int], Compared]()
    for part in parts:
        speed = 1000.0 / slowdown(true, part) * math.exp(random.gauss(0.0, noise))
        evidence = added(evidence, pace.heard(part, speed, 30.0, curve_of(evidence)))
    return evidence


def test_without_evidence_a_curve_is_the_published_one() -> None:
    found = curve_of({})
    assert [slowdown(found, level / 100) for level in LEVELS] == pytest.approx(
        [slowdown(COMPUTE_CURVE, level / 100) for level in LEVELS]
    )


@pytest.mark.parametrize("true", [STEEP, FLAT])
def test_a_run_under_changing_limits_teaches_its_curve(true: CapCurve) -> None:
    parts = Random(2).choices((0.4, 0.5, 0.6, 0.7, 0.8, 1.0), k=200)
    found = curve_of(ran(true, parts, noise=0.03))
    for part in (0.4, 0.5, 0.6, 0.7, 0.8):
        assert slowdown(found, part) == pytest.approx(slowdown(true, part), rel=0.06)


def test_what_was_measured_at_high_limits_makes_the_rest_of_the_curve_flatter() -> None:
    found = curve_of(ran(FLAT, [1.0, 0.6] * 20))
    assert slowdown(found, 0.6) < 1.02
    assert slowdown(found, 0.4) < 1.25 < slowdown(COMPUTE_CURVE, 0.4)


def test_a_run_that_never_changes_its_limit_teaches_nothing() -> None:
    assert ran(STEEP, [0.6] * 50) == {}


def test_runs_of_different_speeds_are_not_compared_with_each_other() -> None:
    slow, fast = Pace(), Pace()
    assert slow.heard(0.6, 100.0, 30.0, COMPUTE_CURVE) == {}
    assert fast.heard(1.0, 9000.0, 30.0, COMPUTE_CURVE) == {}


def test_what_a_run_did_long_ago_counts_little() -> None:
    worth_s = []
    for between_s in (30.0, 6 * HALF_LIFE_S):
        pace = Pace()
        pace.heard(1.0, 1000.0, 600.0, FLAT)
        pace.heard(0.8, 1000.0, between_s, FLAT)
        worth_s.append(pace.heard(0.6, 900.0, 30.0, FLAT)[60, 100].seconds)
    assert worth_s[0] > 20 > 0.1 > worth_s[1]


def test_evidence_of_many_runs_is_a_mean_by_seconds_and_old_evidence_gives_way() -> None:
    one, other = {(60, 100): Compared(100.0, 0.3)}, {(60, 100): Compared(300.0, 0.1)}
    both = added(one, other)[60, 100]
    assert both.seconds == 400.0
    assert both.log_slower == pytest.approx(0.15)
    full = {(60, 100): Compared(MOST_S, 0.3)}
    renewed = added(full, {(60, 100): Compared(MOST_S, 0.1)})
    assert renewed[60, 100] == Compared(MOST_S, 0.1)
    assert added(full, {(50, 100): Compared(1.0, 0.1)}).keys() == {(60, 100), (50, 100)}


@pytest.mark.parametrize(
    ("seconds", "slower"),
    [(0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (math.inf, 0.1), (1.0, math.nan), (1.0, 2 * MOST_SLOWER)],
)
def test_a_comparison_that_cannot_be_is_refused(seconds: float, slower: float) -> None:
    with pytest.raises(ValueError, match="no comparison"):
        Compared(seconds, slower)
    Compared(1.0, 0.1)


pairs = st.tuples(st.sampled_from(LEVELS), st.sampled_from(LEVELS)).filter(lambda pair: pair[0] < pair[1])
compared = st.builds(Compared, st.floats(0.001, MOST_S), st.floats(-MOST_SLOWER, MOST_SLOWER))


@given(st.dictionaries(pairs, compared, max_size=30))
def test_whatever_the_evidence_a_lower_limit_is_never_faster(evidence: Evidence) -> None:
    slow = [factor for _, factor in curve_of(evidence).points]
    assert slow[-1] == 1.0
    assert all(lower >= higher >= 1.0 for lower, higher in pairwise(slow))
    assert slow[0] <= math.exp(MOST_SLOWER) * (1 + 1e-9)


def test_levels_are_steps_of_five_per_cent() -> None:
    assert [level_of(part) for part in (0.0, 0.22, 0.5, 0.524, 0.526, 0.99, 3.0)] == [
        20, 20, 50, 50, 55, 100, 100,
    ]  # fmt: skip


def test_each_run_weighs_half_and_then_twice_now_and_then() -> None:
    for run in ("a", "b", "c"):
        weights = [trial_weight(run, float(second)) for second in range(900)]
        assert weights.count(0.5) == weights.count(2.0) == TRIAL_S
        assert weights.count(1.0) == 900 - 2 * TRIAL_S
    assert trial_weight("a", 0.0) == trial_weight("a", 900.0)
