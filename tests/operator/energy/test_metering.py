"""Joules of a node's meters: counters that go on, begin anew, or are not heard of."""

from __future__ import annotations

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.power.parts import told

from busbar.operator.energy.metering import FILL_S, Metering, Step, step
from busbar.operator.power.readings import Reading, read

FRESH_S = 3.0


def seen(last: Metering | None, at_s: float, watts: float, joules: float, *, epoch: str = "e1") -> Step:
    """A report at this moment of both clocks, of one board."""
    before = last.reading if last is not None else None
    found = read(before, told("n1", 100 + at_s, epoch=epoch, b0=(watts, joules)), at_s)
    assert isinstance(found, Reading)
    return step(last, found, at_s, FRESH_S)


def joules(looked: Step) -> list[tuple[float, bool]]:
    return [(round(each.joules, 6), each.measured) for each in looked.drawn]


def test_a_counter_that_goes_on_is_measured() -> None:
    first = seen(None, 0.0, 100.0, 5000.0)
    assert first.drawn == ()
    assert joules(seen(first.metering, 2.0, 300.0, 5400.0)) == [(400.0, True)]


def test_a_counter_that_begins_anew_counts_the_last_mean() -> None:
    first = seen(None, 0.0, 100.0, 5000.0)
    for epoch in ("e1", "e2"):
        again = seen(first.metering, 2.0, 300.0, 10.0, epoch=epoch)
        assert joules(again) == [(200.0, False)]
        assert joules(seen(again.metering, 3.0, 300.0, 310.0, epoch=epoch)) == [(300.0, True)]


def test_a_silent_node_draws_its_mean_and_its_counter_settles_it() -> None:
    first = seen(None, 0.0, 100.0, 5000.0).metering
    assert step(first, first.reading, 3.0, FRESH_S).drawn == ()
    silent = step(first, first.reading, 4.0, FRESH_S)
    assert joules(silent) == [(400.0, False)]
    silent = step(silent.metering, first.reading, 6.0, FRESH_S)
    assert joules(silent) == [(200.0, False)]
    assert joules(seen(silent.metering, 10.0, 100.0, 6000.0)) == [(400.0, True)]


def test_what_was_estimated_too_much_is_left_out_of_what_follows() -> None:
    first = seen(None, 0.0, 300.0, 5000.0).metering
    silent = step(first, first.reading, 10.0, FRESH_S)
    assert joules(silent) == [(3000.0, False)]
    back = seen(silent.metering, 10.0, 100.0, 6000.0)
    assert joules(back) == [(0.0, True)]
    back = seen(back.metering, 15.0, 300.0, 7500.0)
    assert joules(back) == [(0.0, True)]
    assert joules(seen(back.metering, 20.0, 300.0, 9000.0)) == [(1000.0, True)]


def test_a_long_silence_is_estimated_for_a_while_and_then_nobodys() -> None:
    first = seen(None, 0.0, 100.0, 5000.0).metering
    silent = step(first, first.reading, 2 * FILL_S, FRESH_S)
    assert joules(silent) == [(100.0 * FILL_S, False)]
    assert step(silent.metering, first.reading, 3 * FILL_S, FRESH_S).drawn == ()
    back = seen(silent.metering, 3 * FILL_S, 100.0, 5000.0 + 300.0 * FILL_S)
    assert back.drawn == ()
    assert [(each.joules, each.measured) for each in back.late] == [(200.0 * FILL_S, True)]


def test_a_board_that_is_exchanged_begins_with_its_first_reading() -> None:
    first = seen(None, 0.0, 100.0, 5000.0)
    found = read(first.metering.reading, told("n1", 101, new=(200.0, 9e6)), 1.0)
    assert isinstance(found, Reading)
    looked = step(first.metering, found, 1.0, FRESH_S)
    assert looked.drawn == ()
    found = read(found, told("n1", 102, new=(200.0, 9e6 + 200)), 2.0)
    assert isinstance(found, Reading)
    assert joules(step(looked.metering, found, 2.0, FRESH_S)) == [(200.0, True)]


@settings(max_examples=40, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_joules_are_never_negative_and_gaps_do_not_change_the_sum(seed: int) -> None:
    """Agents that are silent, and restart: what is booked is the truth, but for the estimated times of restarts."""
    rng = random.Random(seed)
    truth = booked = counter = lost = 0.0
    epoch, last, heard_s = 0, seen(None, 0.0, 200.0, 0.0).metering, 0.0
    for second in range(1, 300):
        drawn = rng.uniform(100, 400)
        truth, counter = truth + drawn, counter + drawn
        if rng.random() < 0.01:
            epoch, counter = epoch + 1, rng.uniform(0, 300)
            lost += 400 * (second - heard_s + 1)  # what a mean can be wrong by
        looked = step(last, last.reading, float(second), FRESH_S)
        if rng.random() < 0.5:
            booked += sum(each.joules for each in looked.drawn)
            looked = seen(looked.metering, float(second), drawn, counter, epoch=f"e{epoch}")
            heard_s = second
        assert all(each.joules >= 0 and math.isfinite(each.joules) for each in looked.drawn)
        booked += sum(each.joules for each in looked.drawn)
        last = looked.metering
    unheard = 400 * (300 - heard_s)
    assert abs(booked - truth) <= lost + unheard + sum(last.ahead_j.values()) + 1e-6
