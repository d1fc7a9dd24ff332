"""Means of seconds and minutes in memory of a fixed size."""

from __future__ import annotations

import math
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.operator.power.rings import Series
from busbar.operator.ring import Ring

SIZE = 5
ADDED = st.lists(st.tuples(st.integers(0, 7), st.floats(0, 1000, width=16) | st.just(math.nan)), max_size=40)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(ADDED, st.integers(-2, 8))
def test_a_ring_holds_the_means_of_its_last_periods_and_gaps_elsewhere(
    added: list[tuple[int, float]], ahead: int
) -> None:
    ring, known = Ring(SIZE), defaultdict(list)
    newest = -1
    index = 0
    for step, value in added:
        index += step - 3  # now and then a value of a period that has passed
        index = max(0, index)
        ring.add(index, value)
        if index >= newest and not math.isnan(value):
            newest = index
            known[index].append(value)
    until = max(0, newest) + ahead
    for at, found in zip(range(until - 9, until + 1), ring.last(until, 10), strict=True):
        if at not in known or not newest - SIZE < at <= newest:
            assert found is None
        else:
            assert found is not None
            assert math.isclose(found, math.fsum(known[at]) / len(known[at]), rel_tol=1e-4, abs_tol=1e-4)


def test_a_value_that_is_put_takes_the_place_of_its_period_and_is_old_with_it() -> None:
    ring = Ring(SIZE)
    for index, value in ((3, 1.0), (3, 5.0), (5, 2.0), (4, 9.0), (5, math.nan)):
        ring.put(index, value)
    assert ring.last(6, 5) == [None, 5.0, None, 2.0, None]
    ring.put(3 + SIZE, 7.0)
    assert ring.last(3 + SIZE, SIZE) == [None, 2.0, None, None, 7.0]


def test_a_minute_is_the_mean_of_its_seconds() -> None:
    series = Series()
    for second in range(60, 180):
        if second % 3:  # a third of the seconds is missing
            series.add(second + 0.4, 100.0 if second < 120 else 200.0)
    assert series.minutes.last(3, 4) == [None, 100.0, 200.0, None]
    assert series.seconds.last(121, 3) == [100.0, None, 200.0]


def test_memory_does_not_grow() -> None:
    series = Series()
    for second in range(0, 400_000, 50):
        series.add(float(second), 1.0)
    assert len(series.seconds._slots) == 900
    assert len(series.minutes._slots) == 1440
    assert len([m for m in series.minutes.last(6665, 1440) if m is not None]) == 1440
