"""How the value of a job grows with its age: by its length, and for unknown lengths not at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import Policy
from busbar.scheduler.candidates.value import SHORTEST_H, weight
from busbar.scheduler.model.snapshot import Job

from ..build import NOW, job

HOUR = 3600.0
POLICY = Policy()


def _grown(one: Job, age_s: float) -> float:
    """How many times as much the job is worth at this age as when it was submitted."""
    first, later = replace(one, submitted_at_s=NOW), replace(one, submitted_at_s=NOW - age_s)
    return weight(later, 1.0, POLICY, NOW) / weight(first, 1.0, POLICY, NOW)


def test_an_hour_is_much_for_a_short_job_and_little_for_a_long_one() -> None:
    grown = [_grown(job("one", remaining=hours * HOUR), HOUR) for hours in (0.5, 1, 10, 100)]
    assert grown == pytest.approx([3**0.5, 2**0.5, 1.1**0.5, 1.01**0.5])
    assert _grown(job("one", remaining=1.0), HOUR) == pytest.approx((1 + 1 / SHORTEST_H) ** 0.5)


def test_a_job_of_unknown_length_counts_by_the_time_it_has_received() -> None:
    assert _grown(job("one", remaining=None), 3 * HOUR) == pytest.approx(2.0)
    ran = replace(job("one", remaining=None), attained_s=30 * HOUR)
    assert _grown(ran, 3 * HOUR) == pytest.approx(1.1)


def test_waiting_long_enough_outweighs_any_length() -> None:
    """Nobody waits for ever behind fresh short jobs."""
    short = weight(job("short", remaining=360.0, submitted=NOW), 1.0, POLICY, NOW)
    for hours in (10, 100, 1000):
        one = replace(job("long", remaining=hours * HOUR), submitted_at_s=NOW - 400 * hours * HOUR)
        assert weight(one, 1.0, POLICY, NOW) > short
