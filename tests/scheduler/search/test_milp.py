"""The mixed-integer step: what it may change, and what it may not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.scheduling.generator import generate
from hypothesis import HealthCheck, given, settings

from busbar.scheduler import JobId, Policy, Snapshot, SolverError, applied, check_plan, plan
from busbar.scheduler.search.milp import _choices
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.start import start_waiting
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, placed, tenant
from ..strategies import snapshots

POLICY = Policy(solver_seconds=None)
PLAIN = replace(POLICY, solver=False)
quiet = settings(
    max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@quiet
@given(snapshots())
def test_the_solver_only_improves_and_settles(snapshot: Snapshot) -> None:
    result, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, result) == []
    assert result == plan(snapshot, POLICY, NOW)[0]
    assert result.solver_gain >= 0
    if not result.solver_gain:
        assert result.actions == plan(snapshot, PLAIN, NOW)[0].actions
    assert plan(applied(snapshot, result, NOW), POLICY, NOW)[0].actions == ()


def test_the_solver_finds_what_single_exchanges_do_not() -> None:
    """Without reservations: with them priorities use up what the plan may disrupt."""
    snapshot = generate(40, 80, 80, 3)
    plain, _ = plan(snapshot, replace(PLAIN, reservations=0), 10_000_000.0)
    better, _ = plan(snapshot, replace(POLICY, reservations=0), 10_000_000.0)
    assert check_plan(snapshot, better) == []
    assert better.solver_gain > 0.01 * plain.value
    assert better.value > plain.value


def test_without_the_solver_the_plan_is_still_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **more: object) -> None:
        raise SolverError("out of order")

    monkeypatch.setattr("busbar.scheduler.highs.solve", broken)
    snapshot = generate(40, 80, 80, 2)
    result, _ = plan(snapshot, POLICY, 10_000_000.0)
    assert result.solver_error == "out of order"
    assert result.actions == plan(snapshot, PLAIN, 10_000_000.0)[0].actions


def started(snapshot: Snapshot) -> set[str]:
    """The jobs that run after the plan, which the checker accepts."""
    result, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, result) == []
    return {str(action.job) for action in result.actions if action.to is not None}


@pytest.mark.parametrize("quota", [{"H100": (0, None, 1)}, {"any": (0, 1, None)}, {"any": (1, 0, None)}])
def test_the_solver_leaves_the_last_of_a_quota_to_the_higher_priority(
    quota: dict[str, tuple[int, int | None, int | None]],
) -> None:
    """A short job is worth more than a long one, but less than one of a higher priority."""
    snapshot = cluster(
        job("first", "a", priority=200, remaining=1e7, accelerators=("H100",)),
        job("short", "a", priority=100, remaining=10.0, accelerators=("H100",)),
        tenants=(tenant("a", 1.0, **quota),),
        H100=1,
    )
    assert started(snapshot) == {"uid-first"}


def test_the_solver_leaves_the_last_of_a_quota_to_the_user_inside_its_share() -> None:
    """Of two users, the one with no allocation comes before the one with all of it, whatever the jobs' values."""
    held = replace(job("held", "a", on=placed("H100", "H100-0000")), user="u", preemptible=False)
    first = replace(job("first", "a", remaining=1e7), user="v")
    short = replace(job("short", "a", remaining=10.0), user="u")
    snapshot = cluster(held, first, short, tenants=(tenant("a", H100=(0, None, 2)),), H100=1)
    assert started(snapshot) == {"uid-first"}


def test_the_place_for_which_others_were_stopped_is_no_choice_of_the_solver() -> None:
    round_ = Round(PlanningState(cluster(job("gang", size=8), job("other"), H100=2), POLICY, NOW), NOW)
    start_waiting(round_)
    assert {choice.assignment.job.name for choice in _choices(round_)} == {"gang", "other"}
    round_.claimed.add(JobId("uid-gang"))
    assert {choice.assignment.job.name for choice in _choices(round_)} == {"other"}
