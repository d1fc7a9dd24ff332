"""The more runs, the less often the numbers of each are written; and not all at one time."""

from __future__ import annotations

import pytest
from tests.operator.builders import SETTINGS

from busbar.operator.write.pace import MOST_USAGE_S, paced, spread


@pytest.mark.parametrize(
    ("running", "usage_s", "progress_s"),
    [(0, 60.0, 5.0), (100, 60.0, 5.0), (600, 300.0, 30.0), (2000, MOST_USAGE_S, 100.0)],
)
def test_all_together_write_so_much_a_second(running: int, usage_s: float, progress_s: float) -> None:
    made = paced(SETTINGS, running)
    assert (made.usage_period_s, made.progress_period_s) == (usage_s, progress_s)


def test_what_began_together_is_not_written_together() -> None:
    factors = [spread(f"uid-{number}") for number in range(200)]
    assert all(0.8 <= factor < 1.0 for factor in factors)
    assert {int(factor * 50) for factor in factors} == set(range(40, 50))


def test_use_is_written_at_least_every_ten_minutes() -> None:
    longest = max(spread(f"uid-{number}") for number in range(2000))
    assert paced(SETTINGS, 100_000).usage_period_s * longest <= 600
    assert paced(SETTINGS, 100_000).usage_period_s * longest > 590
    assert paced(SETTINGS, 2000).usage_period_s * longest <= 600
