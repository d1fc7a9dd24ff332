"""What the planner decides, one behaviour per test."""

from __future__ import annotations

import gc
from dataclasses import replace

from busbar.scheduler import (
    ActionKind,
    Job,
    JobId,
    Node,
    Plan,
    Policy,
    Pool,
    Resources,
    Snapshot,
    Taint,
    Tenant,
    Toleration,
    WaitCode,
    applied,
    check_plan,
    plan,
    sentence,
)

from .build import NOW, cluster, job, nodes, placed, pool, speeds, tenant

POLICY = Policy(solver_seconds=None)


def decide(snapshot: Snapshot) -> Plan:
    """Plan, check the plan, and check that planning again gives no actions."""
    result, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, result) == []
    after = applied(snapshot, result, NOW)
    again, _ = plan(after, POLICY, NOW)
    assert again.actions == ()
    return result


def started(result: Plan) -> set[str]:
    return {str(a.job)[4:] for a in result.actions if a.kind is ActionKind.START}


def stopped(result: Plan) -> set[str]:
    return {str(a.job)[4:] for a in result.actions if a.kind is ActionKind.PREEMPT}


def test_a_job_starts_where_it_is_fastest() -> None:
    snapshot = cluster(job("x", workload_class="c"), H100=1, L4=1)
    snapshot = replace(snapshot, table=speeds("c", H100=10.0, L4=2.0))
    (action,) = decide(snapshot).actions
    assert action.to is not None
    assert action.to.accelerator == "H100"


def test_a_gang_starts_whole_or_not_at_all() -> None:
    result = decide(cluster(job("x", size=8, pods=3), H100=2))
    assert result.actions == ()
    (record,) = result.waiting
    assert record.code is WaitCode.NODE_TOO_SMALL
    assert record.limit == 16000
    assert [(c.kind, c.needed) for c in record.changes] == [("pods", "2")]


def test_a_small_job_goes_to_the_fullest_node_that_holds_it() -> None:
    running = job("old", size=6, on=placed("H100", "H100-0001", size=6))
    (action,) = decide(cluster(running, job("x", size=2), H100=2)).actions
    assert action.to is not None
    assert action.to.nodes == ("H100-0001",)


def test_a_closed_pool_is_not_used() -> None:
    snapshot = cluster(job("x"), H100=1)
    snapshot = replace(snapshot, pools=(pool("H100", tenants=("b",)),))
    (record,) = decide(snapshot).waiting
    assert record.code is WaitCode.NO_POOL


def test_a_taint_keeps_jobs_off_unless_the_pool_tolerates_it() -> None:
    snapshot = cluster(job("x"), H100=1)
    tainted = tuple(replace(node, taints=(Taint("kwok", "fake"),)) for node in snapshot.nodes)
    assert decide(replace(snapshot, nodes=tainted)).actions == ()
    tolerant = (replace(snapshot.pools[0], tolerations=(Toleration("kwok", value="fake"),)),)
    assert started(decide(replace(snapshot, nodes=tainted, pools=tolerant))) == {"x"}


def test_in_a_cpu_pool_the_accelerator_is_a_cpu() -> None:
    def small(name: str, cpu_m: int) -> Job:
        return Job(JobId("uid-" + name), name, "ns", "a", per_pod=Resources(1000, cpu_m, 512))

    snapshot = Snapshot(
        pools=(Pool("cpu", "cpu", resource_name="cpu"),),
        nodes=(Node("n", "cpu", Resources(0, 1600, 4096)),),
        tenants=(Tenant("a"),),
        jobs=(small("x", 500), small("y", 0)),
    )
    result = decide(snapshot)
    assert started(result) == {"x", "y"}
    by_job = {str(a.job): a.to for a in result.actions}
    whole = by_job["uid-y"]
    assert whole is not None
    assert whole.per_pod.cpu_m == whole.per_pod.accelerators_m == 1000


def test_the_unit_of_a_cpu_pool_is_what_an_accelerator_costs() -> None:
    snapshot = Snapshot(
        pools=(Pool("cpu", "cpu", resource_name="cpu", unit_m=500),),
        nodes=(Node("n", "cpu", Resources(0, 1200, 4096)),),
        tenants=(Tenant("a"),),
        jobs=tuple(Job(JobId(f"uid-{i}"), str(i), "ns", "a", per_pod=Resources(1000)) for i in range(3)),
    )
    result = decide(snapshot)
    assert [a.to.per_pod.cpu_m for a in result.actions if a.to] == [500, 500]
    assert [(r.code, r.requested, r.free) for r in result.waiting] == [(WaitCode.CAPACITY, 1000, 400)]


def test_a_pod_that_needs_more_memory_than_a_node_has_waits() -> None:
    big = replace(job("x"), per_pod=Resources(1000, 1000, 500_000))
    (record,) = decide(cluster(big, H100=1)).waiting
    assert (record.code, record.resource) == (WaitCode.NODE_TOO_SMALL, "memory")


def test_the_ceiling_holds_even_when_the_cluster_is_idle() -> None:
    jobs = [job(f"x{i}") for i in range(4)]
    result = decide(cluster(*jobs, tenants=(tenant("a", H100=(0, None, 2)),), H100=1))
    assert len(started(result)) == 2
    record = result.waiting[0]
    assert (record.code, record.allocated, record.limit) == (WaitCode.CEILING, 2000, 2000)
    assert ("quota", "3") in [(c.kind, c.needed) for c in record.changes]


def test_a_guarantee_takes_back_what_others_borrowed() -> None:
    lent = [job(f"b{i}", "b", size=2, on=placed("H100", "H100-0000", size=2)) for i in range(4)]
    mine = job("x", "a", size=4)
    result = decide(cluster(*lent, mine, tenants=(tenant("a", H100=(4, None, None)),), H100=1))
    assert started(result) == {"x"}
    assert len(stopped(result)) == 2
    (start,) = [a for a in result.actions if a.kind is ActionKind.START]
    assert len(start.after) == 2
    assert [r.code for r in result.waiting if r.job == "uid-x"] == [WaitCode.PREEMPTING]


def test_the_victims_are_those_that_lose_least_work() -> None:
    fresh = job("fresh", "b", size=4, on=placed("H100", "H100-0000", size=4), saved=NOW - 10)
    stale = job("stale", "b", size=4, on=placed("H100", "H100-0000", size=4), saved=NOW - 3000)
    mine = job("x", "a", size=4)
    result = decide(cluster(stale, fresh, mine, tenants=(tenant("a", H100=(4, None, None)),), H100=1))
    assert stopped(result) == {"fresh"}


def test_a_tenant_above_its_fair_share_gives_back_the_difference() -> None:
    lent = [job(f"b{i}", "b", on=placed("H100", "H100-0000")) for i in range(8)]
    mine = [job(f"a{i}", "a") for i in range(8)]
    result = decide(cluster(*lent, *mine, H100=1))
    assert len(started(result)) == 4
    assert len(stopped(result)) == 4


def test_a_job_just_started_is_left_alone() -> None:
    lent = [job(f"b{i}", "b", on=placed("H100", "H100-0000"), since=NOW - 10) for i in range(8)]
    result = decide(cluster(*lent, job("x", "a"), H100=1))
    assert result.actions == ()


def test_what_must_not_be_preempted_is_not() -> None:
    lent = [job(f"b{i}", "b", on=placed("H100", "H100-0000"), preemptible=False) for i in range(8)]
    result = decide(cluster(*lent, job("x", "a"), tenants=(tenant("a", H100=(4, None, None)),), H100=1))
    assert result.actions == ()


def test_higher_priority_goes_first_and_preempts_inside_the_tenant() -> None:
    running = job("low", size=8, on=placed("H100", "H100-0000", size=8), priority=10)
    result = decide(cluster(running, job("high", size=8, priority=500), H100=1))
    assert (started(result), stopped(result)) == ({"high"}, {"low"})
    record = result.record(JobId("uid-low"))
    assert record is None or record.code is WaitCode.PRIORITY


def test_a_running_job_moves_only_when_it_pays() -> None:
    on = placed("L4", "L4-0000")
    table = speeds("c", H100=10.0, L4=2.0)
    short = job("x", workload_class="c", on=on, remaining=2.0 * 60, saved=NOW)
    long = replace(short, remaining_work=2.0 * 36000)
    assert decide(replace(cluster(short, H100=1, L4=1), table=table)).actions == ()
    (action,) = decide(replace(cluster(long, H100=1, L4=1), table=table)).actions
    assert action.kind is ActionKind.MOVE


def test_a_job_planned_into_room_that_is_being_cleared_waits_for_it() -> None:
    leaving = job("old", size=8, on=placed("H100", "H100-0000", size=8))
    assert leaving.run is not None
    leaving = replace(leaving, run=replace(leaving.run, releasing=True))
    result, _ = plan(cluster(leaving, job("x", size=8), H100=1), POLICY, NOW)
    assert result.actions == ()
    assert {str(r.job): r.code for r in result.waiting} == {
        "uid-x": WaitCode.PREEMPTING,
        "uid-old": WaitCode.RELEASING,
    }


def test_free_devices_on_too_many_nodes_are_reported_as_fragmented() -> None:
    jobs = [job(f"r{i}", size=5, on=placed("H100", f"H100-{i:04d}", size=5)) for i in range(2)]
    (record,) = decide(cluster(*jobs, job("x", size=4), H100=2)).waiting
    assert (record.code, record.free) == (WaitCode.FRAGMENTED, 6000)


def test_the_sentence_names_other_tenants_only_to_admins() -> None:
    lent = [job(f"b{i}", "secret", on=placed("H100", "H100-0000"), preemptible=False) for i in range(8)]
    (record,) = decide(cluster(*lent, job("x", "a"), H100=1)).waiting
    assert "secret" not in sentence(record)
    assert "another tenant" in sentence(record)
    assert "secret" in sentence(record, admin=True)


def test_another_accelerator_is_proposed_when_it_is_free() -> None:
    full = [job(f"r{i}", on=placed("H100", "H100-0000"), preemptible=False) for i in range(8)]
    (record,) = decide(cluster(*full, job("x", accelerators=("H100",)), H100=1, L4=1)).waiting
    assert ("accelerator", "L4") in [(c.kind, c.needed) for c in record.changes]


def test_an_unknown_tenant_gets_a_reason_not_a_place() -> None:
    snapshot = replace(cluster(job("x"), H100=1), tenants=())
    (record,) = decide(snapshot).waiting
    assert record.code is WaitCode.UNKNOWN_TENANT


def test_a_node_that_is_not_ready_gets_nothing() -> None:
    snapshot = cluster(job("x"), H100=1)
    snapshot = replace(snapshot, nodes=tuple(replace(n, ready=False) for n in snapshot.nodes))
    assert decide(snapshot).actions == ()


def test_the_order_of_the_snapshot_changes_nothing() -> None:
    jobs = [job(f"x{i}", "ab"[i % 2], size=1 + i % 4) for i in range(12)]
    one = cluster(*jobs, H100=2)
    other = replace(
        one, jobs=one.jobs[::-1], nodes=one.nodes[::-1], tenants=one.tenants[::-1], pools=one.pools[::-1]
    )
    assert decide(one).actions == decide(other).actions
    assert nodes("H100", 2) == one.nodes


def test_a_running_job_whose_next_place_is_still_held_is_stopped_for_the_stronger_one() -> None:
    leaving = job("old", on=placed("L4", "L4-0000", size=8), size=8)
    assert leaving.run is not None
    leaving = replace(leaving, run=replace(leaving.run, releasing=True))
    low = job("low", size=8, on=placed("H100", "H100-0000", size=8), priority=10)
    high = job("high", size=8, priority=500, accelerators=("H100",))
    result = decide(cluster(leaving, low, high, H100=1, L4=1))
    assert (started(result), stopped(result)) == ({"high"}, {"low"})


def test_a_plan_leaves_nothing_to_the_collector_of_cycles() -> None:
    """It tells the collector that all of it is old, so cycles would keep the states of many plans in memory."""
    running = [job(f"r{i}", "b", size=2, on=placed("H100", "H100-0000", size=2)) for i in range(4)]
    first, second = job("x", size=8, pods=2, priority=200), job("y", "b", size=4, priority=200)
    full = [job(f"s{i}", size=4, on=placed("H100", "H100-0001", size=4)) for i in range(2)]
    snapshot = cluster(*running, *full, first, second, H100=2)
    gc.collect()
    gc.disable()
    try:
        made, memo = plan(snapshot, POLICY, NOW)
        assert made.actions
        del made, memo
        assert gc.collect() == 0
    finally:
        gc.enable()
