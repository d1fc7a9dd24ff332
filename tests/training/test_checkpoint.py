"""Checkpoints on disk: committed atomically, verified when read, with the step log beside them."""

from __future__ import annotations

import errno
import json
import os
import queue
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from tests.training.plain_loop import rounded
from tests.training.small import VOCABULARY, engine
from tests.training.states import GivenBlocks, write_state
from tests.training.test_bit_equality import CPU, packed, plan_for

from busbar.workloads.machine.streams import CallerStream
from busbar.workloads.training import checkpoint as module
from busbar.workloads.training.async_checkpoint import Saver
from busbar.workloads.training.capture import Capture, Source
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.errors import CheckpointError
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.layout import Layout
from busbar.workloads.training.model import open_model
from busbar.workloads.training.optimizer import join
from busbar.workloads.training.paths import Claimed, claim_checkpoints, own_checkpoints, own_folder
from busbar.workloads.training.snapshot import Snapshot
from busbar.workloads.training.state_file import Blocks
from busbar.workloads.training.step_log import Journal
from busbar.workloads.training.trainer import Trainer

FACTS = {"identity": "abc", "attempt": 1}


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weights/a": torch.randn(1000, generator=generator),
        "m/a": torch.randn(1000, generator=generator),
        "weights/b": torch.randn(64, generator=generator).bfloat16(),
        "rng/cpu": torch.get_rng_state(),
    }


def folder_with(path: Path, steps: list[int], keep: int = 5) -> CheckpointFolder:
    folder = CheckpointFolder(path, keep)
    for step in steps:
        write_state(folder, step, tensors(step), FACTS)
    return folder


def test_a_checkpoint_reads_back_bit_for_bit(tmp_path: Path) -> None:
    loaded = folder_with(tmp_path, [10]).newest().checkpoint
    assert loaded is not None
    assert loaded.step == 10
    assert loaded.manifest["identity"] == "abc"
    expected = tensors(10)
    assert loaded.names == set(expected)
    assert all(torch.equal(loaded.tensor(name), expected[name]) for name in expected if name != "rng/cpu")


def test_the_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    folder_with(tmp_path, [10])
    read = load_file(tmp_path / "step-00000010/state.safetensors")
    expected = tensors(10)
    assert set(read) == set(expected)
    assert all(torch.equal(read[name], expected[name]) for name in expected if name != "rng/cpu")


@pytest.mark.parametrize(("start", "count"), [(0, 1000), (0, 1), (17, 900), (999, 1)])
def test_any_run_of_a_tensor_is_read_into_its_place(start: int, count: int, tmp_path: Path) -> None:
    loaded = folder_with(tmp_path, [10]).newest().checkpoint
    assert loaded is not None
    target = torch.zeros(count)
    loaded.read_into("m/a", start, target)
    assert torch.equal(target, tensors(10)["m/a"][start : start + count])
    with pytest.raises(CheckpointError, match="m/a is not"):
        loaded.read_into("m/a", 1001 - count, target)


@pytest.mark.parametrize("change", [-1, 1])
def test_blocks_that_are_not_the_whole_state_are_not_committed(change: int, tmp_path: Path) -> None:
    layout = Layout.of([("weights/a", torch.float32, 100)])
    with pytest.raises(CheckpointError, match=f"{400 + 4 * change} of 400 bytes came"):
        CheckpointFolder(tmp_path, 1).write(
            1, layout, GivenBlocks([torch.zeros(400 + 4 * change, dtype=torch.uint8)]), FACTS
        )
    assert list(tmp_path.iterdir()) == []


def test_views_of_one_buffer_are_written_as_what_they_show(tmp_path: Path) -> None:
    flat = torch.arange(100.0)
    folder = CheckpointFolder(tmp_path, 1)
    write_state(folder, 1, {"weights/a": flat[:40], "weights/b": flat[64:]}, FACTS)
    loaded = folder.newest().checkpoint
    assert loaded is not None
    assert torch.equal(loaded.tensor("weights/b"), flat[64:])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    assert folder_with(tmp_path, [1, 2, 3, 10], keep=2).steps() == [10, 3]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))


def forge_step(path: Path) -> None:
    document = json.loads(path.read_text())
    document["body"]["step"] = 99
    path.write_text(json.dumps(document))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit in a tensor": lambda folder: flip(folder / "state.safetensors", -5),
    "a flipped bit in the header": lambda folder: flip(folder / "state.safetensors", 20),
    "a truncated file": lambda folder: (folder / "state.safetensors").write_bytes(
        (folder / "state.safetensors").read_bytes()[:2000]
    ),
    "an empty file": lambda folder: (folder / "state.safetensors").write_bytes(b""),
    "no tensors": lambda folder: (folder / "state.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "a torn manifest": lambda folder: (folder / "manifest.json").write_text('{"crc32": 1, "bo'),
    "a forged step": lambda folder: forge_step(folder / "manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, [10, 20])
    damage(tmp_path / "step-00000020")
    found = folder.newest()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 10
    assert len(found.passed_over) == 1
    assert "step-00000020" in found.passed_over[0]


def test_a_half_written_checkpoint_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, [10])
    (tmp_path / ".tmp-step-00000020-999").mkdir()
    found = folder.newest()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 10
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000010"]


def test_a_damaged_checkpoint_in_the_way_is_replaced(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, [10, 20])
    DAMAGE["no manifest"](tmp_path / "step-00000020")
    write_state(folder, 20, tensors(20), FACTS)
    found = folder.newest()
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.passed_over) == (20, ())


def test_a_full_disk_is_reported_and_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path, [10])

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step 20 could not be written.*free space"):
        write_state(folder, 20, tensors(20), FACTS)
    monkeypatch.undo()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000010"]


@pytest.mark.parametrize(
    ("missing", "kept"),
    [(0.0, [30, 20, 10]), (0.5, [30, 20]), (1.5, [30]), (1.9, [30]), (2.5, [30, 20, 10])],
)
def test_a_full_disk_costs_the_oldest_checkpoints_if_that_makes_room_and_never_the_last(
    missing: float, kept: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`missing` is what is not free, in checkpoints; more than two cannot be freed, so that the write fails."""
    folder_with(tmp_path, [10, 20, 30], keep=3)
    size = sum(file.stat().st_size for file in (tmp_path / "step-00000010").iterdir())
    needed = Layout.of([(name, tensor.dtype, tensor.numel()) for name, tensor in tensors(40).items()]).size
    free = int(needed + module.MANIFEST_BYTES - missing * size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(module, "write_state", refuse_to_write)
    said: list[str] = []
    folder = CheckpointFolder(tmp_path, 4, said.append)
    with pytest.raises(CheckpointError, match="No space left"):
        write_state(folder, 40, tensors(40), FACTS)
    assert folder.steps() == kept
    assert len(said) == 3 - len(kept)
    monkeypatch.undo()
    write_state(folder, 40, tensors(40), FACTS)
    assert folder.steps() == [40, *kept]


def refuse_to_write(*arguments: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_a_damaged_checkpoint_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path, [10, 20], keep=3)
    DAMAGE["a flipped bit in a tensor"](tmp_path / "step-00000020")
    assert folder.newest().checkpoint is not None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=module.MANIFEST_BYTES))
    write_state(folder, 30, tensors(30), FACTS)
    assert folder.steps() == [30, 10]


def test_a_damaged_newer_checkpoint_never_pushes_out_good_ones(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, [10, 20], keep=2)
    DAMAGE["a flipped bit in a tensor"](tmp_path / "step-00000020")
    again = CheckpointFolder(tmp_path, keep=1)
    assert again.newest().checkpoint is not None
    write_state(again, 15, tensors(15), FACTS)
    found = folder.newest()
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.passed_over) == (15, ())
    assert folder.steps() == [15]


def test_a_disk_that_fills_while_tensors_are_written_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        write(descriptor, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    folder, write = folder_with(tmp_path, [10]), os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"step 20 could not be written.*No space left.*free space"):
        write_state(folder, 20, tensors(20), FACTS)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000010"]


class FailingOnce:
    """A folder whose first write fails."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.removed_after: list[int] = []
        self.failed = False

    def write(self, step: int, layout: Layout, blocks: Blocks, facts: object) -> int:
        block = blocks.take()
        assert block is not None
        blocks.give_back(block)
        if not self.failed:
            self.failed = True
            raise CheckpointError(f"step {step}: the disk is full")
        while (block := blocks.take()) is not None:
            blocks.give_back(block)
        self.written.append(step)
        return 1

    def remove_old(self, written: int) -> None:
        self.removed_after.append(written)


class OneBuffer:
    """A snapshot of five blocks through one buffer: the copy ends only if the buffer is always returned."""

    layout = Layout(())

    def __init__(self) -> None:
        self.free: queue.LifoQueue[torch.Tensor] = queue.LifoQueue()
        self.free.put(torch.zeros(8, dtype=torch.uint8))

    def begin(self) -> Capture:
        source = Source(lambda start, data: None, 5 * 8, 8, {}, CallerStream(), self.free)
        capture = Capture(source)
        capture.start()
        return capture


def test_older_checkpoints_go_after_the_next_one_has_been_told_of() -> None:
    folder, told = FailingOnce(), list[tuple[int, list[int]]]()
    folder.failed = True
    saver = Saver(
        cast(CheckpointFolder, folder),
        cast(Snapshot, OneBuffer()),
        {},
        lambda: None,
        lambda step, *_: told.append((step, list(folder.removed_after))),
    )
    saver.save(1, {})
    saver.save(2, {})
    saver.drain()
    assert told == [(1, []), (2, [1])]
    assert folder.removed_after == [1, 2]


def test_a_failed_write_is_reported_and_does_not_cost_the_next_one() -> None:
    folder, durable = FailingOnce(), []
    saver = Saver(
        cast(CheckpointFolder, folder),
        cast(Snapshot, OneBuffer()),
        {},
        lambda: None,
        lambda step, saved_at, size: durable.append(step),
    )
    saver.save(1, {})
    with pytest.raises(CheckpointError, match="step 1"):
        saver.save(2, {})  # raises the error of step 1, and saves step 2
    saver.drain()
    assert folder.written == durable == [2]
    assert saver.durable_step == 2


def test_the_journal_counts_the_lost_steps_exactly(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", 1)
    for step in range(1, 8):
        journal.append(step, 1.0 / step)
    journal.close()
    again = Journal(tmp_path / "journal.jsonl", 2)
    assert again.last_step == 7
    assert again.lost_since(4) == 3
    again.close()


def test_the_journal_compares_repeated_steps(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", 1)
    for step, loss in ((1, 0.5), (2, 0.25)):
        journal.append(step, loss)
    journal.close()
    again = Journal(tmp_path / "journal.jsonl", 2)
    again.append(1, 0.5)
    again.append(2, 0.26)
    again.append(3, 0.1)
    assert (again.replayed, again.mismatches) == (2, [2])
    again.close()


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"step": 1, "loss": 0.5, "attempt": 1}\n{"step": 2, "lo')
    journal = Journal(path, 2)
    assert journal.last_step == 1
    journal.append(2, 0.25)
    journal.close()
    again = Journal(path, 3)
    assert again.recorded == {1: 0.5, 2: 0.25}
    again.close()


def test_the_digest_of_losses_needs_every_step(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl", 1)
    for step in (1, 2, 4):
        journal.append(step, 0.5)
    assert journal.digest(2) is not None
    assert journal.digest(4) is None
    journal.close()


def test_another_jobs_checkpoints_are_moved_aside_and_not_resumed(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    assert claim_checkpoints(checkpoints, "uid-1") == Claimed()
    folder_with(checkpoints, [10])
    assert claim_checkpoints(checkpoints, "uid-1") == Claimed()
    assert claim_checkpoints(checkpoints, "uid-2") == Claimed(tmp_path / "checkpoints.previous")
    assert CheckpointFolder(checkpoints, 2).newest().checkpoint is None
    assert CheckpointFolder(tmp_path / "checkpoints.previous", 2).steps() == [10]
    folder_with(checkpoints, [20])
    assert claim_checkpoints(checkpoints, "uid-3") == Claimed(tmp_path / "checkpoints.previous-2")
    folder_with(checkpoints, [30])
    assert claim_checkpoints(checkpoints, "uid-4", adopt=True) == Claimed()
    assert steps_by_folder(tmp_path) == {
        "checkpoints": [30],
        "checkpoints.previous": [10],
        "checkpoints.previous-2": [20],
    }
    own_checkpoints(checkpoints, "uid-4")
    assert claim_checkpoints(checkpoints, "uid-4") == Claimed()


def test_a_run_whose_checkpoints_were_moved_aside_gets_them_back(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for run, step in (("a", 10), ("b", 20), ("c", 30)):
        claim_checkpoints(checkpoints, run)
        folder_with(checkpoints, [step])
    assert own_folder(checkpoints, "b") == tmp_path / "checkpoints.previous-2"
    claimed = claim_checkpoints(checkpoints, "a")
    assert claimed == Claimed(tmp_path / "checkpoints.previous-3", tmp_path / "checkpoints.previous")
    assert steps_by_folder(tmp_path) == {
        "checkpoints": [10],
        "checkpoints.previous-2": [20],
        "checkpoints.previous-3": [30],
    }
    claim_checkpoints(checkpoints, "c")
    assert steps_by_folder(tmp_path) == {
        "checkpoints": [30],
        "checkpoints.previous": [10],
        "checkpoints.previous-2": [20],
    }


def steps_by_folder(place: Path) -> dict[str, list[int]]:
    return {folder.name: CheckpointFolder(folder, 2).steps() for folder in place.iterdir()}


@pytest.mark.parametrize("placement", ["resident", "optimizer-offload"])
def test_an_update_waits_until_what_it_changes_is_copied(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy stands still until an update has reached it: without the wait it would hold the next step's state."""
    spec = parse_engine(engine(steps=3))
    recipe = open_model(spec, None, VOCABULARY, 0)
    plan = replace(plan_for(spec, recipe, placement), snapshot_blocks=3, snapshot_block_bytes=64 * 1024)
    trainer, fill = Trainer(spec, recipe, plan, CPU), Snapshot._fill

    def fill_once_an_update_waits(snapshot: Snapshot, start: int, data: torch.Tensor) -> None:
        deadline = time.monotonic() + 20
        while (
            start == 0
            and snapshot.capture is not None
            and snapshot.capture._wanted is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.001)
        fill(snapshot, start, data)

    monkeypatch.setattr(Snapshot, "_fill", fill_once_an_update_waits)
    trainer.step(packed())
    trainer.drain()
    folder = CheckpointFolder(tmp_path, 1)
    saver = Saver(folder, trainer.snapshot, FACTS, lambda: None, lambda *_: None)
    saver.save(1, trainer.counters())
    expected = {name: p.detach().clone().view(-1) for name, p in trainer.model.named_parameters()}
    moments = [
        (name, part.clone(), extent.start)
        for name, part, extent in trainer.optimizer.atoms()
        if isinstance(part, torch.Tensor)
    ]
    trainer.step(packed())
    saver.drain()
    assert saver.stalled_seconds > 0
    loaded = folder.newest().checkpoint
    assert loaded is not None
    for name, weight in expected.items():
        assert torch.equal(loaded.tensor(f"weights/{name}"), weight), name
    for name, part, start in moments:
        assert torch.equal(loaded.tensor(name)[start : start + part.numel()], part), name
    trainer.close()


@pytest.mark.parametrize("buffers", [2, 3, 1000])
def test_a_snapshot_through_few_buffers_holds_the_state_of_one_step(buffers: int, tmp_path: Path) -> None:
    spec = parse_engine(engine(steps=3, dtype="bfloat16"))
    recipe = open_model(spec, None, VOCABULARY, 0)
    plan = replace(plan_for(spec, recipe, "half"), snapshot_blocks=buffers, snapshot_block_bytes=64 * 1024)
    trainer = Trainer(spec, recipe, plan, CPU)
    assert trainer.snapshot.blocks > 5
    trainer.step(packed())
    trainer.drain()
    folder, durable = CheckpointFolder(tmp_path, 1), list[int]()
    saver = Saver(folder, trainer.snapshot, FACTS, lambda: None, lambda step, *_: durable.append(step))
    saver.save(1, trainer.counters())
    expected = {name: p.detach().clone().view(-1) for name, p in trainer.model.named_parameters()}
    second = trainer.step(packed()).loss
    saver.drain()
    loaded = folder.newest().checkpoint
    assert loaded is not None
    assert durable == [1]
    assert [
        n for n, weight in expected.items() if not torch.equal(loaded.tensor(f"weights/{n}"), weight)
    ] == []
    masters = {name: torch.empty(weight.numel()) for name, weight in expected.items()}
    for name, weight in expected.items():
        join(weight, loaded.tensor(f"low/{name}"), masters[name])
    assert all(torch.equal(rounded(masters[name]), weight) for name, weight in expected.items())
    assert not all(torch.equal(masters[name], weight.float()) for name, weight in expected.items())
    resumed = Trainer(spec, recipe, plan_for(spec, recipe, "resident"), CPU)  # its state lies elsewhere
    resumed.restore(loaded)
    assert resumed.step(packed()).loss == second
    for each in (trainer, resumed):
        each.drain()
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, trainer.model.get_parameter(name)), name
    resumed.close()
    trainer.close()
