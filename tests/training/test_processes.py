"""A pod of several processes: what each is told, how they end together, and a job that is stopped, killed and ends."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.free_port import free_port
from tests.training.crash import train_in_a_process
from tests.training.pod import Pod
from tests.training.small import manifest, with_text

from busbar.workloads.training import processes
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.gang import Together
from busbar.workloads.training.processes import launch, of_ranks, starts_others
from busbar.workloads.training.world import World, world_of

SECOND_POD = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "job-1-0.job",
    "HOME": "/tmp",
}
FIXED: dict[str, Any] = {"parallelism": {"order": "fixed"}, "steps": 120}


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ({}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}, ["GPU-b", "GPU-a"]),
        ({"CUDA_VISIBLE_DEVICES": "3,1", "NVIDIA_VISIBLE_DEVICES": "GPU-b,GPU-a"}, ["3", "1"]),
        ({"NVIDIA_VISIBLE_DEVICES": "MIG-b,MIG-a"}, ["MIG-b", "MIG-a"]),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ["0", "1"]),
        ({"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}, ["0", "1"]),
    ],
)
def test_each_process_has_its_rank_and_sees_its_own_device(given: dict[str, str], devices: list[str]) -> None:
    pod = SECOND_POD | given
    assert starts_others(pod)
    first, second = of_ranks(pod)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in (first, second)] == devices
    assert world_of(first) == World(2, 4, "job-1-0.job", 29500, 2)
    assert world_of(second) == World(3, 4, "job-1-0.job", 29500, 2)
    assert (world_of(second).pods, world_of(second).speaks_for_pod) == (2, False)
    assert not starts_others(second)
    assert second["HOME"] == "/tmp"


def test_pods_of_different_sizes_are_refused() -> None:
    with pytest.raises(
        InvalidJob, match="LOCAL_WORLD_SIZE: is 3, and WORLD_SIZE is 4; give all pods as many"
    ):
        world_of(SECOND_POD | {"LOCAL_WORLD_SIZE": "3"})


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        (("0", "0"), 0),
        (("0", "143"), 143),
        (("143", "0"), 143),
        (("3", "hangs"), 3),
        (("hangs", "2"), 2),
        (("killed", "hangs"), 128 + signal.SIGKILL),
    ],
)
def test_processes_end_together(codes: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LEAVE_S", 0.5)
    says = (
        "import os, sys, time\n"
        "what = sys.argv[1 + int(os.environ['LOCAL_RANK'])]\n"
        "if what == 'killed': os.kill(os.getpid(), 9)\n"
        "if what == 'hangs': time.sleep(600)\n"
        "sys.exit(int(what))"
    )
    pod = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert launch([sys.executable, "-c", says, *codes], of_ranks(pod)) == code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_processes_share_the_cores_of_their_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busbar.workloads.training.environment.usable_processors", lambda: 7)
    given = manifest(threads=None)
    assert run_from_manifest(given, tmp_path, None, {}, World(1, 2, per_pod=2)).threads == 3
    assert run_from_manifest(given, tmp_path, None, {}, World(0, 16, per_pod=16)).threads == 1


@pytest.mark.parametrize(("rooms", "least"), [((5, 3, 4), 3), ((None, 3), 3), ((None, None), None)])
def test_all_plan_with_the_room_of_the_rank_that_has_the_least(
    rooms: tuple[int | None, ...], least: int | None
) -> None:
    class Ranks:
        def gather(self, own: object) -> list[tuple[int | None]]:
            return [(each,) for each in rooms]

    together = Together.__new__(Together)
    together.ranks = Ranks()  # type: ignore[assignment]
    assert together.least(rooms[0]) == least


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    claims = with_text(tmp_path_factory.mktemp("alone"))
    assert train_in_a_process(manifest(**FIXED), claims) == 0
    return claims / "out/model"


def test_two_processes_of_a_pod_crash_stop_and_end_with_the_bits_of_one(alone: Path, tmp_path: Path) -> None:
    folder = with_text(tmp_path)
    first = Pod(folder, 1, free_port(), {"everySteps": 2}, processes=2, **FIXED)
    first.wait_for_step(6)
    first.crash(1, 0)  # the trainer of rank 1
    again = first.wait_until(lambda status: status["resumedFromStep"] is not None)
    first.wait_for_step(again["resumedFromStep"] + 4)
    first.process.send_signal(signal.SIGTERM)
    code, output = first.end()
    assert code == 143, output
    assert "rank=1 event=note" in output
    assert "the trainer was killed by SIGKILL; another one goes on from the copy of step" in output
    assert output.count("phase=Training") == 2, "of the first process only"

    second = Pod(folder, 2, free_port(), processes=2, **FIXED)
    resumed = second.wait_for_step(1)
    code, output = second.end()
    assert code == 0, output
    assert resumed["resumedFromStep"] > again["resumedFromStep"]
    assert resumed["lostSteps"] == 0
    ours, theirs = (place / "model.safetensors" for place in (folder / "model", alone))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_pod_ends_with_the_code_of_its_killed_process_and_its_job_goes_on(tmp_path: Path) -> None:
    folder = with_text(tmp_path)
    first = Pod(folder, 1, free_port(), processes=2, **FIXED | {"steps": 100_000})
    first.wait_for_step(4)
    first.crash(1)
    code, output = first.end()
    assert code == 128 + signal.SIGKILL, output
    assert "error:" in output, "the other one says why it ends"
