"""How soon rounds follow each other, by the CPU time that they take."""

from __future__ import annotations

import pytest

from busbar.operator.scheduling.pace import Pace


@pytest.mark.parametrize(("cpu_s", "debounce_s"), [(0.0, 0.05), (0.01, 0.05), (0.4, 1.2), (100.0, 10.0)])
def test_the_next_round_leaves_three_times_what_the_last_answer_to_events_took(
    cpu_s: float, debounce_s: float
) -> None:
    pace = Pace(0.05, 10.0)
    pace.took(cpu_s, full=False)
    pace.took(100.0, full=True)
    assert pace.debounce_s == pytest.approx(debounce_s)


@pytest.mark.parametrize(
    ("cpu_s", "period_s", "full_period_s"),
    [(0.0, 10.0, 10.0), (0.4, 10.0, 10.0), (1.2, 10.0, 24.0), (100.0, 10.0, 60.0), (100.0, 90.0, 90.0)],
)
def test_full_plans_take_a_twentieth_of_a_core_and_are_made_once_a_minute(
    cpu_s: float, period_s: float, full_period_s: float
) -> None:
    pace = Pace(0.05, period_s)
    pace.took(cpu_s, full=True)
    pace.took(100.0, full=False)
    assert pace.full_period_s == pytest.approx(full_period_s)
