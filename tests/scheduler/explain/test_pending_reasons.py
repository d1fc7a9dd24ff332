"""The order of a waiting job's reasons: impossible requests first, then limits, then its turn."""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler import (
    Cell,
    PerformanceTable,
    Policy,
    Rate,
    Snapshot,
    Taint,
    WaitCode,
    WaitingRecord,
    plan,
    sentence,
    what_if,
)

from ..build import NOW, cluster, gpus, job, nodes, placed, pool, tenant

POLICY = Policy(solver=False)
LIMITED = (tenant("a", H100=(8, 8, None)),)


def test_missing_capacity_is_reported_before_a_limit() -> None:
    asked = job("x", size=8, pods=6)
    snapshot = cluster(asked, tenants=LIMITED, H100=4)
    (record,) = plan(snapshot, POLICY, NOW)[0].waiting
    assert (record.code, record.requested, record.limit) == (WaitCode.NODE_TOO_SMALL, 48_000, 32_000)
    forecast = what_if(snapshot, POLICY, asked, NOW)
    assert (forecast.starts_now, forecast.p50_s, forecast.p90_s) == (False, None, None)


def test_a_limit_is_reported_where_the_capacity_exists() -> None:
    snapshot = cluster(job("x", size=8, pods=3), tenants=LIMITED, H100=4)
    (record,) = plan(snapshot, POLICY, NOW)[0].waiting
    assert (record.code, record.requested, record.limit) == (WaitCode.BORROW_LIMIT, 24_000, 16_000)


def told(snapshot: Snapshot) -> WaitingRecord:
    (record,) = plan(snapshot, POLICY, NOW)[0].waiting
    return record


def test_a_request_above_the_tenants_own_limit_never_starts() -> None:
    asked = job("x", size=8, pods=3)
    empty = cluster(asked, tenants=LIMITED, H100=4)
    assert told(empty).never
    assert "unless this is raised" in sentence(told(empty))
    assert what_if(empty, POLICY, asked, NOW).p50_s is None
    # Two pods are within the limit: they wait until what the tenant holds has ended.
    two = job("x", size=8, pods=2)
    held = job("r", size=8, on=placed("H100", "H100-0000", size=8))
    record = told(cluster(two, held, tenants=LIMITED, H100=4))
    assert (record.code, record.never) == (WaitCode.BORROW_LIMIT, False)
    assert what_if(cluster(held, tenants=LIMITED, H100=4), POLICY, two, NOW).p50_s is not None


def test_one_way_within_the_limits_is_enough_to_wait_for() -> None:
    held = job("r", size=8, on=placed("L4", "L4-0000", size=8))
    limits = (tenant("a", H100=(0, None, 2), L4=(0, None, 8)),)
    assert not told(cluster(held, job("x", size=4), tenants=limits, H100=1, L4=1)).never
    assert told(cluster(job("x", size=4), tenants=(tenant("a", H100=(0, None, 2)),), H100=1)).never


def test_closed_nodes_are_reported_with_the_cause() -> None:
    snapshot = cluster(job("x", size=8, pods=2), H100=3)
    first, second, third = snapshot.nodes
    closed = replace(
        snapshot,
        nodes=(
            replace(first, ready=False, cordoned=True),
            replace(second, ready=False),
            replace(third, taints=(Taint("broken"),)),
        ),
    )
    record = told(closed)
    assert (record.code, record.limit, record.never) == (WaitCode.NODES_CLOSED, 0, False)
    assert [(c.why, c.nodes) for c in record.closed] == [("cordoned", 1), ("not ready", 1), ("tainted", 1)]
    assert sentence(record) == (
        "Needs 16 H100, and the open nodes that it may use have 0: 1 node that could hold its pods is cordoned, "
        "1 node that could hold its pods is not ready, 1 node that could hold its pods is tainted."
    )
    forecast = what_if(replace(closed, jobs=()), POLICY, closed.jobs[0], NOW)
    assert forecast.p50_s is None  # nothing that runs says when they are opened


def test_closed_nodes_are_not_blamed_for_a_pod_that_no_node_could_hold() -> None:
    snapshot = cluster(job("x", size=16), H100=2)
    record = told(replace(snapshot, nodes=tuple(replace(n, ready=False) for n in snapshot.nodes)))
    assert (record.code, record.limit) == (WaitCode.NODE_TOO_SMALL, 8000)
    assert sentence(record) == "A pod needs 16 H100, and the largest node has 8."


def test_sentences_say_where_it_is_too_large() -> None:
    big = job("x")
    big = replace(big, per_pod=replace(big.per_pod, memory_mib=500_000))
    assert sentence(told(cluster(big, H100=1))) == (
        "A pod needs 500,000 MiB of memory, and the largest node has 262,144 MiB. It would start now with 262,144 MiB of "
        "memory per pod."
    )
    many = replace(big, per_pod=replace(big.per_pod, memory_mib=1024, cpu_m=96_000))
    assert sentence(told(cluster(many, H100=1))) == (
        "A pod needs 96 CPUs, and the largest node has 64. It would start now with 64 CPUs per pod."
    )
    assert sentence(told(cluster(job("x", size=8, pods=6), H100=4))) == (
        "Needs 48 H100, and the nodes that it may use have 32. It would start now with 4 pods."
    )
    two = cluster(replace(job("x", size=8, pods=2), required_domain=1), H100=2)
    apart = tuple(replace(node, topology=(f"rack-{i}",)) for i, node in enumerate(two.nodes))
    assert sentence(told(replace(two, nodes=apart))) == (
        "Needs 16 H100 inside one topology domain, and the largest has 8. It would start now with 1 pod."
    )


def test_a_mode_that_needs_more_of_the_host_than_there_is_is_named() -> None:
    asked = replace(job("x", workload_class="m"), modes=("offload",))
    cells = (Cell("m", "H100", 1000, "offload", 1.0, host_memory_mib=300_000),)
    record = told(replace(cluster(asked, H100=1), table=PerformanceTable(cells, (Rate("H100"),))))
    assert sentence(record) == (
        "In mode offload a pod needs 300,000 MiB of memory, and the largest node has 262,144 MiB."
    )


def test_a_job_that_any_type_would_do_for_is_told_of_no_type() -> None:
    for accelerators, none_at_all, not_its in (
        ((), "There is no pool that it may use.", "No pool is open to this tenant."),
        (
            ("H100", "L4"),
            "No pool offers the accelerator it asks for (H100 or L4).",
            "No pool with H100 or L4 is open to this tenant.",
        ),
    ):
        asked = job("x", accelerators=accelerators)
        assert sentence(told(cluster(asked))) == none_at_all
        closed = tuple(replace(one, tenants=()) for one in cluster(asked, H100=1).pools)
        assert sentence(told(replace(cluster(asked, H100=1), pools=closed))) == not_its
    limited = cluster(job("x", size=4), tenants=(tenant("a", any=(2, 0, None)),), H100=1)
    assert sentence(told(limited)).startswith(
        "Needs 4 accelerators of any type, in exchange-rate units; the tenant holds 0 and may hold up to 2, so it"
    )


def test_what_is_free_is_counted_over_all_pools_of_the_type_like_its_capacity() -> None:
    small = replace(pool("small", "H100"), price_per_hour=9.0)
    runs = job("runs", size=8, on=placed("H100", "H100-0000", size=8))
    snapshot = cluster(runs, job("x", size=4, accelerators=("H100",)), H100=1)
    both = replace(
        snapshot, pools=(*snapshot.pools, small), nodes=(*snapshot.nodes, *nodes("small", 1, size=3))
    )
    record = told(both)
    assert (record.free, record.limit) == (3000, 11_000)
    assert sentence(record).startswith("Needs 4 H100, 3 of 11 are free; this tenant holds 8.")


NEEDS_MIB = (("resident", 1_100_000), ("optimizer-offload", 290_000), ("parameter-offload", 90_000))
SPLIT = tuple(
    Cell("70b", "H100", 1000 * n, mode, 0.01 * n, memory_mib=-(-mib // n))
    for mode, mib in NEEDS_MIB
    for n in (1, 2, 4, 8)
)
POOLS = (replace(pool("H100"), memory_mib=81_920),)


def _large(*modes: str, speed: float = 0.01) -> Snapshot:
    asked = replace(job("x", workload_class="70b"), modes=modes)
    cells = tuple(replace(cell, speed=speed) if cell.accelerators_m == 1000 else cell for cell in SPLIT)
    table = PerformanceTable(cells, (Rate("H100"),))
    return replace(cluster(asked, H100=1), pools=POOLS, table=table)


def test_the_reason_of_a_model_that_fits_no_device_has_its_bytes_and_what_fits() -> None:
    for speed in (0.01, 0.0):  # a cell may say itself that it is impossible
        snapshot = _large("resident", "optimizer-offload", "parameter-offload", speed=speed)
        record = told(snapshot)
        assert (record.code, record.requested, record.limit) == (WaitCode.DOES_NOT_FIT, 90_000, 81_920)
        assert (record.mode, record.fits_m) == ("parameter-offload", 2000)
        assert [(c.kind, c.needed) for c in record.changes] == [("accelerators", "2")]
        assert sentence(record) == (
            "Needs 90,000 MiB per accelerator in its smallest mode (parameter-offload), and the largest "
            "accelerator here has 81,920 MiB. It fits with 2 accelerators per pod. It would start now with 2 "
            "accelerators per pod."
        )
    (asked,) = snapshot.jobs
    larger = replace(asked, per_pod=replace(asked.per_pod, accelerators_m=2000))
    assert plan(replace(snapshot, jobs=(larger,)), POLICY, NOW)[0].waiting == ()


def test_an_alternative_that_fits_is_reported_although_it_would_have_to_wait() -> None:
    snapshot = _large("parameter-offload")
    running = tuple(
        job(f"r{i}", on=placed("H100", "H100-0000"), preemptible=False, priority=500) for i in range(8)
    )
    (record,) = plan(replace(snapshot, jobs=(*snapshot.jobs, *running)), POLICY, NOW)[0].waiting
    assert (record.fits_m, record.changes) == (2000, ())


def test_a_job_that_fits_nowhere_gets_no_suggested_size() -> None:
    record = told(_large("resident"))
    assert (record.requested, record.limit, record.fits_m) == (1_100_000, 81_920, 0)


def test_a_limit_is_reported_where_what_it_allows_is_too_large() -> None:
    snapshot = cluster(job("x", size=16, pods=1), tenants=(tenant("a", H100=(0, None, 8)),), H100=1, L4=1)
    wide = tuple(replace(n, capacity=gpus(16)) if n.pool == "H100" else n for n in snapshot.nodes)
    record = told(replace(snapshot, nodes=wide))  # the L4 node has 8; the tenant may hold 8 H100
    assert (record.code, record.resource, record.never) == (WaitCode.CEILING, "H100", True)


def test_of_several_pools_of_a_type_the_largest_is_reported() -> None:
    snapshot = cluster(job("x", size=8, pods=4, accelerators=("H100",)), H100=1, New=3)
    pools = (snapshot.pools[0], replace(snapshot.pools[1], accelerator="H100", price_per_hour=2.0))
    record = told(replace(snapshot, pools=pools))
    assert (record.requested, record.limit) == (32_000, 24_000)
    assert sentence(record).startswith("Needs 32 H100 in one pool, and the largest has 24.")
