"""On which type a job runs whose tenant is held to its share, and who may exchange places then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import Job, Plan, Policy, Snapshot, applied, check_plan, plan
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.shares import Shares
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, placed
from .test_exchange import table

POLICY = Policy(solver_seconds=None)
RATES = {"F": 3.0, "S": 1.0}
LITTLE, MUCH = "little", "much"
"""Classes: on the fast type 1.2 and 6 times as fast, which costs three times as much of a share."""


def backlog(*tenants: str, each: int = 40, nodes: int = 1) -> Snapshot:
    """So many jobs of each tenant, of one accelerator; even tenants gain little by the fast type, odd ones much."""
    jobs = [
        job(f"{name}{i:02d}", name, workload_class=(LITTLE, MUCH)[number % 2], remaining=100 * 3600.0)
        for number, name in enumerate(tenants)
        for i in range(each)
    ]
    return typed(cluster(*jobs, F=nodes, S=nodes))


def typed(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, table=table(RATES, **{LITTLE: {"F": 1.2, "S": 1.0}, MUCH: {"F": 6.0, "S": 1.0}}))


def settled(snapshot: Snapshot) -> tuple[Plan, Snapshot]:
    result, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, result) == []
    after = applied(snapshot, result, NOW)
    assert plan(after, POLICY, NOW)[0].actions == ()
    return result, after


def counts(snapshot: Snapshot) -> dict[str, tuple[int, int]]:
    """Accelerators of the fast and of the slow type, by tenant."""
    found: dict[str, tuple[int, int]] = {}
    for one in snapshot.jobs:
        fast, slow = found.get(one.tenant, (0, 0))
        kind = None if one.run is None else one.run.placement.accelerator
        found[one.tenant] = fast + (kind == "F"), slow + (kind == "S")
    return found


def test_each_tenant_has_the_type_that_brings_it_most_for_its_share() -> None:
    _, after = settled(backlog("a", "b"))
    fast, slow = counts(after)["a"]
    assert slow > fast, "a does 1 work for a unit of the slow type and 0.4 for one of the fast type"
    fast, slow = counts(after)["b"]
    assert fast > slow


@pytest.mark.parametrize(
    ("snapshot", "limited"),
    [
        (backlog("a", "b"), True),
        (backlog("a"), False),
        (backlog("a", "b", each=4), False),
        (typed(cluster(job("a1"), job("b1", "b"), F=1)), False),
    ],
    ids=["both wait", "one tenant", "room for all", "one type"],
)
def test_shares_limit_where_several_ask_for_more_than_there_is(snapshot: Snapshot, limited: bool) -> None:
    shares = Shares(PlanningState(snapshot, POLICY, NOW), NOW)
    assert shares.limit("a") is limited


def test_candidates_are_tried_in_the_order_of_what_they_bring_for_the_share() -> None:
    state = PlanningState(backlog("a", "b"), POLICY, NOW)
    round_ = Round(state, NOW)
    for name, first in (("uid-a00", "S"), ("uid-b00", "F")):
        one = next(own for key, own in state.assignments.items() if key == name)
        assert next(row.candidate.accelerator for row in round_.shares.ordered(one)) == first


def running(name: str, tenant: str, kind: str, workload: str) -> Job:
    """A job that has just saved; 100 h are left on the slow type."""
    return job(
        name, tenant, on=placed(kind, f"{kind}-0000"), saved=NOW, workload_class=workload, remaining=360_000.0
    )


def test_a_tenant_gives_the_fast_type_for_more_of_the_slow_one() -> None:
    """Tenant a has its share of two thirds of the units on the fast type, where it does little; for each of these it may
    have three slow ones: jobs exchange their places, and a's right to its share does the rest."""
    runs = [running(f"a{i}", "a", "F", LITTLE) for i in range(6)]
    runs += [running(f"b{i}", "b", "F", MUCH) for i in range(8, 10)]
    runs += [running(f"b{i}", "b", "S", MUCH) for i in range(8)]
    waiting = [
        job(f"{of}w{i}", of, workload_class=kind)
        for of, kind in (("a", LITTLE), ("b", MUCH))
        for i in range(20)
    ]
    before = typed(cluster(*runs, *waiting, F=1, S=1))
    assert counts(before) == {"a": (6, 0), "b": (2, 8)}
    after, now = before, NOW
    for _ in range(6):
        result, _ = plan(after, POLICY, now)
        assert check_plan(after, result) == []
        after, now = applied(after, result, now), now + 3600.0
    fast, slow = counts(after)["a"]
    assert 1.2 * fast + slow > 1.2 * 6, "a does more than before: it has taken slow ones for what it gave"
    assert counts(after)["b"][0] > 2


def test_no_job_moves_where_it_costs_its_tenant_more_than_it_brings() -> None:
    """The fast node is free, and a's running job would be 1.2 times as fast there for three times as much of a's share."""
    waiting = [job(f"{of}w{i:02d}", of, workload_class=LITTLE) for of in "ab" for i in range(40)]
    slow = [running(f"{of}{i}", of, "S", LITTLE) for of in "ab" for i in range(4)]
    _, after = settled(typed(cluster(*slow, *waiting, F=1, S=1)))
    assert all(
        one.run is not None and one.run.placement.accelerator == "S" for one in after.jobs if one in slow
    )
