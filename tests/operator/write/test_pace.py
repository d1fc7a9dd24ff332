"""The more runs, the less often the numbers of each are written; and not all at one time."""

from __future__ import annotations

import pytest
from tests.operator.builders import SETTINGS

from busbar.operator.write.pace import MOST_USAGE_S, next_at_s, paced


@pytest.mark.parametrize(
    ("running", "usage_s", "progress_s"),
    [(0, 60.0, 5.0), (100, 60.0, 5.0), (600, 300.0, 30.0), (2000, MOST_USAGE_S, 100.0)],
)
def test_all_together_write_so_much_a_second(running: int, usage_s: float, progress_s: float) -> None:
    made = paced(SETTINGS, running)
    assert (made.usage_period_s, made.progress_period_s) == (usage_s, progress_s)


@pytest.mark.parametrize("began_s", [0.0, 250.0, 1.8e9])
def test_what_began_together_is_written_evenly_over_the_period_and_at_most_a_period_later(
    began_s: float,
) -> None:
    period_s = paced(SETTINGS, 2000).usage_period_s
    at = [next_at_s(f"uid-{number}", began_s, period_s) - began_s for number in range(2000)]
    assert all(1 < each <= period_s + 1 for each in at)
    a_minute = [sum(start <= each < start + 60 for each in at) for start in range(0, 720, 60)]
    assert max(a_minute) < 3.6 * 60, "3 a second, and chance"
    again = [next_at_s(f"uid-{number}", began_s + each, period_s) - began_s for number, each in enumerate(at)]
    assert again == pytest.approx([each + period_s for each in at])


def test_use_is_written_at_least_every_twelve_minutes() -> None:
    assert paced(SETTINGS, 100_000).usage_period_s == paced(SETTINGS, 2000).usage_period_s == 720
