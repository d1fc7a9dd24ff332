"""Others move for a job that fits by count and not by place."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    Action,
    ActionKind,
    Job,
    JobKind,
    Policy,
    Snapshot,
    applied,
    check_plan,
    plan,
)

from ..build import NOW, cluster, job, placed, tenant

POLICY = Policy(solver_seconds=None)


def spread(count: int, size: int = 1, tenant: str = "b") -> list[Job]:
    """One job of unknown length on each node, which has just saved."""
    return [
        job(f"r{i}", tenant, size=size, on=placed("H100", f"H100-{i:04d}", size=size), saved=NOW)
        for i in range(count)
    ]


def decide(*jobs: Job, nodes: int, policy: Policy = POLICY) -> tuple[Action, ...]:
    """The plan's actions; the next plan has none."""
    snapshot = cluster(*jobs, H100=nodes)
    made, _ = plan(snapshot, policy, NOW)
    assert check_plan(snapshot, made) == []
    assert plan(applied(snapshot, made, NOW), policy, NOW)[0].actions == ()
    return made.actions


@pytest.mark.parametrize("whose", ["a", "b"])
def test_one_job_of_any_tenant_moves(whose: str) -> None:
    large = job("x", "a", size=8)
    jobs = (*spread(4, tenant=whose), large)
    moved, start = sorted(decide(*jobs, nodes=4), key=lambda action: action.kind is ActionKind.START)
    assert (moved.kind, start.kind, start.after) == (ActionKind.MOVE, ActionKind.START, (moved.job,))
    assert moved.makes_room_for == large.id
    assert "so that a job that needs its place fits" in moved.reason
    snapshot = cluster(*jobs, H100=4)
    after = applied(snapshot, plan(snapshot, POLICY, NOW)[0], NOW)
    assert [j.preemptions for j in after.jobs if j.id == moved.job] == [1]


def test_the_job_that_loses_least_moves() -> None:
    jobs = spread(4)
    for i in (0, 1, 3):
        run = jobs[i].run
        assert run is not None
        jobs[i] = replace(jobs[i], run=replace(run, saved_at_s=NOW - 60))
    actions = decide(*jobs, job("x", "a", size=8), nodes=4)
    assert [a.job for a in actions if a.kind is ActionKind.MOVE] == ["uid-r2"]


def test_a_job_that_was_preempted_before_costs_more_to_move() -> None:
    jobs = [replace(one, preemptions=1) for one in spread(4)]
    jobs[1] = replace(jobs[1], preemptions=0)
    actions = decide(*jobs, job("x", "a", size=8), nodes=4)
    assert [a.job for a in actions if a.kind is ActionKind.MOVE] == ["uid-r1"]


@pytest.mark.parametrize(
    "change",
    [
        {"preemptible": False},
        {"kind": JobKind.SERVING},
        {"preemptions": POLICY.max_preemptions},
        {"since": NOW - 100},
        {"saved": NOW - 5 * 3600.0},
        {"own": 500},
    ],
    ids=[
        "not preemptible",
        "serving",
        "moved often",
        "has just started",
        "would repeat too much",
        "ranks higher",
    ],
)
def test_a_job_that_must_not_be_disturbed_is_not_moved(change: dict[str, object]) -> None:
    def one(running: Job) -> Job:
        run = running.run
        assert run is not None
        if "since" in change:
            return replace(running, run=replace(run, started_at_s=NOW - 100))
        if "saved" in change:
            return replace(running, run=replace(run, saved_at_s=NOW - 5 * 3600.0))
        if "own" in change:
            return replace(running, tenant="a", namespace="ns-a", priority=500)
        return replace(running, **change)  # type: ignore[arg-type]

    assert decide(*map(one, spread(4)), job("x", "a", size=8), nodes=4) == ()


def test_no_more_jobs_move_than_the_round_may_disrupt() -> None:
    # Each node holds three one-accelerator jobs; three of them would have to move.
    jobs = [
        job(f"r{i}{k}", "b", on=placed("H100", f"H100-{i:04d}"), saved=NOW)
        for i in range(3)
        for k in range(3)
    ]
    assert len(decide(*jobs, job("x", "a", size=8), nodes=3)) == 4
    recent = [replace(one, last_move_at_s=NOW - 10) for one in jobs[:6]]  # of a budget of eight two are left
    assert decide(*recent, *jobs[6:], job("x", "a", size=8), nodes=3) == ()


def test_no_job_moves_for_one_that_gains_less_than_it_loses() -> None:
    # One accelerator repeats 1,530 s; twice that is less than 8 x 1 h, and more than 8 x 6 min.
    late = [
        replace(one, run=replace(one.run, saved_at_s=NOW - 1500)) for one in spread(4) if one.run is not None
    ]
    large, speed = job("x", "a", size=8), 8**0.9
    assert decide(*late, replace(large, remaining_work=speed * 3600), nodes=4)
    assert decide(*late, replace(large, remaining_work=speed * 360), nodes=4) == ()


Nodes = list[list[int]]


def _can_make_room(nodes: Nodes, size: int) -> bool:
    """By trying everything: some jobs of one node have places elsewhere, and then the request fits there."""
    free = [8 - sum(jobs) for jobs in nodes]
    for i, jobs in enumerate(nodes):
        for count in range(1, len(jobs) + 1):
            for some in combinations(jobs, count):
                if free[i] + sum(some) < size:
                    continue
                others = [k for k in range(len(nodes)) if k != i]
                rest = free[i] + sum(some) - size
                for places in product([*others, i], repeat=count):
                    left = {k: free[k] for k in others} | {i: rest}
                    for one, k in zip(some, places, strict=True):
                        left[k] -= one
                    if min(left.values()) >= 0:
                        return True
    return False


@st.composite
def blocked(draw: st.DrawFn) -> tuple[Nodes, int]:
    """Jobs by node, and a request that fits on none."""
    one = st.sampled_from(
        ([1], [1, 1], [2], [3], [2, 1], [4], [2, 2], [1, 1, 3], [3, 3], [4, 2], [2, 2, 2], [4, 4])
    )
    nodes = draw(st.lists(one, min_size=2, max_size=3))
    return nodes, draw(st.integers(9 - min(map(sum, nodes)), 8))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(blocked())
def test_room_is_made_wherever_moves_can_make_it(situation: tuple[Nodes, int]) -> None:
    nodes, size = situation
    running = [
        job(f"r{i}{k}", "b", size=one, on=placed("H100", f"H100-{i:04d}", size=one), saved=NOW)
        for i, jobs in enumerate(nodes)
        for k, one in enumerate(jobs)
    ]
    # Its tenant is entitled to nothing, so that it takes nothing by right.
    tenants = (tenant("a", 1e-6), tenant("b"))
    snapshot = cluster(*running, job("x", "a", size=size), tenants=tenants, H100=len(nodes))
    assert _starts(snapshot) == _can_make_room(nodes, size)


def _starts(snapshot: Snapshot) -> bool:
    made, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, made) == []
    assert all(action.kind in (ActionKind.MOVE, ActionKind.START) for action in made.actions)
    return any(action.kind is ActionKind.START for action in made.actions)
