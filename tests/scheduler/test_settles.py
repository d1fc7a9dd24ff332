"""Regression cases: plans that did not settle, or that the checker refused."""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler import JobKind, Plan, Policy, Snapshot, applied, check_plan, plan

from .build import NOW, cluster, job, placed, tenant

POLICY = Policy(solver_seconds=None)


def made(snapshot: Snapshot) -> Plan:
    """The plan; asserts that planning again gives no actions."""
    result, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, result) == []
    assert plan(applied(snapshot, result, NOW), POLICY, NOW)[0].actions == ()
    return result


def running(result: Plan) -> set[str]:
    return {str(action.job) for action in result.actions if action.to is not None}


def test_a_stopped_pod_that_is_not_ours_starts_nowhere_else_at_the_same_moment() -> None:
    """A pod of no job ends for good when it is stopped; planning again had placed it on other devices."""
    snapshot = cluster(
        job("asks", "b", size=8, accelerators=("L4",)),
        job("pod", "c", kind=JobKind.OPAQUE, on=placed("L4", "L4-0000"), submitted=NOW - 3600),
        tenants=(tenant("b", any=(8, None, None)),),
        L4=1,
        V100=1,
    )
    result = made(snapshot)
    assert running(result) == {"uid-asks"}
    after = applied(snapshot, result, NOW)
    later, _ = plan(after, POLICY, NOW + POLICY.min_run_s)
    assert running(later) == {"uid-pod"}


def test_a_job_may_grow_where_another_starts() -> None:
    """A job releases its old devices on a node before it gets more there; the checker counted both."""
    grows = job("grows", "b", on=placed("L4", "L4-0000"), remaining=3e5, since=NOW - 1000, saved=NOW - 1000)
    asks = job("asks", "c", pods=3)
    snapshot = cluster(replace(grows, max_pods=2), replace(asks, max_pods=6), L4=1)
    result = made(snapshot)
    sizes = {action.job: action.to.pods for action in result.actions if action.to is not None}
    assert sizes == {"uid-asks": 6, "uid-grows": 2}
