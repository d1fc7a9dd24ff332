"""Elastic jobs of any size: they use what is free, and give back what is needed and no more."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    ActionKind,
    Cell,
    Job,
    PerformanceTable,
    Policy,
    Rate,
    Snapshot,
    TableView,
    applied,
    check_plan,
    plan,
)
from busbar.scheduler.search.follow import follow
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, placed, tenant

POLICY = Policy(solver_seconds=None)
quiet = settings(max_examples=40, deadline=None, derandomize=True)


def elastic(name: str, least: int, most: int, on: int = 0, tenant: str = "a") -> Job:
    """A job of one-accelerator pods, running on so many of them or waiting, of unknown length."""
    place = placed("H100", *["H100-0000"] * on) if on else None
    return replace(job(name, tenant, on=place, saved=NOW), min_pods=least, max_pods=most)


def settled(snapshot: Snapshot, rounds: int = 6) -> dict[str, int]:
    """Pods of each job when the plans change nothing more."""
    now = NOW
    for _ in range(rounds):
        made, _ = plan(snapshot, POLICY, now)
        assert check_plan(snapshot, made) == []
        if not made.actions:
            break
        after = applied(snapshot, made, now)
        now += 400.0
        # What was being stopped is gone, and all have just saved.
        jobs = (
            j
            if j.run is None
            else replace(j, run=None if j.run.releasing else replace(j.run, saved_at_s=now))
            for j in after.jobs
        )
        snapshot = replace(after, jobs=tuple(jobs))
    assert plan(snapshot, POLICY, now)[0].actions == ()
    return {j.name: 0 if j.run is None else j.run.placement.pods for j in snapshot.jobs}


@quiet
@given(st.integers(1, 4), st.integers(0, 6), st.integers(0, 5), st.integers(0, 4), st.booleans())
def test_all_that_is_free_is_used(least: int, more: int, held: int, grown: int, runs: bool) -> None:
    """One elastic job beside one that holds a part of a node: nothing is left free that it may use."""
    most = least + more
    grown = min(least + grown, most)
    free = 8 - held
    if (grown if runs else least) > free:
        return
    other = (job("other", "a", size=held, on=placed("H100", "H100-0000", size=held)),) if held else ()
    one = elastic("x", least, most, on=grown if runs else 0)
    assert settled(cluster(*other, one, H100=1))["x"] == min(most, free)


@quiet
@given(st.integers(1, 4), st.integers(1, 7))
def test_exactly_what_a_right_needs_is_given_back(least: int, needed: int) -> None:
    owner = (tenant("a", H100=(8, None, None)),)
    lent = elastic("lent", least, 8, on=8, tenant="b")
    found = settled(cluster(lent, job("x", "a", size=needed), tenants=owner, H100=1), 3)
    assert found == {"lent": 8 - needed if 8 - needed >= least else 0, "x": 1}


def test_room_that_a_waiting_job_could_use_is_left_free() -> None:
    kept = job("kept", size=2, on=placed("H100", "H100-0000", size=2), preemptible=False, since=NOW - 100)
    grown = replace(elastic("x", 2, 8, on=3), preemptible=False)
    gang = job("gang", size=6)
    made, _ = plan(cluster(kept, grown, gang, H100=1), POLICY, NOW)
    assert made.actions == ()
    assert settled(cluster(kept, replace(grown, preemptible=True), H100=1))["x"] == 6


def test_a_job_of_unknown_length_grows_within_the_horizon_only() -> None:
    # 30 s of restart and 5 min since the last checkpoint, on 7 of 8: an hour saves seven minutes.
    fresh = elastic("x", 2, 8, on=7)
    assert fresh.run is not None
    late = replace(fresh, run=replace(fresh.run, saved_at_s=NOW - 300))
    for one, grows in ((fresh, True), (late, False)):
        made, _ = plan(cluster(one, H100=1), POLICY, NOW)
        assert [a.kind for a in made.actions] == ([ActionKind.GROW] if grows else [])
    longer = replace(POLICY, unknown_length_s=4 * 3600.0)
    assert plan(cluster(late, H100=1), longer, NOW)[0].actions


CELLS = (Cell("c", "H100", 2000, speed=10.0), Cell("c", "H100", 8000, speed=20.0))


def test_a_size_between_two_cells_lies_between_their_speeds() -> None:
    view = TableView(PerformanceTable(CELLS, (Rate("H100"),)))
    speeds = [
        found.speed for size in range(2, 9) if (found := view.estimate("c", "H100", "resident", 1000 * size))
    ]
    assert speeds == sorted(speeds)
    assert (speeds[0], speeds[-1]) == (10.0, 20.0)
    assert abs(speeds[2] - 200**0.5) < 1e-9  # four is half way between two and eight


def test_a_place_between_the_candidates_follows_its_own_cell() -> None:
    """Only the speed of the size where the job runs was reported: no candidate differs."""
    one = replace(elastic("x", 2, 8, on=6), workload_class="c")
    before = replace(cluster(one, H100=1), table=PerformanceTable(CELLS, (Rate("H100"),)))
    cells = (*CELLS, Cell("c", "H100", 6000, speed=19.0), Cell("c", "H100", 4000, speed=200**0.5))
    after = replace(before, table=PerformanceTable(cells, (Rate("H100"),)))
    state = PlanningState(before, POLICY, NOW)
    assert follow(state, after)
    found, fresh = (
        state.assignments[one.id].candidate,
        PlanningState(after, POLICY, NOW).assignments[one.id].candidate,
    )
    assert found == fresh
    assert found is not None
    assert found.speed == 19.0
