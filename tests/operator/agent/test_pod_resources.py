"""The kubelet's PodResources API over a real socket, and which boards its devices are."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator.agent.boards import Clock
from tests.operator.agent.kubelet import Held, Kubelet, answer, within

from busbar.kube.contracts.power import MOST_HOLDERS, MOST_POD_NAME
from busbar.operator.agent.board_pods import KEPT_S, SETTLED_S, BoardPods, BoardsUnknown, board_pods
from busbar.operator.agent.pod_resources import Device, KubeletSilent, PodResources

GPU = "nvidia.com/gpu"
BOARDS = ("GPU-0", "GPU-1", "GPU-2")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kubelet.sock"


@pytest.fixture
def asked(path: Path) -> Iterator[PodResources]:
    made = PodResources(path, timeout_s=0.5)
    yield made
    made.close()


def silent(asked: PodResources, why: str) -> bool:
    try:
        asked.devices()
    except KubeletSilent as error:
        return why in str(error)
    return False


def test_devices_are_read_and_the_rest_of_the_answer_is_skipped(path: Path, asked: PodResources) -> None:
    kubelet = Kubelet()
    kubelet.says = answer({"team/a": [(GPU, "GPU-0"), ("rdma/hca", "7")], "team/b": [("gpu.nvidia.com", "")]})
    with kubelet.on(path):
        assert asked.devices() == [
            Device("team/a", GPU, "GPU-0"),
            Device("team/a", "rdma/hca", "7"),
            Device("team/b", "gpu.nvidia.com", ""),
        ]
        kubelet.says = b""
        assert asked.devices() == []


def test_a_kubelet_that_hangs_is_given_up(path: Path, asked: PodResources) -> None:
    kubelet = Kubelet()
    kubelet.hangs = True
    with kubelet.on(path):
        assert silent(asked, "DEADLINE_EXCEEDED")
        kubelet.hangs = False
        assert asked.devices() == []


def test_a_socket_that_nobody_serves_is_silence(path: Path, asked: PodResources) -> None:
    assert silent(asked, "No such file")
    with socket.socket(socket.AF_UNIX) as listener:  # it takes connections and never says a word
        listener.bind(str(path))
        listener.listen()
        assert silent(asked, "")


def test_a_kubelet_that_comes_back_is_asked_again(path: Path, asked: PodResources) -> None:
    kubelet = Kubelet()
    with kubelet.on(path):
        assert asked.devices() == []
    assert silent(asked, "")
    kubelet.says = answer({"team/a": [(GPU, "GPU-0")]})
    with kubelet.on(path):
        assert within(200, lambda: not silent(asked, ""))
        assert [device.pod for device in asked.devices()] == ["team/a"]


def test_a_kubelet_that_was_never_away_for_a_call_but_is_another_one_is_noticed(
    path: Path, asked: PodResources
) -> None:
    kubelet = Kubelet()
    with kubelet.on(path):
        assert asked.devices() == []
    with kubelet.on(path):
        assert silent(asked, "it has just started")
        assert within(200, lambda: not silent(asked, ""))


@pytest.mark.parametrize("wrong", [b"\x0a\xff", b"\x0a\x03\x0a\x01\xff"], ids=["cut off", "no text"])
def test_an_answer_that_cannot_be_read_is_silence(path: Path, asked: PodResources, wrong: bytes) -> None:
    kubelet = Kubelet()
    kubelet.says = wrong
    with kubelet.on(path):
        assert silent(asked, "INTERNAL")


@pytest.mark.parametrize("name", ["/", "team/", "/a", f"team/{'a' * 313}"])
def test_an_answer_with_a_pod_that_cannot_be_told_is_silence(
    path: Path, asked: PodResources, name: str
) -> None:
    kubelet = Kubelet()
    kubelet.says = answer({name: [(GPU, "GPU-0")]})
    with kubelet.on(path):
        assert silent(asked, "its answer has a pod named")
        kubelet.says = answer({f"team/{'a' * 312}": [(GPU, "GPU-0")]})
        assert len(asked.devices()[0].pod) == MOST_POD_NAME


def found(held: Held) -> dict[str, tuple[str, ...]]:
    slices = {"MIG-a": "GPU-1", "MIG-b": "GPU-1", "MIG-elsewhere": "GPU-9"}
    devices = [Device(pod, *each) for pod, of in held.items() for each in of]
    return board_pods(BOARDS, devices, slices.get)


def test_each_board_has_the_pods_that_hold_devices_of_it() -> None:
    held: Held = {
        "team/whole": [(GPU, "GPU-0")],
        "team/slice": [("nvidia.com/mig-1g.10gb", "MIG-a")],
        "other/slice": [("nvidia.com/mig-1g.10gb", "MIG-b")],
        "team/network": [("rdma/hca", "0"), ("nvidia.com/hostdev", "0000:1a:00.0")],
        "team/claim": [("nic.example.com", "")],
    }
    assert found(held) == {"GPU-0": ("team/whole",), "GPU-1": ("other/slice", "team/slice"), "GPU-2": ()}
    shared: Held = {"team/a": [(GPU, "GPU-2::0"), (GPU, "GPU-2::3")], "team/b": [(GPU, "GPU-2::1")]}
    assert found(shared) == {"GPU-0": (), "GPU-1": (), "GPU-2": ("team/a", "team/b")}
    assert found({"team/own": [("example.com/board", "GPU-1")]})["GPU-1"] == ("team/own",)


@pytest.mark.parametrize(
    ("resource", "device"),
    [
        (GPU, "GPU-9"),
        (GPU, "nvidia0"),
        (GPU, "0"),
        ("nvidia.com/gpu.shared", "GPU-9::1"),
        ("nvidia.com/mig-1g.10gb", "MIG-unknown"),
        ("nvidia.com/mig-1g.10gb", "MIG-elsewhere"),
        ("example.com/board", "GPU-9"),
        ("gpu.nvidia.com", ""),
    ],
)
def test_nothing_is_said_of_a_node_where_a_pod_holds_a_board_that_is_not_found(
    resource: str, device: str
) -> None:
    with pytest.raises(BoardsUnknown, match="team/a"):
        found({"team/a": [(resource, device)], "team/b": [(GPU, "GPU-0")]})


def test_more_pods_than_can_be_told_are_not_told() -> None:
    pods = {f"team/{i}": [(GPU, f"GPU-0::{i}")] for i in range(MOST_HOLDERS)}
    assert len(found(pods)["GPU-0"]) == MOST_HOLDERS
    with pytest.raises(BoardsUnknown, match="257 pods"):
        found({**pods, "team/one": [(GPU, "GPU-0::x")]})


class Says:
    """A kubelet without a socket."""

    def __init__(self) -> None:
        self.says: list[Device] | KubeletSilent = [Device("team/a", GPU, "GPU-0")]

    def devices(self) -> list[Device]:
        if isinstance(self.says, KubeletSilent):
            raise self.says
        return self.says

    def close(self) -> None:
        pass


def test_an_answer_counts_for_seconds_and_what_changed_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock, kubelet = Clock(), Says()
    pods = BoardPods(kubelet, lambda: ("GPU-0",), lambda _: None, clock)
    pods.ask()
    assert pods.now() == {}, "it may have just started"
    clock.now_s += SETTLED_S
    pods.ask()
    assert pods.now() == {"GPU-0": ("team/a",)}
    for second in range(4):
        kubelet.says = KubeletSilent(f"UNAVAILABLE: no, for the {second}th time")
        clock.now_s += KEPT_S / 4
        pods.ask()
    assert pods.now() == {"GPU-0": ("team/a",)}
    clock.now_s += 0.1
    assert pods.now() == {}
    kubelet.says = []
    for _ in range(3):  # it has started anew, and does not know its pods yet
        clock.now_s += SETTLED_S / 4
        pods.ask()
        assert pods.now() == {}
    kubelet.says = [Device("team/b", GPU, "GPU-0")]
    clock.now_s += SETTLED_S / 4
    pods.ask()
    assert pods.now() == {"GPU-0": ("team/b",)}
    kubelet.says = [Device("team/b", GPU, "nvidia0")]
    pods.ask()
    assert pods.now() == {}, "the kubelet has answered: what it said before is over"
    assert [(r.levelname, getattr(r, "why", "")[:27]) for r in caplog.records] == [
        ("INFO", ""),
        ("WARNING", "the kubelet does not say it"),
        ("INFO", ""),
        ("WARNING", "team/b holds nvidia0 of nvi"),
    ]


def test_a_node_without_boards_asks_nobody() -> None:
    kubelet = Says()
    kubelet.says = KubeletSilent("no")
    pods = BoardPods(kubelet, tuple, lambda _: None, Clock())
    pods.ask()
    assert pods.now() == {}
