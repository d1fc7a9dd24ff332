"""Kubernetes objects to the scheduler's snapshot."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.operator.builders import (
    NOW,
    admitted,
    gang,
    gated,
    job,
    pod,
    pool,
    replica,
    running,
    service,
    tenant,
)

from busbar.kube.informer import Key
from busbar.kube.types import Tenant, TrainingJob
from busbar.operator.accounting.allocations import allocations
from busbar.operator.pools.nodes import DISCOVERED, pool_of_node
from busbar.operator.scheduling.snapshot import DRAFT, ClusterObjects, build
from busbar.operator.watch.projections import Node, Pod, Requests
from busbar.scheduler import Policy, Snapshot, plan


def node(name: str = "node-0", **fields: Any) -> Node:
    base = Node(name, (("pool", "cpu"),), (), 8000, 32768, 100_000, (), True)
    return replace(base, **fields)


def seen(**fields: Any) -> ClusterObjects:
    base = ClusterObjects(
        pools=(pool(),), tenants=(tenant("team", ["team"]),), nodes=(node(), node("node-1"))
    )
    return replace(base, **fields)


def test_a_waiting_job_is_offered_with_its_tenant() -> None:
    [found] = build(seen(jobs=(job(),)), NOW).jobs
    assert (found.tenant, found.run, found.per_pod.accelerators_m) == ("team", None, 1000)


def test_a_job_is_its_requesters() -> None:
    of, web = job(), service(replicas=1, status={"desiredReplicas": 1, "observedGeneration": 1})
    for found in (of, web):
        found.metadata.annotations["busbar.dev/requester"] = "ann@example.com"
    made = build(seen(jobs=(of, job("plain")), services=(web,)), NOW)
    assert {j.name: j.user for j in made.jobs} == {
        "job": "ann@example.com",
        "plain": "",
        "web-0": "ann@example.com",
    }


def test_what_may_not_start_is_not_offered() -> None:
    later = (NOW + timedelta(seconds=5)).isoformat()
    for of in (
        job(suspend=True),
        job(managedBy="a.b/c"),
        job(status={"phase": "Queued", "retryAt": later}),
        job(status={"phase": "Failed"}),
    ):
        assert build(seen(jobs=(of,)), NOW).jobs == ()


def test_a_job_whose_old_pods_still_run_is_not_offered_and_they_hold_their_nodes() -> None:
    of = job(status={"phase": "Queued", "attempt": 1})
    made = build(seen(jobs=(of,), pods=(running(0),)), NOW)
    assert made.jobs == ()
    assert {n.name: n.capacity.cpu_m for n in made.nodes} == {"node-0": 7000, "node-1": 8000}


def test_an_admitted_job_holds_its_place_once_whether_its_pods_exist_or_not() -> None:
    of = admitted(gang(2), 2)
    for pods in ((), (gated(0),), (running(0), running(1))):
        made = build(seen(jobs=(of,), pods=pods), NOW)
        assert [n.capacity.cpu_m for n in made.nodes] == [8000, 8000]
        run = made.jobs[0].run
        assert run is not None
        assert run.placement.nodes == ("node-0", "node-1")
        assert allocations(made).tenants["team"].allocated == {"cpu": 2.0}


def test_other_peoples_pods_take_from_the_nodes_and_ended_ones_do_not() -> None:
    system = pod(kind="", owner="coredns", node="node-0", requests=Requests(250, 100))
    done = replace(system, uid="x", key=Key("team", "done"), phase="Succeeded")
    made = build(seen(pods=(system, done)), NOW)
    assert made.nodes[0].capacity.cpu_m == 7750


def test_a_cpu_pool_with_a_unit_counts_in_that_unit() -> None:
    made = build(seen(pools=(pool(unit="500m"),), jobs=(job(),)), NOW)
    assert made.pools[0].unit_m == 500
    assert allocations(made).pools["cpu"].capacity == 32.0
    decided, _ = plan(made, Policy(), NOW.timestamp())
    [action] = decided.actions
    assert action.to is not None
    assert action.to.per_pod.cpu_m == 500


def test_replicas_that_exist_and_replicas_that_are_wanted_are_claims() -> None:
    of = service(replicas=2, status={"desiredReplicas": 2, "observedGeneration": 1})
    place = '{"pool": "cpu", "accelerator": "cpu", "mode": "resident", "node": "node-0", "perPod": {"accelerators_m": 1000, "cpu_m": 1000}}'
    made = build(seen(services=(of,), pods=(replica(0, placement=place),)), NOW)
    assert [(j.id, j.run is not None) for j in made.jobs] == [("uid-web/0", True), ("uid-web/1", False)]


def opted_in(**fields: Any) -> Pod:
    return gated(0, kind="", owner="theirs", queued=True, requests=Requests(500), **fields)


def test_an_opted_in_pod_that_was_let_go_is_not_planned_again_when_its_node_is_gone() -> None:
    gone = replace(opted_in(admission="a", pinned="node-9"), gates=())
    assert build(seen(pods=(gone,)), NOW).jobs == ()
    assert build(seen(pods=(opted_in(pinned="", deleting=True),)), NOW).jobs == ()


def test_an_opted_in_pod_waits_while_gated_and_holds_its_node_once_let_go() -> None:
    [waiting] = build(seen(pods=(opted_in(pinned=""),)), NOW).jobs
    assert (waiting.kind, waiting.run, waiting.pools) == ("opaque", None, ("cpu",))
    [runs] = build(seen(pods=(replace(opted_in(admission="a", pinned="node-1"), gates=()),)), NOW).jobs
    assert runs.run is not None
    assert runs.run.placement.nodes == ("node-1",)


def reserved(name: str, since: str, pool_name: str = "cpu") -> TrainingJob:
    """A gang of two pods for two whole nodes, with a reservation in its status."""
    place = {
        "pool": pool_name, "accelerator": "cpu", "mode": "resident", "pods": 2, "acceleratorsPerPod": 8,
        "perPod": {"acceleratorsM": 8000, "cpuM": 8000}, "startBy": "2026-11-21T13:00:00Z", "collected": 1,
        "needed": 2, "nodes": [{"name": f"node-{i}", "since": since} for i in range(2)],
    }  # fmt: skip
    return job(
        name,
        template={"image": "own"},
        shape={"minPods": 2, "maxPods": 2, "acceleratorsPerPod": 8},
        priority=500,
        status={"phase": "Queued", "reservation": place},
    )


def test_reservations_are_read_from_statuses_the_earliest_first() -> None:
    late, early = reserved("a-late", "2026-11-21T11:40:00Z"), reserved("early", "2026-11-21T11:30:00Z")
    made = build(seen(jobs=(late, early, job("plain"))), NOW)
    assert [r.job for r in made.reservations] == ["uid-early", "uid-a-late"]
    early.spec.suspend = True
    assert [r.job for r in build(seen(jobs=(late, early)), NOW).reservations] == ["uid-a-late"]


def test_a_plan_goes_on_from_a_status_that_fits_and_ignores_another() -> None:
    holder = admitted(job("holder", shape={"acceleratorsPerPod": 8}, preemptible=False))
    since = datetime(2026, 11, 21, 11, 30, tzinfo=UTC)
    for pool_name, since_s in (("cpu", since.timestamp()), ("gone", NOW.timestamp())):
        of = reserved("gang", since.isoformat(), pool_name)
        made, _ = plan(build(seen(jobs=(holder, of)), NOW), Policy(), NOW.timestamp())
        [found] = made.reservations
        assert (found.job, found.since_s) == ("uid-gang", (since_s, since_s))
        assert found.placement.pool == "cpu"


def test_a_draft_is_added_as_a_waiting_job() -> None:
    made = build(seen(), NOW, job())
    assert [j.id for j in made.jobs] == [DRAFT]


def test_a_namespace_claimed_twice_belongs_to_the_tenant_that_was_first() -> None:
    late = tenant("a-late", ["team"], created="2026-11-02T00:00:00Z")
    [found] = build(seen(jobs=(job(),), tenants=(late, tenant("first", ["team"]))), NOW).jobs
    assert found.tenant == "first"


def test_the_most_specific_pool_takes_a_node() -> None:
    narrow = pool("narrow", nodeSelector={"pool": "cpu", "zone": "a"})
    assert pool_of_node(node(labels=(("pool", "cpu"), ("zone", "a"))), [pool(), narrow]) is narrow


def test_a_pool_that_people_made_takes_a_node_before_a_discovered_one() -> None:
    found = pool("a-found", nodeSelector={"pool": "cpu", "zone": "a"})
    found.metadata.labels[DISCOVERED] = "true"
    assert pool_of_node(node(labels=(("pool", "cpu"), ("zone", "a"))), [found, pool()]) == pool()


def test_the_same_world_gives_the_same_snapshot_in_any_order() -> None:
    jobs = (job("a"), job("b"), job("c"))
    assert build(seen(jobs=jobs), NOW) == build(seen(jobs=jobs[::-1], nodes=(node("node-1"), node())), NOW)


def test_a_snapshot_survives_json() -> None:
    made = build(seen(jobs=(admitted(gang(2), 2),)), NOW)
    assert Snapshot.from_json(made.to_json()) == made


def test_nodes_stand_where_their_labels_say() -> None:
    labels = (
        ("pool", "cpu"),
        ("topology.kubernetes.io/zone", "z"),
        ("topology.kubernetes.io/rack", "r7"),
        ("network.topology.nvidia.com/leaf", "switch-7"),
        ("nvidia.com/gpu.clique", "c1.0"),
    )
    made = build(seen(nodes=(node("node-1", labels=labels), node("bare"))), NOW)
    assert {n.name: n.topology for n in made.nodes} == {
        "node-1": ("z", "", "r7", "c1.0"),
        "bare": ("", "", "", ""),
    }


def test_a_gang_that_must_stay_in_a_rack_says_so_to_the_planner() -> None:
    own = {"image": "own"}
    asks = [gang(2), job("racked", template=own, shape={"minPods": 2, "maxPods": 2, "within": "rack"})]
    asks += [job("one", template=own, shape={"minPods": 2, "maxPods": 2, "within": "node"})]
    found = {j.name: j.required_domain for j in build(seen(jobs=tuple(asks)), NOW).jobs}
    assert found == {"job": None, "racked": 3, "one": 5}


def spent_team() -> Tenant:
    budget = {"period": "month", "cost": 0, "enforcement": "StopAdmitting"}
    return tenant("team", ["team"], budgets=[budget])


def test_of_a_tenant_whose_budget_is_spent_only_what_runs_is_offered() -> None:
    waits = job("waits", status={"phase": "Queued", "reason": "BudgetSpent"})
    moved = job("moved", status={"phase": "Queued", "reason": "Moved", "attempt": 1})
    runs = admitted(gang(2), 2)
    own = pod(kind="", owner="rs", queued=True, gates=("busbar.dev/admission",), uid="uid-own")
    full = seen(jobs=(waits, moved, runs), pods=(own,))
    assert len(build(full, NOW).jobs) == 4
    assert {j.id for j in build(replace(full, tenants=(spent_team(),)), NOW).jobs} == {"uid-moved", "uid-job"}


def test_a_spent_budget_leaves_a_service_its_least_number_of_replicas() -> None:
    of = service(replicas=4, minReplicas=2, status={"desiredReplicas": 4, "observedGeneration": 1})
    full = seen(services=(of,), tenants=(spent_team(),))
    assert [j.id for j in build(full, NOW).jobs] == ["uid-web/0", "uid-web/1"]
    one = replica(3, placement='{"pool": "cpu", "accelerator": "cpu", "mode": "resident", "node": "node-0", "perPod": {"accelerators_m": 1000, "cpu_m": 1000}}')  # fmt: skip
    found = build(replace(full, pods=(one,)), NOW).jobs
    assert [(j.id, j.run is None) for j in found] == [("uid-web/0", True), ("uid-web/3", False)]
