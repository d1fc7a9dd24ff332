"""The operator's time of day, while somebody sets the machine's clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.operator.steady_clock import SLEW, SteadyClock

HOUR_S = 3600.0


class Machine:
    """Two clocks; `set` steps one of them."""

    def __init__(self) -> None:
        self.elapsed_s, self.offset_s = 50.0, 1_800_000_000.0
        self.clock = SteadyClock(lambda: self.elapsed_s + self.offset_s, lambda: self.elapsed_s)

    def set(self, by_s: float) -> None:
        self.offset_s += by_s

    def passes(self, seconds: float, step_s: float = 10.0) -> float:
        """Lets the time pass, with a look at the clock now and then; the time shown at the end."""
        end_s = self.elapsed_s + seconds
        while self.elapsed_s < end_s:
            self.elapsed_s = min(end_s, self.elapsed_s + step_s)
            self.clock.now_s()
        return self.clock.now_s()


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
def test_an_hour_that_lasts_ten_minutes_moves_it_by_a_minute(by_s: float) -> None:
    machine = Machine()
    before_s = machine.passes(10.0)
    machine.set(by_s)
    assert machine.clock.now_s() == before_s, "it does not jump"
    wrong_s = machine.passes(600.0) - before_s - 600.0
    assert wrong_s == pytest.approx(60.0 if by_s > 0 else -60.0)
    assert machine.clock.behind_s() == pytest.approx(by_s - wrong_s)
    machine.set(-by_s)
    assert machine.passes(600.0) == pytest.approx(before_s + 1200.0)
    assert machine.clock.behind_s() == pytest.approx(0.0)


def test_a_clock_that_was_set_right_is_followed_in_the_end() -> None:
    machine = Machine()
    machine.set(-HOUR_S)
    assert machine.passes(10.1 * HOUR_S) == pytest.approx(machine.elapsed_s + machine.offset_s)


def test_who_begins_to_lead_takes_the_clock_as_it_is() -> None:
    machine = Machine()
    machine.set(-HOUR_S)
    machine.clock.begin()
    assert machine.clock.now_s() == machine.elapsed_s + machine.offset_s


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.tuples(st.floats(0.0, 1e4), st.floats(-1e5, 1e5)), max_size=30))
def test_it_never_goes_back_and_runs_at_nearly_its_speed(steps: list[tuple[float, float]]) -> None:
    machine = Machine()
    shown = [(machine.elapsed_s, machine.clock.now_s())]
    for seconds, by_s in steps:
        machine.set(by_s)
        machine.elapsed_s += seconds
        shown.append((machine.elapsed_s, machine.clock.now_s()))
    for (began_s, before_s), (ended_s, after_s) in pairwise(shown):
        passed_s, room_s = ended_s - began_s, 1e-5
        assert after_s >= before_s
        assert (1 - SLEW) * passed_s - room_s <= after_s - before_s <= (1 + SLEW) * passed_s + room_s


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.floats(0.0, 100.0), max_size=20), st.floats(-5e-2, 5e-2))
def test_a_clock_that_is_only_disciplined_is_shown_as_it_is(steps: list[float], drift: float) -> None:
    machine = Machine()
    for seconds in steps:
        machine.elapsed_s += seconds
        machine.set(seconds * drift)
        assert machine.clock.now_s() == pytest.approx(machine.elapsed_s + machine.offset_s, abs=1e-5)
