"""The load by time of day."""

from __future__ import annotations

import pytest

from busbar.scheduler.autoscale.day_profile import BIN_S, BINS, DAY_S, DAYS, DayProfile


def test_what_was_seen_today_says_nothing_until_it_is_half_a_day_old() -> None:
    profile = DayProfile()
    for step in range(BINS // 2):
        profile.observe(step * BIN_S, 4.0)
        profile.observe(step * BIN_S + 10, 6.0)
    assert profile.at(DAY_S + 3 * BIN_S) is None
    profile.observe(BINS // 2 * BIN_S + BIN_S, 1.0)  # the bins 0 and 1 are half a day old
    assert profile.at(DAY_S + BIN_S) == pytest.approx(5.0)
    assert profile.at(DAY_S + 2 * BIN_S) is None


def test_between_the_middles_of_two_bins_and_over_midnight() -> None:
    profile = DayProfile()
    profile.remember(0.0, 10.0)
    profile.remember(DAY_S - BIN_S, 30.0)
    assert profile.at(DAY_S) == pytest.approx(20.0)
    assert profile.at(DAY_S + BIN_S / 2) is None, (
        "between the first bin and the second, which nobody has seen"
    )
    assert profile.at(BIN_S / 4) == pytest.approx(15.0)


def test_the_last_week_counts_and_what_was_before_fades() -> None:
    profile = DayProfile()
    for day in range(DAYS):
        profile.remember(day * DAY_S, float(day))
    mean, days = profile.means[0]
    assert mean == pytest.approx(sum(range(DAYS)) / DAYS)
    assert days == DAYS
    for day in range(5 * DAYS):
        profile.remember(day * DAY_S, 100.0)
    assert profile.means[0][0] == pytest.approx(100, rel=0.01)


def test_hours_in_which_nobody_looked_leave_no_trace() -> None:
    profile = DayProfile()
    profile.observe(0.0, 8.0)
    profile.observe(3 * DAY_S + BIN_S, 2.0)
    assert profile.means == {0: (8.0, 1)}
    assert len(profile.today) == 1
