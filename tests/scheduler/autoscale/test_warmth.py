"""Which surplus replicas sleep, by what a wake saves and how likely it is."""

from __future__ import annotations

import random

import pytest

from busbar.scheduler.autoscale.warmth import BIN_S, DAY_BINS, FEWEST, SleepTerms, WantedHistory

TERMS = SleepTerms(start_s=60, wake_s=5, missed=0.1)


def history(*counts: int) -> WantedHistory:
    """So many were wanted, bin by bin."""
    made = WantedHistory()
    for bin_, count in enumerate(counts):
        made.observe(bin_ * BIN_S, count)
    return made


def test_a_wake_is_worth_the_seconds_it_saves_and_what_comes_late_in_them() -> None:
    assert SleepTerms(60, 5, missed=0).worth_s == 55
    assert SleepTerms(60, 5, missed=1).worth_s == pytest.approx(550)
    assert SleepTerms(60, 5, missed=0.1).worth_s == pytest.approx(104.5)
    assert SleepTerms(5, 60).worth_s == 0


def test_what_returns_soon_sleeps_and_what_returns_late_leaves() -> None:
    for low_bins, count in ((2, 1), (20, 0)):
        made = history(*([3, *[2] * low_bins] * 50), 2)
        choice = made.choose(2, 4, TERMS)
        assert choice.count == count
        assert "a wake saves 105 s of a replica's price" in choice.reason
        assert choice.reason.endswith("may sleep.")


def test_as_many_sleep_as_return() -> None:
    made = history(*([5, 2, 2] * 50))
    assert made.choose(2, 9, TERMS).count == 3
    assert made.choose(2, 2, TERMS).count == 2
    assert "2 more replicas were wanted within" in made.choose(2, 2, TERMS).reason


def test_a_longer_start_is_worth_a_longer_sleep() -> None:
    made = history(*([3, *[2] * 8] * 50))
    assert made.choose(2, 1, SleepTerms(60, 5, 0.1)).count == 0
    assert made.choose(2, 1, SleepTerms(400, 5, 0.1)).count == 1
    assert made.choose(2, 1, SleepTerms(60, 5, 1.0)).count == 1
    assert made.choose(2, 1, SleepTerms(5, 60, 1.0)).count == 0


def test_before_enough_is_known_it_sleeps_until_that_has_cost_what_it_may_save() -> None:
    made, counts = WantedHistory(), []
    for second in range(0, 300, 10):
        made.observe(second, 3 if second < 30 else 1)
        counts.append(made.choose(1, 5, TERMS).count)
    assert counts[4] >= 2, "three were wanted a moment ago"
    assert counts[-1] == 0
    assert 90 <= 10 * counts.index(0) - 30 <= 150
    assert "until that has cost what it may save" in made.choose(1, 5, TERMS).reason
    quick = history(2, 1)
    assert quick.choose(1, 1, SleepTerms(2, 1)).count == 1, "not turned within a minute"
    assert quick.choose(1, 1, SleepTerms(2, 3)).count == 0, "a wake that takes longer is worth nothing"


def test_after_a_restart_those_that_sleep_go_on_for_as_long_as_a_wake_is_worth() -> None:
    made = history(0, 0)
    assert made.choose(0, 2, TERMS).count == 2
    assert history(*[0] * 6).choose(0, 2, TERMS).count == 0


def test_one_rise_is_not_taken_for_the_rule() -> None:
    """The number was 2 in one stretch only, on the way up; that it rose then says little about 2."""
    made = history(*[1] * 60, *[2] * 3, *[3] * 60, 2)
    assert made.choose(2, 1, TERMS).count == 0


def test_moments_at_zero_alone_count_where_there_were_enough() -> None:
    rare = history(*([0] * 30 + [1] * 3) * 20, 0)
    frequent = history(*([0] * 2 + [1] * 3) * 120, 0)
    terms = SleepTerms(60, 5, missed=1.0)
    assert rare.choose(0, 1, terms).count == 0
    assert frequent.choose(0, 1, terms).count == 1


def test_a_day_is_kept_and_gaps_count_as_what_was_wanted_before() -> None:
    made = WantedHistory()
    made.observe(0, 2)
    made.observe(10 * BIN_S, 3)
    assert list(made.counts) == [2] * 10 + [3]
    made.observe(9 * BIN_S, 1)
    assert made.counts[-1] == 3, "a clock that went back"
    made.observe(1e9, 1)
    assert len(made.counts) == DAY_BINS
    assert set(list(made.counts)[:-1]) == {3}


def test_sleeping_costs_less_than_always_and_never_over_random_days() -> None:
    """Bursts with their own gaps each: the choice is compared with both fixed rules, in seconds of a replica's price."""
    rng = random.Random(5)
    for mean_bins in (2, 5, 40, 200):
        made = WantedHistory()
        days: list[int] = []
        while len(days) < 1200:
            days += [1] * 3 + [0] * max(1, round(rng.expovariate(1 / mean_bins)))
        terms = SleepTerms(120, 5, missed=1.0)
        cost, always, never, asleep = 0.0, 0.0, 0.0, False
        for bin_, wanted in enumerate(days):
            rises = bin_ > 0 and wanted > days[bin_ - 1]
            made.observe(bin_ * BIN_S, wanted)
            counted = bin_ > FEWEST
            cost += terms.worth_s * (rises and not asleep) * counted
            never += terms.worth_s * rises * counted
            may = made.choose(wanted, 1, terms).count > 0
            asleep = wanted == 0 and may and (asleep or days[bin_ - 1] == 1)
            cost += BIN_S * asleep * counted
            always += BIN_S * (wanted == 0) * counted
        learning = 3 * terms.worth_s
        assert cost <= 1.05 * min(always, never) + learning, mean_bins
