"""Forecasts of when a budget is spent, beside work whose rate changes by chance."""

from __future__ import annotations

import math
from random import Random

import pytest

from busbar.kube.types.budget import Pace
from busbar.operator.accounting.pace import noted, spent_after_h

HOURS = 20 * 24


def _rates(random: Random) -> list[float]:
    """Per hour: some levels, each held for a time like that of jobs."""
    found: list[float] = []
    while len(found) < 2 * HOURS:
        level, length = random.uniform(0.0, 10.0), random.expovariate(1 / 6.0)
        found += [level] * max(1, round(length))
    return found


def _spent(rates: list[float], left: float) -> float:
    """Hours until so much is used."""
    used = 0.0
    for hour, rate in enumerate(rates):
        used += rate
        if used >= left:
            return hour + 1.0
    return math.inf


def test_half_of_all_are_spent_at_p50_and_nine_tenths_at_p90() -> None:
    random = Random(5)
    by_p50 = by_p90 = 0
    runs = 300
    for _ in range(runs):
        rates = _rates(random)
        pace = None
        for rate in rates[:72]:
            pace = noted(pace, rate, 1.0)
        left = 5.0 * random.uniform(24, 120)
        truth = _spent(rates[72:], left)
        by_p50 += truth <= spent_after_h(pace, left, 0.5)
        by_p90 += truth <= spent_after_h(pace, left, 0.9)
    assert 0.38 <= by_p50 / runs <= 0.62
    assert 0.78 <= by_p90 / runs <= 0.98


@pytest.mark.parametrize("pieces", [1, 7, 60])
def test_the_pace_of_a_steady_rate_does_not_depend_on_how_often_it_is_noted(pieces: int) -> None:
    pace = None
    for _ in range(3 * pieces):
        pace = noted(pace, 4.0, 1 / pieces)
    assert pace is not None
    assert pace.mean == pytest.approx(4.0)
    assert pace.variance == pytest.approx(0.0, abs=1e-6)
    assert spent_after_h(pace, 40.0, 0.5) == pytest.approx(10.0)
    assert spent_after_h(pace, 40.0, 0.9) == pytest.approx(10.0, rel=1e-3)


def test_the_rate_of_long_ago_is_forgotten() -> None:
    pace = None
    for hour in range(24 * 8):
        pace = noted(pace, 10.0 if hour < 96 else 2.0, 1.0)
    assert pace is not None
    assert pace.mean == pytest.approx(2.5, abs=0.1)


def test_too_little_is_known_or_nothing_is_used() -> None:
    assert spent_after_h(None, 5.0, 0.5) == math.inf
    assert spent_after_h(Pace(hours=0.5, mean=3.0), 5.0, 0.5) == math.inf
    assert spent_after_h(Pace(hours=5.0, mean=0.0), 5.0, 0.5) == math.inf
    assert noted(None, 3.0, 0.0) == Pace()
    assert spent_after_h(Pace(hours=5.0, mean=1.0, variance=1e6), 5.0, 0.9) > 1e5
