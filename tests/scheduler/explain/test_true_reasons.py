"""What the record of a waiting job says of the future is true: the job alone in the cluster is the future."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    Job,
    Policy,
    Snapshot,
    WaitCode,
    applied,
    plan,
    sentence,
)

from ..build import NOW, cluster, job, placed, pool, tenant
from ..strategies import snapshots

POLICY = Policy(solver=False)
ROUNDS, ROUND_S = 4, 400.0


@st.composite
def closed(draw: st.DrawFn) -> Snapshot:
    """Some nodes are closed; what runs there runs on."""
    snapshot = draw(snapshots())
    nodes = tuple(replace(node, ready=draw(st.sampled_from((True, True, False)))) for node in snapshot.nodes)
    return replace(snapshot, nodes=nodes)


def starts_alone(snapshot: Snapshot, waiting: Job, now: float, *, opened: bool = False) -> bool:
    """If nothing else ran, and with `opened` if all nodes were open."""
    nodes = tuple(replace(node, ready=node.ready or opened) for node in snapshot.nodes)
    alone = replace(snapshot, nodes=nodes, jobs=(replace(waiting, run=None),), reservations=())
    return bool(plan(alone, POLICY, now)[0].actions)


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(closed())
def test_a_job_that_is_said_to_wait_can_start_and_one_that_never_starts_cannot(snapshot: Snapshot) -> None:
    now = NOW
    for _ in range(ROUNDS):
        decided, _ = plan(snapshot, POLICY, now)
        snapshot = applied(snapshot, decided, now)
        now += ROUND_S
    by_id = {each.id: each for each in snapshot.jobs}
    for record in plan(snapshot, POLICY, now)[0].waiting:
        if record.code in (WaitCode.RELEASING, WaitCode.PREEMPTING):
            continue
        told = (record.code, sentence(record))
        now_open = starts_alone(snapshot, by_id[record.job], now)
        all_open = starts_alone(snapshot, by_id[record.job], now, opened=True)
        assert now_open is (not record.never and record.code is not WaitCode.NODES_CLOSED), told
        assert all_open is not record.never, told


def test_a_job_waits_for_its_quota_where_that_is_all_that_keeps_it_from_open_nodes() -> None:
    """Of its two types, one is held back by a limit and of the other all nodes are closed."""
    runs = job("runs", size=4, on=placed("L4", "L4-0000", size=4))
    asks = job("x", size=6, accelerators=("H100", "L4"))
    for ceiling, code in ((8, WaitCode.CEILING), (5, WaitCode.NODES_CLOSED)):
        snapshot = cluster(runs, asks, tenants=(tenant("a", L4=(0, None, ceiling)),), H100=1, L4=1)
        nodes = tuple(replace(node, ready=node.pool == "L4") for node in snapshot.nodes)
        [record] = plan(replace(snapshot, nodes=nodes), POLICY, NOW)[0].waiting
        assert (record.code, record.resource) == (code, "L4" if code is WaitCode.CEILING else "H100")
        assert not record.never


def test_a_job_waits_for_closed_nodes_although_its_tenant_is_at_its_limit_now() -> None:
    """When what its tenant holds has ended, the nodes that are open are still too small."""
    small = replace(pool("small"), accelerator="L4")
    runs = job("runs", size=2, on=placed("small", "small-0000", size=2, accelerator="L4"))
    asks = job("x", size=7, accelerators=("L4",))
    snapshot = cluster(runs, asks, tenants=(tenant("a", L4=(0, None, 7)),), small=1, L4=1)
    nodes = tuple(
        replace(
            node,
            ready=node.pool == "small",
            capacity=node.capacity if node.pool == "L4" else replace(node.capacity, accelerators_m=4000),
        )
        for node in snapshot.nodes
    )
    pools = tuple(small if each.name == "small" else each for each in snapshot.pools)
    [record] = plan(replace(snapshot, nodes=nodes, pools=pools), POLICY, NOW)[0].waiting
    assert record.code is WaitCode.NODES_CLOSED
    assert [(each.why, each.nodes) for each in record.closed] == [("not ready", 1)]
