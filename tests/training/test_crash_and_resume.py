"""SIGKILL during checkpoints and steps, then resume: losses and weights equal the uninterrupted run's, bit for bit."""

from __future__ import annotations

import io
import json
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.training.crash import Point, train_in_a_process
from tests.training.small import manifest, with_text

from busbar.workloads.machine.direct_file import DirectFile
from busbar.workloads.training import async_checkpoint
from busbar.workloads.training import checkpoint as checkpoint_module
from busbar.workloads.training.async_checkpoint import time_for_another
from busbar.workloads.training.capture import Capture
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.control import Control
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import run
from busbar.workloads.training.status import Status
from busbar.workloads.training.trainer import Trainer

# A checkpoint every 4 of 12 steps, written in the background. Where timing decides which one is the newest durable
# checkpoint, the expectation is None, and the test reads it from the disk after the kill.
POINTS: dict[str, tuple[Point, int | None]] = {
    "in a forward pass": (Point("trainer:Trainer", "_micro_batch", 13), None),
    "half way through an update": (Point("optimizer:OffloadedAdamW", "_adamw", 40), None),
    "when the second snapshot begins": (Point("snapshot:Snapshot", "begin", 2), 4),
    "half way through the second snapshot": (Point("snapshot:Snapshot", "_fill", 8), 4),
    "before a block of the second checkpoint is written": (Point("state_file:DirectFile", "write", 9), 4),
    "before the manifest of the second checkpoint": (Point("checkpoint", "write_document", 2), 4),
    "between its files and its commit": (Point("checkpoint", "_replace", 2), 4),
    "just after its commit": (Point("checkpoint:CheckpointFolder", "remove_old", 2), 8),
    "before the first checkpoint": (Point("trainer:Trainer", "step", 4), 0),
    "while the result is written": (Point("export", "_swap_in", 1), 12),
}


def losses(claims: Path) -> dict[int, float]:
    lines = (claims / "out/model/checkpoints/journal.jsonl").read_text().splitlines()
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def outcome(claims: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((claims / "out/model/busbar.json").read_text())
    return document


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    claims = with_text(tmp_path_factory.mktemp("whole"))
    assert train_in_a_process(manifest(), claims) == 0
    return claims


@pytest.mark.parametrize(("point", "resumes_from"), POINTS.values(), ids=POINTS.keys())
def test_a_killed_run_resumes_to_the_same_bits(
    point: Point, resumes_from: int | None, uninterrupted: Path, tmp_path: Path
) -> None:
    claims = with_text(tmp_path / "claims")
    assert train_in_a_process(manifest(), claims, point) == -signal.SIGKILL
    durable = max(CheckpointFolder(claims / "out/model/checkpoints", 2).steps(), default=0)
    assert resumes_from in (None, durable)
    finished = max(losses(claims), default=0)
    assert train_in_a_process(manifest(), claims) == 0

    status = json.loads((claims / "status.json").read_text())
    assert status["resumedFromStep"] == durable
    assert status["lostSteps"] == status["replayedSteps"] == finished - durable
    assert status["replayMismatches"] == 0
    assert_same_result(claims, uninterrupted)


def assert_same_result(claims: Path, whole: Path) -> None:
    """Every loss, and every final weight, bit for bit."""
    assert losses(claims) == losses(whole)
    ours, theirs = (load_file(run / "out/model/model.safetensors") for run in (claims, whole))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert outcome(claims)["fingerprint"] == outcome(whole)["fingerprint"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("resident", "optimizer-offload"),
        ("optimizer-offload", "parameter-offload"),
        ("parameter-offload", "resident"),
    ],
)
def test_a_run_may_resume_with_its_state_elsewhere(
    before: str, after: str, uninterrupted: Path, tmp_path: Path
) -> None:
    claims = with_text(tmp_path)
    point = Point("snapshot:Snapshot", "begin", 2)
    assert train_in_a_process(manifest(mode=before), claims, point) == -signal.SIGKILL
    assert train_in_a_process(manifest(mode=after), claims) == 0
    assert_same_result(claims, uninterrupted)


@pytest.mark.parametrize(
    "point",
    [
        Point("block_slots:BlockSlots", "_collect", 23),
        Point("block_slots:BlockSlots", "_load", 40),
        Point("optimizer:OffloadedAdamW", "_adamw", 40),
        Point("snapshot:Snapshot", "_fill", 8),
    ],
    ids=lambda point: point.name.strip("_"),
)
def test_a_run_with_its_weights_on_the_host_that_is_killed_resumes_to_the_same_bits(
    point: Point, uninterrupted: Path, tmp_path: Path
) -> None:
    claims = with_text(tmp_path / "claims")
    there = manifest(mode="parameter-offload")
    assert train_in_a_process(there, claims, point) == -signal.SIGKILL
    assert train_in_a_process(there, claims) == 0
    assert json.loads((claims / "status.json").read_text())["mode"] == "parameter-offload"
    assert_same_result(claims, uninterrupted)


@pytest.mark.parametrize(
    "point",
    [
        Point("disk_tensor:DiskTensor", "write", 31),
        Point("disk_tensor:DiskTensor", "read", 37),
        Point("state_file:DirectFile", "write", 9),
    ],
    ids=["while state is stored", "while state is loaded", "while a checkpoint is written"],
)
def test_a_run_with_its_state_on_disk_that_is_killed_resumes_to_the_same_bits(
    point: Point, uninterrupted: Path, tmp_path: Path
) -> None:
    claims = with_text(tmp_path / "claims")
    there = manifest(mode="parameter-offload", scratchDisk="64Mi")
    assert train_in_a_process(there, claims, point) == -signal.SIGKILL
    assert train_in_a_process(there, claims) == 0
    assert "of state from" in (claims / "log.txt").read_text()
    assert_same_result(claims, uninterrupted)
    assert list((claims / "out/model/checkpoints").glob(".busbar-scratch*")) == []


def test_a_damaged_newest_checkpoint_costs_steps_and_no_bits(uninterrupted: Path, tmp_path: Path) -> None:
    claims = with_text(tmp_path)
    assert train_in_a_process(manifest(), claims, Point("export", "_swap_in", 1)) == -signal.SIGKILL
    state = claims / "out/model/checkpoints/step-00000012/state.safetensors"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(bytes(data))
    assert train_in_a_process(manifest(), claims) == 0
    status = json.loads((claims / "status.json").read_text())
    assert (status["resumedFromStep"], status["lostSteps"]) == (8, 4)
    assert_same_result(claims, uninterrupted)


def test_other_settings_do_not_resume_from_these_checkpoints(uninterrupted: Path, tmp_path: Path) -> None:
    claims = with_text(tmp_path)
    assert train_in_a_process(manifest(), claims, Point("trainer:Trainer", "step", 7)) == -signal.SIGKILL
    changed = manifest(seed=1)
    assert train_in_a_process(changed, claims) == 0
    status = json.loads((claims / "status.json").read_text())
    assert status["resumedFromStep"] is None
    assert (claims / "out/model/checkpoints.previous").is_dir()


def test_a_run_that_fails_keeps_the_checkpoint_that_it_was_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims, failed = with_text(tmp_path), threading.Event()
    write, step = CheckpointFolder.write, Trainer.step

    def write_after_the_failure(*arguments: Any) -> int:
        assert failed.wait(60)
        time.sleep(0.2)
        return write(*arguments)

    def fail_at_six(trainer: Trainer, data: Any) -> Any:
        if trainer.done == 5:
            failed.set()
            raise RuntimeError("the device fell off the bus")
        return step(trainer, data)

    monkeypatch.setattr(CheckpointFolder, "write", write_after_the_failure)
    monkeypatch.setattr(Trainer, "step", fail_at_six)
    status = Status()
    described = run_from_manifest(manifest(), claims, None, {})
    assert run(described, status, Control(), Lines("fails", io.StringIO())) == 1
    assert "fell off the bus" in status.to_json()["message"]
    assert (claims / "out/model/checkpoints/step-00000004/state.safetensors").is_file()


def test_losses_fall(uninterrupted: Path) -> None:
    values = losses(uninterrupted)
    assert values[12] < values[1] - 0.3


def test_a_stop_while_a_checkpoint_is_written_costs_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running write is cancelled in favour of the newest state: nothing is lost, and one checkpoint is on disk."""
    claims, control = with_text(tmp_path), Control()
    committed, abandon, write = list[Path](), Capture.abandon, DirectFile.write
    cancelled = threading.Event()

    def stop_in_the_first_write(file: DirectFile, data: torch.Tensor, offset: int) -> None:
        if not control.stopping:
            deadline = time.monotonic() + 60
            while status.step <= 4 and time.monotonic() < deadline:
                time.sleep(0.01)  # training continues while the writer runs
            control.stop()
            assert cancelled.wait(60)
        write(file, data, offset)

    def tell(capture: Capture) -> None:
        abandon(capture)
        cancelled.set()

    def count(temporary: Path, target: Path) -> None:
        committed.append(target)
        commit(temporary, target)

    commit = checkpoint_module._replace
    monkeypatch.setattr(DirectFile, "write", stop_in_the_first_write)
    monkeypatch.setattr(checkpoint_module, "_replace", count)
    monkeypatch.setattr(Capture, "abandon", tell)
    status = Status()
    described = run_from_manifest(manifest(), claims, None, {})
    assert run(described, status, control, Lines("stopped", io.StringIO())) == 143
    assert status.step > 4
    assert [path.name for path in committed] == [f"step-{status.step:08d}"]
    assert f"state after step {status.step} is durable" in status.to_json()["message"]


@pytest.mark.parametrize(("grace_s", "said"), [(1e-9, 1), (1e9, 0), (None, 0)])
def test_a_grace_period_that_is_shorter_than_a_write_is_named_before_it_matters(
    grace_s: float | None, said: int, tmp_path: Path
) -> None:
    claims, log = with_text(tmp_path), io.StringIO()
    described = replace(run_from_manifest(manifest(), claims, None, {}), grace_s=grace_s)
    assert run(described, Status(), Control(), Lines("slow", log)) == 0
    assert log.getvalue().count(f"preemption.gracePeriodSeconds is {grace_s}") == said


@pytest.mark.parametrize(
    ("left_s", "elapsed_s", "written", "another"),
    [(None, 1e9, 1, True), (60, 10, 50, True), (29, 10, 50, False), (30, 10, 50, True), (1, 0.1, 0, True)],
)
def test_a_new_write_is_started_where_it_fits_into_the_grace_period(
    left_s: float | None, elapsed_s: float, written: int, another: bool
) -> None:
    """After 10 s half of the 100 bytes are written: a whole write takes 20 s, and 30 s with the margin."""
    assert time_for_another(left_s, elapsed_s, written, 100) is another


def test_too_little_time_for_the_newest_state_finishes_the_write_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims, control = with_text(tmp_path), Control()
    write, decided = DirectFile.write, threading.Event()
    blocks = 0

    def stop_in_the_middle(file: DirectFile, data: torch.Tensor, offset: int) -> None:
        nonlocal blocks
        blocks += 1
        if blocks == 3 and not control.stopping:
            control.stop()
            assert decided.wait(60)
        write(file, data, offset)

    def decide(*arguments: Any) -> bool:
        decided.set()
        return time_for_another(*arguments)

    monkeypatch.setattr(DirectFile, "write", stop_in_the_middle)
    monkeypatch.setattr(async_checkpoint, "time_for_another", decide)
    status = Status()
    described = replace(run_from_manifest(manifest(), claims, None, {}), grace_s=1e-9)
    assert run(described, status, control, Lines("stopped", io.StringIO())) == 143
    assert "state after step 4 is durable" in status.to_json()["message"]
    assert CheckpointFolder(claims / "out/model/checkpoints", 2).steps() == [4]
