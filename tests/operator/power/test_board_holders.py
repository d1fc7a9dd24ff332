"""Which pods hold which board."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tests.operator.builders import pool
from tests.operator.power.parts import told

from busbar.kube.informer import Key
from busbar.operator.power.board_holders import BoardHolders
from busbar.operator.power.readings import Reading, read
from busbar.operator.watch.projections import Node, Pod, Requests

T = datetime(2026, 11, 1, tzinfo=UTC)
WATTS = (100.0, 0.0)
LABELS = (("gpus", "yes"),)
DEVICES = (("nvidia.com/gpu", 4), ("rdma/hca", 8))
NODES = {Key("", "n1"): Node("n1", LABELS, (), 8000, 32_000, 0, DEVICES, True)}
POOLS = (
    pool(
        "gpu", resourceName="nvidia.com/gpu", accelerator="A100", memoryGib=80, nodeSelector={"gpus": "yes"}
    ),
)


def reading(pods: dict[str, tuple[str, ...] | None] | None = None) -> Reading:
    """Four boards; simulated unless it is said who holds them."""
    backend = "simulated" if pods is None else "nvml"
    report = told(backend=backend, b0=WATTS, b1=WATTS, b2=WATTS, b3=WATTS)
    boards = tuple(b.model_copy(update={"pods": (pods or {}).get(b.uuid)}) for b in report.boards)
    found = read(None, report.model_copy(update={"boards": boards}), 0.0)
    assert isinstance(found, Reading)
    return found


def pod(name: str, boards: int, after_s: float = 0, phase: str = "Running", network: int = 0) -> Pod:
    requests = Requests(devices=(("nvidia.com/gpu", boards), ("rdma/hca", network)))
    return Pod(Key("team", name), name, phase, T + timedelta(seconds=after_s), "n1", requests)


def held(holders: BoardHolders, *pods: Pod, of: Reading | None = None) -> dict[str, str]:
    """The names of the holders, by board."""
    found = holders.look({"n1": of or reading()}, NODES, pods, POOLS)["n1"]
    return {uuid: ",".join(key.name for key in keys) for uuid, keys in found.items() if keys}


def test_a_simulated_pod_keeps_its_boards_until_it_ends() -> None:
    holders = BoardHolders()
    old, young = pod("old", 1), pod("young", 2, after_s=1)
    assert held(holders, young, old) == {"b0": "old", "b1": "young", "b2": "young"}
    ended = pod("old", 1, phase="Succeeded")
    late = pod("late", 2, after_s=2)
    assert held(holders, ended, young, late) == {"b0": "late", "b1": "young", "b2": "young", "b3": "late"}


def test_the_kubelet_says_it_where_there_is_one() -> None:
    said: dict[str, tuple[str, ...] | None] = {
        "b0": ("team/a",),
        "b1": ("team/a", "other/c"),
        "b2": (),
        "b3": ("team/gone",),
    }
    assert held(BoardHolders(), of=reading(said)) == {"b0": "a", "b1": "a,c", "b3": "gone"}


def test_a_node_of_which_nobody_says_it_is_left_out() -> None:
    assert BoardHolders().look({"n1": reading({"b0": ("team/a",)})}, NODES, (), POOLS) == {}


def test_a_simulated_node_with_slices_is_left_out() -> None:
    slices = {Key("", "n1"): Node("n1", LABELS, (), 8000, 32_000, 0, (("nvidia.com/mig-1g.10gb", 28),), True)}
    of_slices = (
        pool(
            "slices",
            resourceName="nvidia.com/mig-1g.10gb",
            accelerator="A100",
            memoryGib=10,
            nodeSelector={"gpus": "yes"},
        ),
    )
    for pools in (POOLS, of_slices):
        assert BoardHolders().look({"n1": reading()}, slices, (pod("a", 1),), pools) == {}


def test_a_simulated_node_of_no_pool_is_left_out() -> None:
    assert BoardHolders().look({"n1": reading()}, NODES, (pod("a", 1),), ()) == {}


def test_network_devices_are_no_boards() -> None:
    """Neither of the node nor of a pod of a gang."""
    assert held(BoardHolders(), pod("a", 1, network=2), pod("b", 2, after_s=1, network=1)) == {
        "b0": "a",
        "b1": "b",
        "b2": "b",
    }
    assert held(BoardHolders(), pod("network", 0, network=4)) == {}
