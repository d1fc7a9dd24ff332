"""Each kind of change that is suggested for a waiting job starts the job, and the next smaller change does not."""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler import (
    Cell,
    Job,
    JobId,
    Objective,
    PerformanceTable,
    Plan,
    Policy,
    Rate,
    Snapshot,
    WaitCode,
    plan,
    sentence,
)

from ..build import NOW, cluster, job, placed, pool, tenant


def decide(snapshot: Snapshot) -> Plan:
    return plan(snapshot, Policy(solver=False), NOW)[0]


def told(snapshot: Snapshot, name: str = "x") -> dict[str, str]:
    record = decide(snapshot).record(JobId("uid-" + name))
    assert record is not None
    return {change.kind: change.needed for change in record.changes}


def starts(snapshot: Snapshot, other: Job) -> bool:
    changed = replace(snapshot, jobs=tuple(other if j.id == other.id else j for j in snapshot.jobs))
    return any(action.job == other.id and action.to is not None for action in decide(changed).actions)


def full(of: str, count: int, priority: int = 100, tenant: str = "a") -> list[Job]:
    """Jobs of one accelerator each that may not be preempted."""
    return [
        job(f"{of}{i}", tenant, on=placed(of, f"{of}-0000"), preemptible=False, priority=priority)
        for i in range(count)
    ]


def test_fewer_pods_are_suggested_where_they_would_start_now() -> None:
    gang = job("x", size=2, pods=4)
    snapshot = cluster(*full("H100", 3), gang, H100=1)
    assert told(snapshot) == {"pods": "2"}
    assert starts(snapshot, replace(gang, min_pods=2, max_pods=2))
    assert not starts(snapshot, replace(gang, min_pods=3, max_pods=3))


def test_a_number_of_pods_that_would_not_start_now_is_not_suggested() -> None:
    snapshot = cluster(*full("H100", 8), job("x", size=8, pods=2), H100=1)
    (record,) = decide(snapshot).waiting
    assert (record.code, record.limit, record.changes) == (WaitCode.NODE_TOO_SMALL, 8000, ())


def test_another_accelerator_type_is_suggested() -> None:
    other = job("x", accelerators=("H100",))
    snapshot = cluster(*full("H100", 8), *full("V100", 8), other, H100=1, L4=1, V100=1)
    assert told(snapshot) == {"accelerator": "L4"}
    assert starts(snapshot, replace(other, accelerators=("L4",)))
    assert not starts(snapshot, replace(other, accelerators=("V100",)))


def test_another_form_of_a_job_is_tried_with_the_objective_makespan() -> None:
    """It has fewer candidates than the job that the program of the makespan knows."""
    known = replace(job("x", accelerators=("H100", "V100")), remaining_work=7200.0)
    snapshot = cluster(*full("H100", 8), *full("V100", 8), known, H100=1, L4=1, V100=1)
    made, _ = plan(snapshot, Policy(objective=Objective.MAKESPAN, solver=False), NOW)
    record = made.record(known.id)
    assert record is not None
    assert [(change.kind, change.needed) for change in record.changes] == [("accelerator", "L4")]


def _offloading(host_mib: int) -> PerformanceTable:
    """In mode resident it needs the memory of an H100; offloaded it fits an L4 with this much host memory."""
    cells = (
        Cell("c", "H100", 1000, speed=10.0, memory_mib=60_000),
        Cell("c", "L4", 1000, speed=4.0, memory_mib=60_000),
        Cell("c", "L4", 1000, "offload", speed=1.0, memory_mib=10_000, host_memory_mib=host_mib),
    )
    return PerformanceTable(cells, (Rate("H100"), Rate("L4")))


def test_another_engine_mode_is_suggested() -> None:
    other = job("x", workload_class="c")
    pools = (replace(pool("H100"), memory_mib=80_000), replace(pool("L4"), memory_mib=24_000))
    empty = cluster(*full("H100", 8), other, H100=1, L4=1)
    snapshot = replace(empty, pools=pools, table=_offloading(100_000))
    assert told(snapshot) == {"mode": "offload"}
    assert starts(snapshot, replace(other, modes=("offload",)))
    record = decide(snapshot).record(other.id)
    assert record is not None
    assert "in mode offload" in sentence(record)
    # More host memory than a node has: no mode helps.
    assert told(replace(snapshot, table=_offloading(400_000))) == {}


def test_a_mode_is_suggested_to_a_job_that_fits_nowhere_without_it() -> None:
    snapshot = replace(
        cluster(job("x", workload_class="c"), L4=1),
        pools=(replace(pool("L4"), memory_mib=24_000),),
        table=_offloading(100_000),
    )
    (record,) = decide(snapshot).waiting
    assert record.code is WaitCode.DOES_NOT_FIT
    assert told(snapshot) == {"mode": "offload"}


def test_less_memory_per_pod_is_suggested() -> None:
    big = job("x")
    big = replace(big, per_pod=replace(big.per_pod, memory_mib=500_000))
    snapshot = cluster(big, H100=1)
    assert told(snapshot) == {"memory": "262144"}
    assert told(cluster(*full("H100", 1), big, H100=1)) == {}  # some of that is taken


def test_the_lowest_priority_that_would_start_the_job_is_suggested() -> None:
    running = [
        job(f"r{i}", size=4, on=placed("H100", "H100-0000", size=4), priority=priority)
        for i, priority in enumerate((300, 700))
    ]
    other = job("x", size=4, priority=100)
    snapshot = cluster(*running, other, H100=1)
    assert told(snapshot) == {"priority": "301"}
    assert starts(snapshot, replace(other, priority=301))
    assert not starts(snapshot, replace(other, priority=300))
    both = cluster(*running, replace(other, per_pod=replace(other.per_pod, accelerators_m=8000)), H100=1)
    assert told(both) == {"priority": "701"}


def test_a_priority_is_suggested_that_only_the_last_of_many_running_jobs_makes_way_for() -> None:
    nodes = 9
    running = [
        job(f"r{i:02}", on=placed("H100", f"H100-{i // 8:04}"), priority=700 if i < 8 * nodes - 1 else 300)
        for i in range(8 * nodes)
    ]
    other = job("x", priority=100)
    assert told(cluster(*running, other, H100=nodes)) == {"priority": "301"}


def test_no_priority_above_the_tenants_ceiling_is_suggested() -> None:
    running = job("r", size=8, on=placed("H100", "H100-0000", size=8), priority=300)
    limited = replace(tenant("a"), priority_ceiling=300)
    assert told(cluster(running, job("x", size=8), tenants=(limited,), H100=1)) == {}


def test_the_lowest_quota_is_suggested_to_the_first_job_in_the_queue_only() -> None:
    jobs = [*full("H100", 2), job("x", size=3), job("y", size=3, submitted=NOW - 60)]
    snapshot = cluster(*jobs, tenants=(tenant("a", H100=(0, None, 4)),), H100=1)
    assert told(snapshot) == {"quota": "5"}
    assert told(snapshot, "y") == {}
    for most, starting in ((5, True), (4, False)):
        raised = replace(snapshot, tenants=(tenant("a", H100=(0, None, most)),))
        assert starts(raised, jobs[2]) is starting
