"""Minimum satisfactory shares: the least that keeps each promise, and what is not promised."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busbar.scheduler import DeadlineAnswer, DeadlineShare, JobId
from busbar.scheduler.candidates.deadlines import EARLY_PART, EARLY_S, TRIED, Asked, Way, shares

NOW = 1000.0
HOUR = 3600.0
ELASTIC = Way("gpu", "gpu", 1.0, 1.0, (1, 2, 4, 8), (1.0, 1.8, 3.2, 5.0))


def asked(
    name: str,
    hours: float,
    work_h: float,
    *,
    promised: bool = False,
    tenant: str = "a",
    ways: tuple[Way, ...] = (ELASTIC,),
    restart_s: float = 0.0,
) -> Asked:
    """A job with a deadline in so many hours, and hours of work on one accelerator."""
    deadline_s = NOW + hours * HOUR
    return Asked(JobId(name), f"ns/{name}", tenant, deadline_s, work_h * HOUR, restart_s, promised, ways)


def found(
    *jobs: Asked, accelerators: float = 8.0, entitled: dict[str, float] | None = None
) -> dict[str, DeadlineShare]:
    capacity = {"gpu": accelerators, "slow": 8.0}
    return {s.job: s for s in shares(jobs, capacity, entitled or {"a": 16.0, "b": 16.0}, NOW)}


@pytest.mark.parametrize(("hours", "least"), [(10.0, 1), (1.5, 1), (1.0, 2), (0.5, 4), (0.25, 8)])
def test_a_share_is_the_least_that_is_enough(hours: float, least: int) -> None:
    share = found(asked("one", hours, 1.0))["one"]
    assert (share.answer, share.accelerators_m) == (DeadlineAnswer.KEEPS, 1000 * least)
    assert share.ends_s is not None
    assert share.ends_s == pytest.approx(NOW + HOUR / share.speed)
    assert share.slack_s == pytest.approx(NOW + hours * HOUR - share.ends_s)


def test_a_start_takes_time_and_an_unchanged_run_none() -> None:
    tight = asked("one", 1.1, 1.0, restart_s=600.0)
    assert found(tight)["one"].accelerators_m == 2000
    runs = replace(tight, ways=(replace(ELASTIC, runs=1),))
    assert found(runs)["one"].accelerators_m == 1000


def test_out_of_reach_says_when_it_would_end_alone() -> None:
    share = found(asked("late", 0.1, 1.0))["late"]
    assert (share.answer, share.promised) == (DeadlineAnswer.OUT_OF_REACH, False)
    assert share.ends_s == pytest.approx(NOW + HOUR / 5)
    nowhere = found(asked("never", 1.0, 1.0, ways=()))["never"]
    assert (nowhere.answer, nowhere.ends_s) == (DeadlineAnswer.OUT_OF_REACH, None)


def test_a_later_deadline_gets_what_is_left_and_then_more() -> None:
    first = asked("first", 0.5, 2.0, promised=True)  # all eight for 24 minutes
    second = asked("second", 1.0, 1.5)
    share = found(first, second)
    assert share["first"].accelerators_m == 8000
    assert (share["second"].accelerators_m, share["second"].answer) == (0, DeadlineAnswer.KEEPS)
    assert share["second"].ends_s == pytest.approx(NOW + 0.4 * HOUR + 1.5 * HOUR / 3.2)


def test_no_promise_is_made_that_breaks_another_one() -> None:
    promised = asked("promised", 1.0, 4.5, promised=True)
    earlier = asked("earlier", 0.5, 1.0)
    share = found(promised, earlier)
    assert share["promised"].answer is DeadlineAnswer.KEEPS
    assert (share["earlier"].answer, share["earlier"].breaks) == (DeadlineAnswer.CROWDED, ("ns/promised",))
    stranger = replace(promised, tenant="b")
    assert found(stranger, earlier)["earlier"].breaks == ()


def test_a_broken_promise_takes_what_is_left_and_breaks_no_other() -> None:
    late = asked("late", 0.1, 4.0, promised=True)
    sound = asked("sound", 1.0, 2.5, promised=True)
    share = found(late, sound)
    assert share["sound"].answer is DeadlineAnswer.KEEPS
    assert (share["late"].answer, share["late"].promised) == (DeadlineAnswer.LATE, True)
    assert share["late"].accelerators_m == 4000
    assert share["late"].slack_s < 0


def test_a_tenant_promises_no_more_than_it_is_entitled_to() -> None:
    job = asked("one", 0.5, 1.0)  # needs four
    assert found(job, entitled={"a": 4.0})["one"].accelerators_m == 4000
    refused = found(job, entitled={"a": 3.0})["one"]
    assert refused.answer is DeadlineAnswer.CROWDED


def test_entitlements_are_rounded_to_a_millionth_of_a_unit() -> None:
    """A core is worth few units, so the rounding is a large part of it."""
    core = Way("gpu", "gpu", 1.0, 0.00024049, (1,), (1.0,))
    assert found(asked("one", 2.0, 1.0, ways=(core,)), entitled={"a": 0.00024})["one"].accelerators_m == 1000


def test_of_two_types_the_cheaper_one_is_taken_that_is_enough() -> None:
    slow = Way("slow", "slow", 1.0, 0.25, (1, 2, 4, 8), (0.5, 0.9, 1.6, 2.5))
    relaxed, hurried = (asked("one", hours, 1.0, ways=(ELASTIC, slow)) for hours in (3.0, 0.3))
    assert found(relaxed)["one"].accelerator == "slow"
    assert found(hurried)["one"].accelerator == "gpu"


def test_a_job_of_one_size_waits_until_all_of_it_fits() -> None:
    gang = Way("gpu", "gpu", 2.0, 1.0, (3,), (1.0,))
    first = asked("first", 0.5, 1.2, promised=True)  # four until 22.5 minutes
    share = found(first, asked("gang", 2.0, 1.0, ways=(gang,)))["gang"]
    assert (share.answer, share.accelerators_m) == (DeadlineAnswer.KEEPS, 0)
    assert share.ends_s == pytest.approx(NOW + 1.2 * HOUR / 3.2 + HOUR)


def test_only_some_are_tried_at_a_time_earliest_first() -> None:
    many = [asked(f"job-{i:02d}", 10 + i, 0.1) for i in range(TRIED + 3)]
    answers = [share.answer for _, share in sorted(found(*many).items())]
    assert answers == [DeadlineAnswer.KEEPS] * TRIED + [DeadlineAnswer.NOT_TRIED] * 3


@st.composite
def _jobs(draw: st.DrawFn) -> list[Asked]:
    count = draw(st.integers(1, 6))
    hours, work = st.floats(0.1, 8.0), st.floats(0.05, 20.0)
    return [asked(f"j{i}", draw(hours), draw(work), promised=draw(st.booleans())) for i in range(count)]


@given(_jobs())
def test_shares_never_add_up_to_more_than_there_is(jobs: list[Asked]) -> None:
    share = found(*jobs)
    assert sum(each.accelerators_m for each in share.values()) <= 8000
    for job in jobs:
        mine = share[job.job]
        assert mine.promised >= job.promised
        if mine.answer is DeadlineAnswer.KEEPS:
            assert mine.ends_s is not None
            early_s = min(EARLY_S, EARLY_PART * (job.deadline_s - NOW))
            assert mine.ends_s <= job.deadline_s - early_s + 1e-3
            assert math.isclose(mine.slack_s, job.deadline_s - mine.ends_s)


@given(_jobs(), st.floats(0.1, 8.0), st.floats(0.05, 20.0))
def test_one_more_job_breaks_no_promise(jobs: list[Asked], hours: float, work: float) -> None:
    before = found(*jobs)
    known = [replace(job, promised=before[job.job].promised) for job in jobs]
    after = found(*known, asked("more", hours, work))
    for name, share in before.items():
        if share.answer is DeadlineAnswer.KEEPS:
            assert after[name].answer is DeadlineAnswer.KEEPS
