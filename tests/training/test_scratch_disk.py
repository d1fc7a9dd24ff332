"""State on a disk: every bit that of the plain loop, within a memory that the state exceeds, and nothing left behind."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.small import SEQUENCES, VOCABULARY
from tests.training.test_bit_equality import CPU, packed, train_ours
from tests.training.test_parameter_offload import UNLIMITED, demand_of, document

from busbar.workloads.machine.direct_file import PAGE, NoRoom, ScratchFile, page_memory
from busbar.workloads.training import demand as demand_module
from busbar.workloads.training.async_checkpoint import Saver
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.demand import Demand, GroupSize
from busbar.workloads.training.disk_plan import scratch_shortage, too_slow
from busbar.workloads.training.disk_tensor import DiskTensor, measure_disk
from busbar.workloads.training.errors import InfeasiblePlan
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.layouts import first_that_fits
from busbar.workloads.training.model import open_model
from busbar.workloads.training.plan import MemoryPlan, shown_bytes
from busbar.workloads.training.streamed_plan import PARAMETER_OFFLOAD, lay_out_streamed
from busbar.workloads.training.trainer import Trainer

GIB = 2**30


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


def on_disk(need: Demand, groups: int) -> MemoryPlan:
    plan = lay_out_streamed(need, replace(UNLIMITED, disk_bytes=GIB), "", groups)
    assert len(plan.on_disk) == groups
    assert plan.disk_bytes > 0
    return plan


def open_trainer(given: dict[str, Any], plan: MemoryPlan, scratch: Path) -> Trainer:
    spec = parse_engine(given)
    return Trainer(spec, open_model(spec, None, VOCABULARY, 0), plan, CPU, scratch=scratch)


def steps(trainer: Trainer, count: int) -> list[float]:
    data = packed()
    return [trainer.step(data).loss for _ in range(count)]


@pytest.mark.parametrize("schedule", ["gated", "blocking"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 4])
def test_it_trains_to_the_bits_of_state_in_memory(
    schedule: str, dtype: str, groups: int, tmp_path: Path
) -> None:
    given = document(schedule=schedule, dtype=dtype, steps=6, batch={"sequences": SEQUENCES, "microBatch": 1})
    expected, theirs = train_ours(given, PARAMETER_OFFLOAD, fused=True)
    trainer = open_trainer(given, on_disk(demand_of(given), groups), tmp_path)
    losses = steps(trainer, 6)
    trainer.drain()
    assert list(tmp_path.iterdir()) == []  # the file has no name
    assert losses == expected
    weights = dict(theirs.model.named_parameters())
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, weights[name]), name
    moved = trainer.optimizer
    assert moved.loaded_bytes == moved.stored_bytes > 0
    trainer.close()


def test_a_checkpoint_holds_the_state_on_disk_and_goes_on_in_any_placement(tmp_path: Path) -> None:
    given = document(steps=6, dtype="bfloat16")
    need = demand_of(given)
    expected = steps(open_trainer(given, on_disk(need, 3), tmp_path), 6)
    trainer = open_trainer(given, on_disk(need, 3), tmp_path)
    assert steps(trainer, 3) == expected[:3]
    trainer.drain()
    saver = Saver(CheckpointFolder(tmp_path / "c", 1), trainer.snapshot, {}, lambda: None, lambda *_: None)
    saver.save(3, trainer.counters())
    assert (
        steps(trainer, 1) == expected[3:4]
    )  # while it is written: an update waits until its state is copied
    saver.drain()
    trainer.close()
    loaded = CheckpointFolder(tmp_path / "c", 1).newest().checkpoint
    assert loaded is not None
    for plan in (on_disk(need, 4), on_disk(need, 1), make_plan(need, UNLIMITED, "resident")):
        other = open_trainer(given, plan, tmp_path)
        other.restore(loaded)
        assert steps(other, 3) == expected[3:]
        other.close()


@pytest.fixture(scope="module")
def need() -> Demand:
    blocks = [GroupSize(f"block-{number}", 4 * 2**20) for number in range(12)]
    groups = (GroupSize("embedding", 2**20), *blocks, GroupSize("head", 2**20))
    return Demand(groups, "float32", 1, 2**20, recompute_bytes=2**19)


def test_only_as_much_state_goes_there_as_the_host_has_no_room_for(need: Demand) -> None:
    bare = replace(UNLIMITED, host_bytes=0)
    enough = lay_out_streamed(need, bare).host_bytes
    for missing in (0, 1, need.groups[1].parameters * 8, 5 * need.groups[1].parameters * 8):
        limits = replace(UNLIMITED, host_bytes=enough - missing, disk_bytes=GIB)
        plan = make_plan(need, limits, PARAMETER_OFFLOAD)
        groups = len(plan.on_disk)
        assert plan.host_bytes <= enough - missing
        assert bool(groups) is bool(missing)
        assert not groups or lay_out_streamed(need, limits, "", groups - 1).host_bytes > enough - missing
        assert plan.on_disk == tuple(group.name for group in need.groups[len(need.groups) - groups :])
    assert f"scratch disk {shown_bytes(plan.disk_bytes)}" in plan.explain()
    assert plan.to_json()["diskBytes"] == plan.disk_bytes


def test_without_enough_of_it_the_refusal_says_how_much_is_needed(need: Demand) -> None:
    bare = replace(UNLIMITED, host_bytes=0)
    host = lay_out_streamed(need, bare).host_bytes - 8 * need.groups[-2].parameters
    limits = replace(UNLIMITED, host_bytes=host)
    with pytest.raises(
        InfeasiblePlan, match=r"scratchDisk: at least \d+Mi \(state that each step reads"
    ) as raised:
        make_plan(need, limits, PARAMETER_OFFLOAD)
    told = next(fix for fix in raised.value.fixes if fix.startswith("scratchDisk"))
    least = int(told.partition("at least ")[2].partition("Mi")[0]) * 2**20
    assert first_that_fits(need, replace(limits, disk_bytes=least), PARAMETER_OFFLOAD) is not None
    assert first_that_fits(need, replace(limits, disk_bytes=least // 2), PARAMETER_OFFLOAD) is None


def test_a_full_or_a_slow_disk_is_refused_with_numbers(need: Demand) -> None:
    plan = on_disk(need, 2)
    assert scratch_shortage(plan, plan.disk_bytes) is None
    shortage = scratch_shortage(plan, plan.disk_bytes // 2)
    assert shortage is not None
    assert "of scratch disk, and" in shortage.why
    assert too_slow(plan, 600) is None
    refusal = too_slow(plan, 4000.4)
    assert refusal is not None
    assert "write them back in 4000 s" in refusal.why


def test_a_failed_write_ends_the_run_and_not_the_state(need: Demand, tmp_path: Path) -> None:
    """The step that follows gets the failure; nothing goes on with state that was not stored."""
    given = document(steps=6)
    trainer = open_trainer(given, on_disk(demand_of(given), 2), tmp_path)
    steps(trainer, 2)
    trainer.drain()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert trainer.disk is not None
    trainer.disk.write = full  # type: ignore[assignment, method-assign]
    steps(trainer, 1)
    with pytest.raises(OSError, match="No space left"):
        trainer.drain()


def test_a_scratch_file_keeps_what_is_written_at_any_place(tmp_path: Path) -> None:
    file, expected = ScratchFile(tmp_path, 16 * PAGE), torch.zeros(16 * PAGE, dtype=torch.uint8)
    assert list(tmp_path.iterdir()) == []
    generator = torch.Generator().manual_seed(0)
    memory, there = page_memory(16 * PAGE), page_memory(16 * PAGE)
    for number in range(200):
        first, last = sorted(torch.randint(0, 16 * PAGE + 1, (2,), generator=generator).tolist())
        if number % 3 == 0:  # whole pages
            first, last = first // PAGE * PAGE, -(-last // PAGE) * PAGE
        memory[:] = number + 1
        file.write(memory[: last - first], first)
        expected[first:last] = number + 1
        low, high = sorted(torch.randint(0, 16 * PAGE + 1, (2,), generator=generator).tolist())
        file.read(there[: high - low], low)
        assert torch.equal(there[: high - low], expected[low:high])
    file.read(there, 0)
    assert torch.equal(there, expected)
    with pytest.raises(EOFError):
        file.read(there[:1], 16 * PAGE)
    file.close()


def test_a_file_system_without_direct_writes_is_used_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refused(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refused)
    told: list[str] = []
    file = ScratchFile(tmp_path, 4 * PAGE, told.append)
    data, there = page_memory(4 * PAGE).fill_(7), page_memory(4 * PAGE)
    file.write(data, 0)
    file.read(there, 0)
    file.close()
    assert torch.equal(data, there)
    assert [text.partition(":")[0] for text in told] == [
        f"the file system of {tmp_path} does not support O_DIRECT"
    ]


def test_a_disk_without_room_is_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(NoRoom):
        ScratchFile(tmp_path, 2**43)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_on_disk_is_cut_as_one_in_memory_is(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 2 * PAGE)
    whole = DiskTensor(file, PAGE, 1024, torch.float32)
    whole.write(torch.arange(1024, dtype=torch.float32))
    part, found = whole[256:512][8:][:4], torch.empty(4)
    part.read(found)
    assert found.tolist() == [264.0, 265.0, 266.0, 267.0]
    low = whole[512:].view(torch.int16)
    assert (low.numel(), low.begin, low.size) == (1024, PAGE + 2048, 2048)
    file.close()


def test_the_speed_of_a_disk_is_measured_and_no_thread_stays(tmp_path: Path) -> None:
    before = threading.active_count()
    rates = measure_disk(tmp_path)
    assert min(rates.read, rates.write) > 0
    assert rates.seconds(GIB) == pytest.approx(GIB / rates.read + GIB / rates.write)
    assert (list(tmp_path.iterdir()), threading.active_count()) == ([], before)
