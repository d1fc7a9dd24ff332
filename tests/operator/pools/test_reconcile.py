"""The status of a pool."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.operator.builders import NOW, pool

from busbar.operator.accounting.allocations import PoolAllocation
from busbar.operator.pools.capacities import Capacities
from busbar.operator.pools.nodes import scheduler_pool
from busbar.operator.pools.reconcile import reconcile as reconcile_pool
from busbar.operator.watch.projections import Node


def test_a_pool_says_what_it_has() -> None:
    update = reconcile_pool(pool(), PoolAllocation(2, 8.0, 3.0), NOW)
    assert update.status is not None
    assert (update.status.capacity, update.status.free) == (8.0, 5.0)
    again = pool().model_copy(update={"status": update.status})
    assert reconcile_pool(again, PoolAllocation(2, 8.0, 3.0), NOW + timedelta(hours=1)).status is None


def test_only_what_jobs_hold_may_be_told_later() -> None:
    first = reconcile_pool(pool(), PoolAllocation(2, 8.0, 3.0), NOW)
    assert not first.waits
    told = pool().model_copy(update={"status": first.status})
    assert reconcile_pool(told, PoolAllocation(2, 8.0, 4.0), NOW).waits
    assert not reconcile_pool(told, PoolAllocation(1, 4.0, 4.0), NOW).waits


def test_of_a_node_only_as_many_accelerators_count_as_it_has_devices_of_the_fabric_for() -> None:
    fabric = {"resources": {"rdma/hca": 2}}
    gpus = pool(
        accelerator="H100",
        resourceName="nvidia.com/gpu",
        nodeSelector={"p": "g"},
        interconnect={"fabric": fabric},
    )
    places = Capacities()
    places.set_pools((gpus,))
    for name, devices in (("whole", 16), ("short", 5), ("none", 0), ("away", 0)):
        has = (("nvidia.com/gpu", 8), ("rdma/hca", devices))
        places.set_node(name, Node(name, (("p", "g"),), (), 8000, 32768, 100_000, has, name != "away"))
    found = {node.name: node.capacity.accelerators_m for node in places.nodes()}
    assert found == {"whole": 8000, "short": 2000, "none": 0, "away": 0}
    assert places.remarks().without_fabric == {gpus.metadata.name: 2}, "one that is not ready tells nothing"
    update = reconcile_pool(gpus, PoolAllocation(3, 10.0, without_fabric=2), NOW)
    assert update.status is not None
    assert (update.status.conditions or [])[0].message == (
        "3 nodes are ready. 2 nodes have less than 2 x rdma/hca for each accelerator "
        "(spec.interconnect.fabric.resources), and only the accelerators that have them count; look for the device "
        "plugin's pod there."
    )
    places.set_pools((pool(accelerator="H100", resourceName="nvidia.com/gpu", nodeSelector={"p": "g"}),))
    assert {node.capacity.accelerators_m for node in places.nodes()} == {8000}
    assert not places.remarks().without_fabric


def test_two_pools_that_select_one_node_say_so_at_both() -> None:
    places = Capacities()
    places.set_pools((pool(), pool("narrow", nodeSelector={"pool": "cpu", "zone": "a"})))
    for name, zone in (("n0", "a"), ("n1", "a"), ("n2", "b")):
        labels = (("pool", "cpu"), ("zone", zone))
        places.set_node(name, Node(name, labels, (), 8000, 32768, 100_000, (), True))
    places.nodes()
    overlaps = places.remarks().overlaps
    told = {}
    for name, nodes in (("cpu", 1), ("narrow", 2)):
        update = reconcile_pool(pool(name), PoolAllocation(nodes, 8.0, overlaps=overlaps[name]), NOW)
        assert update.status is not None
        told[name] = (update.status.conditions or [])[0].message
    assert told == {
        "cpu": "1 nodes are ready. 2 nodes that it selects belong to pool narrow.",
        "narrow": "2 nodes are ready. 2 nodes are selected by pool cpu too, and count here.",
    }
    places.set_node("n0", None)
    places.set_node("n1", None)
    places.nodes()
    assert places.remarks().overlaps == {}


@pytest.mark.parametrize(
    ("spec", "mib"),
    [
        ({"accelerator": "H100", "memoryGib": 94}, 96_256),
        ({"accelerator": "H100"}, 81_920),
        ({"accelerator": "H100-1g.10gb"}, 9_728),
        ({"accelerator": "H100", "memoryGib": 0}, 0),
        ({"accelerator": "XPU"}, 0),
    ],
)
def test_the_memory_of_a_pool_is_as_stated_or_else_of_the_data_sheet(
    spec: dict[str, object], mib: int
) -> None:
    assert scheduler_pool(pool("gpu", resourceName="nvidia.com/gpu", **spec)).memory_mib == mib


def test_cores_have_the_memory_of_their_nodes() -> None:
    assert scheduler_pool(pool(memoryGib=4)).memory_mib == 0
