"""The mixed-integer step: what it may change, and what it may not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.scheduling.generator import generate
from hypothesis import HealthCheck, given, settings

from busbar.scheduler import (
    Cell,
    Job,
    JobId,
    PerformanceTable,
    Policy,
    PowerDomain,
    Rate,
    Snapshot,
    SolverError,
    applied,
    check_plan,
    highs,
    plan,
)
from busbar.scheduler.search.milp import _choices, _program
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.start import start_waiting
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, placed, tenant
from ..strategies import capped, powered, snapshots

POLICY = Policy(solver_seconds=None)
PLAIN = replace(POLICY, solver=False)
quiet = settings(
    max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@quiet
@given(snapshots() | powered() | capped())
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


# -- power domains --------------------------------------------------------------------------------------------

WATTS = {"old": 600.0, "new": 500.0, "hot": 700.0}


def _on_feeds(*jobs: Job, hangs: tuple[str, ...], carries: dict[str, float], row_w: float = 1e6) -> Snapshot:
    """A node of one H100 on each of these racks, which hang on a row."""
    base = cluster(*jobs, H100=len(hangs))
    cells = tuple(Cell(name, "H100", 1000, speed=1.0, watts=watts) for name, watts in WATTS.items())
    nodes = tuple(
        replace(node, domain=rack, capacity=replace(node.capacity, accelerators_m=1000))
        for node, rack in zip(base.nodes, hangs, strict=True)
    )
    racks = tuple(PowerDomain(name, watts, "row") for name, watts in carries.items())
    table = PerformanceTable(cells, (Rate("H100", 1.0, 700.0),))
    return replace(base, nodes=nodes, table=table, domains=(PowerDomain("row", row_w), *racks))


def _waits(name: str, workload: str, since_h: float) -> Job:
    return job(name, workload_class=workload, remaining=36_000.0, submitted=NOW - 3600 * since_h)


def test_the_solver_fills_a_feed_where_the_best_job_for_its_watts_leaves_too_few() -> None:
    """One old job is worth 1.3 new ones and draws 1.2 times as much: of 1,000 W two new ones make more."""
    jobs = (_waits("old", "old", 8.0), _waits("b", "new", 0.5), _waits("c", "new", 0.5))
    snapshot = _on_feeds(*jobs, hangs=("r0", "r0", "r1"), carries={"r0": 1e6, "r1": 1e6}, row_w=1000.0)
    assert started(snapshot) == {"uid-b", "uid-c"}
    plain, _ = plan(snapshot, PLAIN, NOW)
    assert [action.job for action in plan(snapshot, PLAIN, NOW)[0].actions] == ["uid-old"]
    assert plan(snapshot, POLICY, NOW)[0].value > plain.value


def test_the_program_gives_no_domain_more_than_it_carries() -> None:
    """Any two of four jobs fit by the row's watts and the accelerators; the racks carry one job each, one only a new one."""
    jobs = [
        _waits("a", "hot", 2.0),
        _waits("b", "hot", 1.0),
        _waits("c", "new", 0.5),
        _waits("d", "new", 0.4),
    ]
    carries = {"r0": 700.0, "r1": 500.0}
    snapshot = _on_feeds(*jobs, hangs=("r0", "r0", "r1", "r1"), carries=carries)
    round_ = Round(PlanningState(snapshot, POLICY, NOW), NOW)
    choices = _choices(round_)
    found = highs.solve(_program(round_, choices))
    assert found is not None
    chosen = {
        choice.assignment.job.name
        for choice in choices
        for variable, _ in choice.candidates
        if found.x[variable] > 0.5
    }
    assert chosen == {"a", "c"}


def test_what_keeps_its_place_draws_there() -> None:
    """The running job holds all of its rack's watts, so the program has only the other rack's for the two that wait."""
    runs = job(
        "runs", workload_class="hot", remaining=36_000.0, on=placed("H100", "H100-0000"), preemptible=False
    )
    jobs = (runs, _waits("a", "new", 2.0), _waits("b", "new", 1.0))
    snapshot = _on_feeds(*jobs, hangs=("r0", "r0", "r1", "r1"), carries={"r0": 700.0, "r1": 500.0})
    round_ = Round(PlanningState(snapshot, POLICY, NOW), NOW)
    choices = _choices(round_)
    found = highs.solve(_program(round_, choices))
    assert found is not None
    assert sum(found.x[variable] > 0.5 for choice in choices for variable, _ in choice.candidates) == 1
