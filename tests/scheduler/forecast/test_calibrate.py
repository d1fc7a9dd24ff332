"""Corrections by past outcomes: they approach the promised share and use no later outcome."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.scheduler import History, Outcome
from busbar.scheduler.forecast.calibrate import LEVELS, corrected

NOW = 1e6
HOUR = 3600.0
RAW = (2 * HOUR, 5 * HOUR)


def history(outcomes: list[Outcome]) -> History:
    made = History()
    for i, outcome in enumerate(outcomes):
        made.promised(f"{i}", outcome)
    return made


def past(waits: list[float], promised: tuple[float, float] | None = RAW) -> list[Outcome]:
    """One forecast in each of the last periods, the latest old enough for its wait to have ended."""
    begin = NOW - 2.1 * HOUR * len(waits) - RAW[1]
    return [
        Outcome(begin + 2.1 * HOUR * i, "a", 1000, RAW, waited, promised) for i, waited in enumerate(waits)
    ]


@pytest.mark.parametrize(
    ("waited", "least", "most"), [(6 * HOUR, 1.3, 3.0), (0.5 * HOUR, 0.4, 0.8)], ids=["missed", "kept"]
)
def test_promises_missed_or_kept_too_often_move_the_next(waited: float, least: float, most: float) -> None:
    """The correction's step alone, because the factor's effect is the same in both."""
    outcomes = past([waited] * 30)
    with_step = corrected(RAW, "a", 1000, history(outcomes), NOW)[0]
    without = corrected(RAW, "a", 1000, history([replace(o, promised=None) for o in outcomes]), NOW)[0]
    assert least < with_step / without < most


def test_the_right_share_of_misses_moves_nothing() -> None:
    """Half before p50 and a tenth after p90."""
    waits = [HOUR, 3 * HOUR] * 4 + [HOUR, 6 * HOUR]
    # All equally old, because recent outcomes have more weight.
    outcomes = [
        replace(outcome, tenant=f"{i}", made_at_s=NOW - 30 * HOUR) for i, outcome in enumerate(past(waits))
    ]
    told = corrected(RAW, "new", 1000, history(outcomes), NOW)
    silent = corrected(RAW, "new", 1000, history([replace(o, promised=None) for o in outcomes]), NOW)
    assert told == pytest.approx(silent)


def test_a_forecast_is_not_scored_before_it_is_due() -> None:
    """Outcomes of jobs that started early are known first; scored at that time, every forecast would seem too long."""
    fresh = [Outcome(NOW - HOUR, f"{i}", 1000, RAW, 60.0 if i % 2 else None, RAW) for i in range(40)]
    told = corrected(RAW, "a", 1000, history(fresh), NOW)
    silent = corrected(RAW, "a", 1000, history([replace(o, promised=None) for o in fresh]), NOW)
    assert told == silent


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 40 * HOUR), st.floats(60, 40 * HOUR)), min_size=1, max_size=30))
def test_a_correction_uses_only_outcomes_known_at_its_time(rows: list[tuple[float, float]]) -> None:
    """A wait that ends after `now` counts as one that has not ended, and later forecasts do not count."""
    outcomes = [Outcome(NOW - 20 * HOUR + at, "a", 1000, RAW, waited, RAW) for at, waited in rows]
    seen = [
        replace(o, waited_s=None if o.waited_s is None or o.made_at_s + o.waited_s > NOW else o.waited_s)
        for o in outcomes
        if o.made_at_s < NOW
    ]
    p50, p90 = corrected(RAW, "a", 1000, history(seen), NOW)
    assert 0 < p50 <= p90
    later = [replace(o, waited_s=None) for o in outcomes if o.made_at_s >= NOW]
    assert corrected(RAW, "a", 1000, history(seen + later), NOW) == (p50, p90)


@pytest.mark.parametrize("wrong", [0.2, 1.0, 5.0])
def test_corrected_forecasts_reach_their_coverage_whatever_the_error(wrong: float) -> None:
    """Lognormal waits, simulated with a wrong scale: the corrected forecasts reach their coverage in the long run."""
    random = np.random.default_rng(3)
    made = History()
    kept = np.zeros(2)
    count = 600
    waits = HOUR * np.exp(random.standard_normal(count))
    true = HOUR, HOUR * np.exp(1.2816)
    for i in range(count):
        now = NOW + 1200.0 * i
        for j in range(max(0, i - 400), i):
            at = NOW + 1200.0 * j
            if at + waits[j] <= now and made.outcomes[f"{j}"].waited_s is None:
                made.started(f"{j}", at + waits[j])
        raw = wrong * true[0], wrong * float(true[1])
        promised = corrected(raw, "a", 1000, made, now)
        made.promised(f"{i}", Outcome(now, "a", 1000, raw, promised=promised))
        if i >= 100:
            kept += [waits[i] <= promised[0], waits[i] <= promised[1]]
    assert kept / (count - 100) == pytest.approx(LEVELS, abs=0.05)
