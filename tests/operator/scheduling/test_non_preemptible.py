"""What a tenant gains by marking everything non-preemptible: nothing of what others are guaranteed."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
from tests.operator.builders import NOW, SETTINGS, admitted, gated, job, pool, replica, service, tenant

from busbar.kube.informer import Key
from busbar.kube.types import ModelService, Tenant, TrainingJob
from busbar.operator.accounting.non_preemptible import NonPreemptible, rate_of
from busbar.operator.decisions import Decision
from busbar.operator.metrics import Metrics
from busbar.operator.queue.controller import Controller, Item
from busbar.operator.scheduling.builder import JOB, POD, SERVICE, TENANT, SnapshotBuilder
from busbar.operator.scheduling.rounds import Rounds
from busbar.operator.scheduling.snapshot import ClusterObjects, build, builder_of
from busbar.operator.watch.caches import Caches
from busbar.operator.watch.projections import Node, Pod, Requests, Sleep
from busbar.scheduler import ActionKind, Policy, Snapshot, applied, plan

NODES = tuple(Node(f"node-{n}", (("pool", "cpu"),), (), 4000, 32768, 100_000, (), True) for n in range(2))
"""Eight of the type `cpu`."""


def owner(guaranteed: float = 6) -> Tenant:
    return tenant("owner", ["owner"], quota=[{"accelerator": "cpu", "guaranteed": guaranteed}])


def hoarder(**quota: Any) -> Tenant:
    rows = [{"accelerator": "cpu", **quota}] if quota else []
    return tenant("hoarder", ["hoarder"], quota=rows)


def of(made: TrainingJob, namespace: str, minute: int = 0) -> TrainingJob:
    meta = made.metadata.model_copy(
        update={"namespace": namespace, "creation_timestamp": NOW + timedelta(minutes=minute)}
    )
    return made.model_copy(update={"metadata": meta})


def asks(name: str, namespace: str, minute: int = 0, pods: int = 1, **spec: Any) -> TrainingJob:
    shape = {"minPods": pods, "maxPods": spec.pop("most", pods), "cpu": "1", "memory": "1Gi"}
    body = {"template": {"image": "own"}, "shape": shape, "preemptible": False, **spec}
    return of(job(name, **body), namespace, minute)


def cluster(*jobs: TrainingJob, tenants: tuple[Tenant, ...] = (owner(), hoarder())) -> ClusterObjects:
    return ClusterObjects(jobs=jobs, pools=(pool(),), tenants=tenants, nodes=NODES)


def started(made: Snapshot) -> list[str]:
    """Names of the jobs that hold something after a plan; the plan leaves nothing free that fits."""
    done, _ = plan(made, Policy(), NOW.timestamp(), None)
    after = applied(made, done, NOW.timestamp())
    return sorted(one.name for one in after.jobs if one.run is not None)


def test_a_hoarder_gets_what_nobody_is_guaranteed_and_the_owner_its_guarantee() -> None:
    many = tuple(asks(f"h{n}", "hoarder", n) for n in range(8))
    assert started(build(cluster(*many), NOW)) == ["h0", "h1"]
    held = tuple(admitted(one) for one in many[:2])
    claimed = tuple(asks(f"o{n}", "owner", 60) for n in range(6))
    assert started(build(cluster(*held, *many[2:], *claimed), NOW)) == [
        "h0",
        "h1",
        *(f"o{n}" for n in range(6)),
    ]


def test_what_is_preemptible_is_lent_as_before_and_has_to_go_for_the_guarantee() -> None:
    many = tuple(asks(f"h{n}", "hoarder", n, preemptible=True) for n in range(8))
    assert len(started(build(cluster(*many), NOW))) == 8
    held = tuple(of(admitted(one, admitted_at=NOW - timedelta(hours=9)), "hoarder") for one in many)
    claim = asks("claim", "owner", 1, pods=6)
    done, _ = plan(
        build(cluster(*held, claim), NOW + timedelta(hours=1)), Policy(), NOW.timestamp() + 3600, None
    )
    assert sum(action.kind is ActionKind.PREEMPT for action in done.actions) == 6


def test_the_own_guarantee_is_there_whatever_others_hold() -> None:
    both = (owner(), hoarder(guaranteed=2))
    many = tuple(asks(f"h{n}", "hoarder", n) for n in range(4))
    assert started(build(cluster(*many, tenants=both), NOW)) == ["h0", "h1"]
    whole = asks("whole", "owner", pods=6)
    assert started(build(cluster(*(admitted(one) for one in many[:2]), whole, tenants=both), NOW)) == [
        "h0",
        "h1",
        "whole",
    ]


def test_without_guarantees_nothing_is_bounded() -> None:
    many = tuple(asks(f"h{n}", "hoarder", n) for n in range(8))
    assert len(started(build(cluster(*many, tenants=(hoarder(), tenant("owner", ["owner"]))), NOW))) == 8


def test_a_guarantee_over_all_types_is_kept_as_well() -> None:
    whole = tenant("owner", ["owner"], quota=[{"accelerator": "*", "guaranteed": 6 * rate_of("cpu")}])
    many = tuple(asks(f"h{n}", "hoarder", n) for n in range(8))
    bounded = len(started(build(cluster(*many, tenants=(whole, hoarder())), NOW)))
    assert bounded == 2


def test_guarantees_that_promise_more_than_there_is_of_a_type_bound_that_type_alone() -> None:
    """Each of three tenants is promised all A100."""
    greedy = tuple(
        tenant(f"t{n}", [f"t{n}"], quota=[{"accelerator": "A100", "guaranteed": 4}]) for n in range(3)
    )
    fast = pool("fast", accelerator="A100", resourceName="nvidia.com/gpu", nodeSelector={"pool": "fast"})
    gpus = Node("gpu-0", (("pool", "fast"),), (), 4000, 32768, 100_000, (("nvidia.com/gpu", 4),), True)
    many = tuple(asks(f"h{n}", "hoarder", n, accelerators=["cpu"]) for n in range(8))
    made = cluster(*many, tenants=(*greedy, hoarder()))
    made = replace(made, pools=(pool(), fast), nodes=(*NODES, gpus))
    assert len(build(made, NOW).jobs) == 8


def test_a_gang_begins_with_as_many_pods_as_it_may_keep() -> None:
    [found] = build(cluster(asks("gang", "hoarder", pods=1, most=8)), NOW).jobs
    assert (found.min_pods, found.max_pods) == (1, 2)
    assert build(cluster(asks("gang", "hoarder", pods=3, most=8)), NOW).jobs == ()


def test_who_is_held_back_learns_why_and_comes_when_there_is_room() -> None:
    first, second = asks("first", "hoarder", 0, pods=2), asks("second", "hoarder", 1)
    builder: SnapshotBuilder = builder_of(cluster(admitted(first, 2), second))
    builder.snapshot(NOW)
    item = Item(JOB, Key("hoarder", "second"))
    assert list(builder.held_back()) == [item]
    assert "It is not preemptible and needs 1 cpu, of which it may take 0" in builder.held_back()[item]
    assert not builder.waits(item)
    builder.put(JOB, Key("hoarder", "first"), None)
    assert builder.snapshot(NOW, full=True).jobs[0].name == "second"
    assert not builder.held_back()
    builder.put(TENANT, Key("", "owner"), owner(8))
    assert builder.snapshot(NOW, full=True).jobs == ()


def serves(replicas: int) -> ModelService:
    made = service(
        shape={"cpu": "1", "memory": "1Gi"},
        replicas=replicas,
        status={"phase": "Queued", "desiredReplicas": replicas},
    )
    meta = made.metadata.model_copy(update={"namespace": "hoarder"})
    return made.model_copy(update={"metadata": meta})


def opted_in(number: int) -> Pod:
    """Of a batch/v1 Job."""
    return gated(
        number, key=Key("hoarder", f"p{number}"), uid=f"p{number}", kind="", job="", owner_uid="", pinned="", pool="",
        queued=True, requests=Requests(1000, 1024, 0),
    )  # fmt: skip


def test_replicas_of_services_and_pods_of_others_are_bounded_as_well() -> None:
    pods = tuple(opted_in(n) for n in range(8))
    assert started(build(replace(cluster(), services=(serves(8),)), NOW)) == ["web-0", "web-1"]
    assert started(build(replace(cluster(), pods=pods), NOW)) == ["p0", "p1"]
    builder = builder_of(replace(cluster(), services=(serves(8),), pods=pods))
    assert len(builder.snapshot(NOW).jobs) == 2
    held, web = builder.held_back(), Item(SERVICE, Key("hoarder", "web"))
    assert {web, Item(POD, Key("hoarder", "p7"))} <= held.keys()
    assert "keeping other tenants from their guarantees. It waits until such work has ended." in held[web]
    builder.put(TENANT, Key("", "owner"), owner(5))
    assert len(builder.snapshot(NOW, full=True).jobs) == 3
    builder.put(TENANT, Key("", "owner"), owner(0))
    assert len(builder.snapshot(NOW, full=True).jobs) == 16
    assert not builder.held_back()


@pytest.mark.parametrize(("sleep", "begun"), [(Sleep.AWAKE, ["h0"]), (Sleep.ASLEEP, ["h0", "h1"])])
def test_a_replica_that_sleeps_keeps_nobody_from_a_guarantee(sleep: Sleep, begun: list[str]) -> None:
    place = {
        "pool": "cpu",
        "accelerator": "cpu",
        "mode": "resident",
        "node": "node-0",
        "perPod": {"accelerators_m": 1000},
    }
    own = replica(
        0,
        key=Key("hoarder", "web-0"),
        sleep=sleep,
        placement=json.dumps(place),
        requests=Requests(1000, 1024, 0),
    )
    many = tuple(asks(f"h{n}", "hoarder", n) for n in range(4))
    made = replace(cluster(*many), services=(serves(1),), pods=(own,))
    assert [one.name for one in build(made, NOW).jobs if one.run is None] == begun


async def test_a_round_has_those_reconciled_that_it_holds_back_or_lets_go() -> None:
    controller, reconciled = Controller(Metrics(), workers=1), list[Key]()

    async def seen(key: Key, decisions: tuple[Decision, ...]) -> None:
        reconciled.append(key)

    controller.handles(JOB, seen)
    caches = Caches(
        cast(Any, None), lambda kind, key, old, new: rounds.changed(kind, key, new), inactivity_s=60.0
    )
    rounds = Rounds(caches, controller, SETTINGS, Metrics())
    for cache, made in (
        (caches.pools, (pool(),)),
        (caches.tenants, (owner(8), hoarder())),
        (caches.jobs, (asks("waits", "hoarder"),)),
    ):
        for obj in made:
            cast(Any, cache).items[Key(obj.metadata.namespace or "", obj.metadata.name)] = obj
    caches.nodes.items.update({Key("", node.name): node for node in NODES})
    held = Item(JOB, Key("hoarder", "waits"))
    await rounds.once()
    assert list(rounds.held_back) == [held]
    assert len(controller.queue) == 1
    assert await controller.queue.get() == held
    controller.queue.done(held)
    rounds.changed(TENANT, Key("", "owner"), owner(7))
    await rounds.once()
    assert not rounds.held_back
    assert await controller.queue.get() == held
    assert reconciled == [held.key], "it was admitted in that round"


def test_work_that_asks_for_no_cores_may_go_to_a_cpu_pool_whatever_others_are_guaranteed() -> None:
    (one,) = build(cluster(asks("h", "hoarder")), NOW).jobs
    made = build(cluster(), NOW)
    cpu = made.pools[0]
    boards = replace(cpu, name="boards", accelerator="A100", resource_name="nvidia.com/gpu")
    node = replace(
        made.nodes[0], pool="boards", capacity=replace(made.nodes[0].capacity, accelerators_m=8000)
    )
    bound = NonPreemptible()
    bound.set_limits((cpu, boards), (node,), {"owner": {"A100": 8000}})
    least = replace(one, per_pod=replace(one.per_pod, cpu_m=0, accelerators_m=1000), accelerators=())
    offered = bound.offer(least)
    assert offered is not None
    assert offered.accelerators == ("cpu",)
    assert bound.offer(replace(least, accelerators=("A100",))) is None
