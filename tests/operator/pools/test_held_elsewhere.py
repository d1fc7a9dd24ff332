"""A pool whose capacity is used by pods of no job says so: everybody sees amounts, only admins see names."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, pool, running

from busbar.kube.informer import Key
from busbar.kube.types import AcceleratorPool
from busbar.operator.accounting.allocations import HeldElsewhere, PoolAllocation
from busbar.operator.pods.foreign_pods import is_unaccounted
from busbar.operator.pools.capacities import Capacities, Use
from busbar.operator.pools.held_elsewhere import sentence
from busbar.operator.pools.reconcile import reconcile
from busbar.operator.watch.projections import Node, Pod, Requests

GPU = "nvidia.com/gpu"
GPUS = pool("gpus", accelerator="H100", resourceName=GPU)
CPUS = pool("cpus", unit="500m", reserved={"cpu": "500m"})
NODES = {
    f"{of}-{i}": Node(f"{of}-{i}", (("pool", of),), (), 8000, 32_000, 0, ((GPU, 8),), True)
    for of in ("gpus", "cpus")
    for i in range(2)
}
OWNERS, NAMESPACES = {"uid-job"}, {"team"}


def other(
    node: str = "gpus-0", gpus: int = 1, cpu_m: int = 100, namespace: str = "else", **fields: Any
) -> Pod:
    devices = ((GPU, gpus),) if gpus else ()
    base = Pod(Key(namespace, "p"), "u", "Running", NOW, node, Requests(cpu_m, devices=devices))
    return replace(base, **fields)


def held(*pods: Pod, nodes: dict[str, Node] = NODES) -> dict[str, HeldElsewhere]:
    places = Capacities()
    places.set_pools((GPUS, CPUS))
    for name, node in nodes.items():
        places.set_node(name, node)
    for index, pod in enumerate(pods):
        nobodys = is_unaccounted(pod, OWNERS, NAMESPACES)
        places.put(replace(pod, uid=f"u{index}"), Use.NOBODY if nobodys else Use.OTHER)
    places.nodes()
    return dict(places.remarks().elsewhere)


def test_any_foreign_pod_with_an_accelerator_counts_however_few_it_has() -> None:
    found = held(other(), other("gpus-1", 3, namespace="kube-system"), other(gpus=0))
    assert found == {"gpus": HeldElsewhere(4.0, 2, ("else", "kube-system"))}


def test_on_a_cpu_pool_only_what_exceeds_a_nodes_reserve_counts() -> None:
    system = [other(f"cpus-{i}", 0, 250, "kube-system") for i in (0, 0, 1)]
    assert held(*system) == {}
    assert held(*system, other("cpus-0", 0, 750)) == {"cpus": HeldElsewhere(1.5, 3, ("else", "kube-system"))}


@pytest.mark.parametrize(
    "of",
    [
        running(node="gpus-0", requests=Requests(devices=((GPU, 1),))),
        running(node="gpus-0", owner="gone", requests=Requests(devices=((GPU, 1),))),
        other(queued=True, pinned="gpus-0", admission="a"),
        other(phase="Succeeded"),
        other(node="", pinned="gpus-0"),
        other(node="nowhere"),
    ],
    ids=["a job's", "an orphan of a tenant", "opted in", "ended", "not bound", "no node of ours"],
)
def test_pods_that_jobs_stand_for_or_that_hold_nothing_do_not_count(of: Pod) -> None:
    assert held(of) == {}


def test_our_label_outside_tenants_namespaces_hides_nothing() -> None:
    assert held(other(kind="trainingjob")) == {"gpus": HeldElsewhere(1.0, 1, ("else",))}


def test_nodes_that_are_not_ready_have_no_capacity_to_miss() -> None:
    away = {name: replace(node, ready=False) for name, node in NODES.items()}
    assert held(other(), nodes=away) == {}


def told(of: AcceleratorPool, elsewhere: HeldElsewhere, hours: int = 0) -> tuple[AcceleratorPool, str]:
    update = reconcile(of, PoolAllocation(2, 12.0, 3.0, elsewhere), NOW + timedelta(hours=hours))
    if update.status is None:
        return of, update.event
    return of.model_copy(update={"status": update.status}), update.event


def test_the_status_says_how_much_and_only_the_event_says_who() -> None:
    one = HeldElsewhere(4.0, 2, ("else", "kube-system"))
    of, event = told(GPUS, one)
    assert event == (
        "4 accelerators are held by 2 pods that belong to no job of this platform. Their namespaces: else, kube-system."
    )
    assert of.status is not None
    wire = of.status.to_wire()
    assert wire["heldElsewhere"] == {"accelerators": 4.0, "pods": 2}
    assert "kube-system" not in str(wire)
    ready, elsewhere = wire["conditions"]
    assert (ready["type"], ready["status"]) == ("Ready", "True")
    assert (elsewhere["type"], elsewhere["status"], elsewhere["reason"]) == (
        "CapacityHeldElsewhere",
        "True",
        "ForeignPods",
    )
    assert told(of, one, hours=1) == (of, "")
    moved = replace(one, namespaces=("third",))
    assert told(of, moved, hours=1) == (of, "")
    free, event = told(of, HeldElsewhere(), hours=2)
    assert free.status is not None
    assert (free.status.held_elsewhere, event) == (None, "")
    assert [c.status.value for c in free.status.conditions or ()] == ["True", "False"]


def test_a_cpu_pool_speaks_of_cores_and_an_event_names_a_few_namespaces() -> None:
    assert sentence(CPUS, HeldElsewhere(1.5, 1)) == (
        "0.75 cores beyond the pool's reserve are held by 1 pod that belongs to no job of this platform."
    )
    many = HeldElsewhere(9.0, 9, tuple(f"n{i}" for i in range(9)))
    assert told(GPUS, many)[1].endswith("Their namespaces: n0, n1, n2, n3, n4 and 4 more.")
