"""Places of sleeping replicas: whoever waits may have them, and nobody else takes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    ActionKind,
    Event,
    Happened,
    Happening,
    Job,
    JobKind,
    Plan,
    Policy,
    Snapshot,
    Tenant,
    WaitCode,
    applied,
    check_plan,
    plan,
    react,
)

from ..build import NOW, cluster, job, placed, speeds, tenant
from ..strategies import snapshots

POLICY = Policy(solver_seconds=None)


def sleeper(name: str, node: str, size: int = 1, of: str = "a", since: float = NOW - 5) -> Job:
    """A replica that went to sleep a moment ago."""
    on = placed("H100", node, size=size)
    made = job(name, of, size, kind=JobKind.SERVING, on=on, since=since, preemptible=False)
    return replace(made, yields=True)


def without_the_gone(snapshot: Snapshot) -> Snapshot:
    """As in production: a sleeping replica that was stopped is not asked for again."""
    kept = tuple(one for one in snapshot.jobs if not (one.yields and one.run is None))
    return replace(snapshot, jobs=kept)


def decide(snapshot: Snapshot) -> Plan:
    result, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, result) == []
    after = without_the_gone(applied(snapshot, result, NOW))
    again, _ = plan(after, POLICY, NOW)
    assert again.actions == ()
    return result


def names(result: Plan, kind: ActionKind) -> set[str]:
    return {str(action.job)[4:] for action in result.actions if action.kind is kind}


FULL = [sleeper(f"s{i}", "H100-0000") for i in range(8)]


@pytest.mark.parametrize(
    ("waiting", "size", "stopped"),
    [
        (job("x"), 8, 1),
        (job("x", size=3), 8, 3),
        (job("x", "b"), 8, 1),
        (job("x", "b", priority=1), 8, 1),
        (job("x", kind=JobKind.SERVING, preemptible=False), 8, 1),
        (job("x", kind=JobKind.OPAQUE, preemptible=False), 8, 1),
        (job("x", size=8), 8, 8),
        (job("x"), 7, 0),
        (job("x", size=2), 7, 1),
        (job("x", size=9), 8, 0),
        (job("x", accelerators=("L4",)), 8, 0),
    ],
    ids=[
        "of its tenant", "larger", "of another tenant", "low priority", "a replica", "a foreign pod", "all of it",
        "fits beside them", "fits in part", "fits nowhere", "another type",
    ],
)  # fmt: skip
def test_a_waiting_job_takes_as_many_sleeping_places_as_it_needs(
    waiting: Job, size: int, stopped: int
) -> None:
    result = decide(cluster(*FULL[:size], waiting, H100=1))
    assert len(names(result, ActionKind.PREEMPT)) == stopped
    starts = [action for action in result.actions if action.kind is ActionKind.START]
    fits = stopped > 0 or size < 8
    assert [str(action.job) for action in starts] == (["uid-x"] if fits else [])
    assert [len(action.after) for action in starts] == ([stopped] if fits else [])


def test_nobody_is_stopped_while_nobody_waits() -> None:
    beside = job("old", size=4, on=placed("H100", "H100-0001", size=4))
    assert decide(cluster(*FULL, beside, H100=2)).actions == ()


def test_a_growing_job_leaves_sleeping_replicas_alone() -> None:
    running = job("e", on=placed("H100", "H100-0000"), workload_class="c", remaining=1e6)
    elastic = replace(running, max_pods=8)
    made = replace(cluster(*FULL[:4], elastic, H100=1), table=speeds("c", H100=1.0))
    (action,) = decide(made).actions
    assert (action.kind, action.to and action.to.pods) == (ActionKind.GROW, 4)


def test_a_tenant_at_its_ceiling_gets_the_places_of_its_own_sleeping_replicas() -> None:
    ceiling = tenant("a", H100=(0, None, 8))
    result = decide(cluster(*FULL, job("x", size=2), tenants=(ceiling,), H100=2))
    assert len(names(result, ActionKind.PREEMPT)) == 2
    assert names(result, ActionKind.START) == {"x"}


def test_a_tenant_above_a_lowered_ceiling_keeps_them_for_a_job_that_needs_none() -> None:
    lowered = tenant("a", H100=(0, None, 4))
    result = decide(cluster(*FULL, job("x", "b"), tenants=(lowered, Tenant("b")), H100=2))
    assert names(result, ActionKind.PREEMPT) == set()
    assert names(result, ActionKind.START) == {"x"}


def test_a_gang_takes_a_free_node_and_one_where_replicas_sleep() -> None:
    result = decide(cluster(*FULL, job("x", size=8, pods=2), H100=2))
    assert len(names(result, ActionKind.PREEMPT)) == 8
    assert names(result, ActionKind.START) == {"x"}


def test_a_guarantee_takes_sleeping_places_before_running_work() -> None:
    borrower = job("b1", "b", size=4, on=placed("H100", "H100-0000", size=4))
    asleep = [sleeper(f"s{i}", "H100-0000", of="c") for i in range(4)]
    mine = tenant("a", H100=(8, None, None))
    result = decide(cluster(borrower, *asleep, job("x", size=4), tenants=(mine,), H100=1))
    assert names(result, ActionKind.PREEMPT) == {f"s{i}" for i in range(4)}


def test_running_work_is_neither_stopped_nor_moved_where_sleeping_places_will_do() -> None:
    borrower = job("b1", "b", size=8, on=placed("H100", "H100-0000", size=8))
    asleep = [sleeper(f"s{i}", "H100-0001", of="c") for i in range(8)]
    mine = tenant("a", H100=(8, None, None))
    result = decide(cluster(borrower, *asleep, job("x", size=8), tenants=(mine,), H100=2))
    assert {str(action.job)[4:] for action in result.actions} == {"x", *(f"s{i}" for i in range(8))}


def test_a_guarantee_that_needs_more_takes_both() -> None:
    borrower = job("b1", "b", size=4, on=placed("H100", "H100-0000", size=4))
    asleep = [sleeper(f"s{i}", "H100-0000", of="c") for i in range(4)]
    mine = tenant("a", H100=(8, None, None))
    result = decide(cluster(borrower, *asleep, job("x", size=8), tenants=(mine,), H100=1))
    assert names(result, ActionKind.PREEMPT) == {"b1", *(f"s{i}" for i in range(4))}
    assert names(result, ActionKind.START) == {"x"}


def test_no_disruption_budget_is_spent_on_sleeping_replicas() -> None:
    many = [sleeper(f"s{i:02d}", f"H100-{i // 8:04d}") for i in range(64)]
    result = decide(cluster(*many, *(job(f"x{i}", size=8) for i in range(8)), H100=8))
    assert len(names(result, ActionKind.PREEMPT)) == 64
    assert len(names(result, ActionKind.START)) == 8


def test_an_event_is_answered_in_the_same_way() -> None:
    before = cluster(*FULL, H100=1)
    first, memo = plan(before, POLICY, NOW)
    after = replace(before, jobs=(*before.jobs, job("x", size=2, submitted=NOW + 1)))
    event = Event(NOW + 1, (Happening(Happened.ARRIVED, "uid-x"),))
    quick, _ = react(after, first, event, memo)
    alone, _ = react(after, first, event)
    assert quick == alone
    assert check_plan(after, quick) == []
    assert len(names(quick, ActionKind.PREEMPT)) == 2
    assert names(quick, ActionKind.START) == {"x"}


def test_a_replica_that_wakes_is_not_stopped_any_more() -> None:
    before = cluster(*FULL, job("x", size=2), H100=1)
    _, memo = plan(before, POLICY, NOW)
    awake = replace(before, jobs=tuple(replace(one, yields=False) for one in before.jobs))
    result, _ = plan(awake, POLICY, NOW, memo)
    assert result.actions == ()


@st.composite
def sleepy(draw: st.DrawFn) -> Snapshot:
    """Random clusters in which some replicas sleep."""
    made = draw(snapshots())
    return replace(
        made,
        jobs=tuple(
            replace(one, kind=JobKind.SERVING, preemptible=False, max_pods=one.min_pods, yields=True)
            if one.run is not None
            and not one.run.releasing
            and len(one.run.placement.nodes) == one.min_pods
            and draw(st.booleans())
            else one
            for one in made.jobs
        ),
    )


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(sleepy())
def test_every_plan_is_allowed_settles_and_moves_no_sleeping_replica(snapshot: Snapshot) -> None:
    result = decide(snapshot)
    asleep = {one.id for one in snapshot.jobs if one.yields}
    touched = [action for action in result.actions if action.job in asleep]
    assert all(action.kind is ActionKind.PREEMPT for action in touched)
    starts = [action for action in result.actions if action.to is not None]
    waits_for_room = [record for record in result.waiting if record.code is WaitCode.PREEMPTING]
    assert not touched or starts or waits_for_room or result.reservations
