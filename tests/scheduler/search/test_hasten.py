"""Promised deadlines that need their shares now get them inside their tenant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import (
    Cell,
    DeadlineAnswer,
    Event,
    Job,
    PerformanceTable,
    Policy,
    Rate,
    Snapshot,
    applied,
    check_plan,
    plan,
    react,
)

from ..build import NOW, cluster, job, placed, tenant

POLICY = Policy(solver_seconds=None)
SPEEDS = {1: 1.0, 2: 1.8, 4: 3.2, 8: 5.0}
TABLE = PerformanceTable(
    tuple(Cell("c", "H100", 1000 * n, speed=s, low=s) for n, s in SPEEDS.items()), (Rate("H100"),)
)
JUST = NOW - 10


def due(
    name: str,
    hours: float,
    work_h: float,
    *,
    on: int = 0,
    most: int = 8,
    since: float = JUST,
    **about: object,
) -> Job:
    """A job that must be done in so many hours and needs hours of work on one accelerator."""
    place = placed("H100", *["H100-0000"] * on) if on else None
    made = job(name, workload_class="c", on=place, since=since, remaining=work_h * 3600)
    changed: dict[str, object] = {
        "deadline_s": NOW + hours * 3600,
        "max_pods": most,
        "restart_s": 0.0,
        "promised": bool(on),
    }
    return replace(made, **(changed | about))  # type: ignore[arg-type]


def other(name: str, on: int, *, most: int = 8, since: float = JUST, **about: object) -> Job:
    return due(
        name, 0, 100, on=on, most=most, since=since, **({"deadline_s": None, "promised": False} | about)
    )


def after(*jobs: Job, **about: object) -> Snapshot:
    snapshot = replace(cluster(*jobs, H100=1, **about), table=TABLE)  # type: ignore[arg-type]
    made, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, made) == []
    done = applied(snapshot, made, NOW)
    again, _ = plan(done, POLICY, NOW)
    assert again.actions == ()
    return done


def held(snapshot: Snapshot) -> dict[str, int]:
    return {one.name: 0 if one.run is None else one.run.placement.pods for one in snapshot.jobs}


def test_an_urgent_job_takes_what_it_needs_of_one_that_has_just_started() -> None:
    found = held(after(due("due", 0.5, 1.0), other("long", 8)))
    assert found == {"due": 4, "long": 4}


def test_a_job_with_time_left_waits_its_turn() -> None:
    """With four it would be done in 19 minutes of the eight hours."""
    assert held(after(due("due", 8.0, 1.0), other("long", 8, most=8)))["long"] >= 7


def test_a_job_that_is_nearly_done_keeps_its_place() -> None:
    """It has more time left than it runs, but none to start again."""
    nearly = due("nearly", 0.05, 0.01, on=1, most=1)
    found = held(after(nearly, due("due", 0.3, 1.4), other("long", 7)))
    assert (found["nearly"], found["due"]) == (1, 4)


def test_a_running_job_that_is_too_slow_gets_more() -> None:
    assert held(after(due("due", 0.4, 1.0, on=2, most=4), other("long", 6)))["due"] == 4


def test_urgent_jobs_give_what_they_hold_above_their_shares() -> None:
    found = held(after(due("first", 1.0, 1.6, on=8), due("second", 0.5, 1.0)))
    assert found == {"first": 4, "second": 4}


def test_a_deadline_out_of_reach_disturbs_nobody() -> None:
    snapshot = after(due("late", 0.1, 1.0), other("long", 8))
    assert held(snapshot) == {"late": 0, "long": 8}
    assert not snapshot.jobs[0].promised or snapshot.jobs[0].name != "late"


@pytest.mark.parametrize("about", [{"priority": 200}, {"preemptible": False}, {"tenant": "b"}])
def test_stronger_jobs_and_other_tenants_keep_their_places(about: dict[str, object]) -> None:
    long = replace(other("long", 8, since=NOW - 7200, max_pods=8), **about)  # type: ignore[arg-type]
    tenants = (tenant("a"), tenant("b", H100=(8, 8, 8)))
    found = held(after(due("due", 0.5, 1.0), long, tenants=tenants))
    assert found["long"] >= 8 - 4 * (about == {"tenant": "c"})


def test_promises_are_for_jobs_of_known_length() -> None:
    snapshot = replace(cluster(due("due", 0.5, 1.0, remaining_work=None), H100=1), table=TABLE)
    assert plan(snapshot, POLICY, NOW)[0].deadlines == ()


def test_what_was_promised_is_carried_out_and_said() -> None:
    snapshot = replace(cluster(due("due", 0.5, 1.0), other("long", 8), H100=1), table=TABLE)
    made, memo = plan(snapshot, POLICY, NOW)
    [share] = made.deadlines
    assert (share.answer, share.accelerators_m) == (DeadlineAnswer.KEEPS, 4000)
    done = applied(snapshot, made, NOW)
    assert [one.promised for one in done.jobs] == [True, False]
    # Between two full plans the shares are those of the last one, with the memo or without.
    later = replace(done, jobs=(*done.jobs, due("more", 0.5, 0.1)))
    event = Event.between(done, later, NOW + 5)
    with_memo, _ = react(later, made, event, memo)
    without, _ = react(later, made, event)
    assert with_memo == without
    assert with_memo.deadlines == made.deadlines
