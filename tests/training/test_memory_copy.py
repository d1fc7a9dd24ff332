"""Copies of the state in the memory of a supervisor: a trainer that crashes goes on from them, to the same bits."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.crash import Point, start_supervised, train_in_a_process
from tests.training.small import manifest, with_text
from tests.training.test_crash_and_resume import assert_same_result, losses

from busbar.workloads.machine.streams import Event
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.demand import COPY_HEADER_BYTES
from busbar.workloads.training.errors import CheckpointError, NotFinite
from busbar.workloads.training.layout import Layout
from busbar.workloads.training.memory_copy import MemoryCopies
from busbar.workloads.training.state_file import Block

ENDED_BY_SIGKILL = 128 + signal.SIGKILL
LAYOUT = Layout.of([("weights/a", torch.float32, 600), ("m/a", torch.float32, 600)])


class _Done(Event):
    def wait(self) -> None:
        return

    def is_set(self) -> bool:
        return True


class _State:
    """Blocks of a state whose every number is `value`."""

    def __init__(self, value: float, fails_at: int | None = None) -> None:
        data = torch.full((LAYOUT.size // 4,), value).view(torch.uint8)
        starts = range(0, LAYOUT.size, 1024)
        self._blocks = [Block(start, data[start : start + 1024], _Done(), data) for start in starts]
        self._fails_at = fails_at

    def take(self) -> Block | None:
        if self._fails_at == len(self._blocks):
            raise OSError("no memory")
        return self._blocks.pop() if self._blocks else None

    def give_back(self, block: Block) -> None:
        return


def value_of(copies: MemoryCopies) -> tuple[int, float] | None:
    found, _ = copies.newest()
    if found is None:
        return None
    values = {float(number) for name in sorted(found.names) for number in found.tensor(name)}
    assert len(values) == 1
    return found.step, values.pop()


def state_file(copies: MemoryCopies, step: int) -> Path:
    return next(slot.state for slot in copies.slots if slot.step == step)


def test_the_newest_copy_is_read_back_and_two_are_held() -> None:
    copies = MemoryCopies()
    assert value_of(copies) is None
    assert copies.step is None
    for step in (5, 10, 15):
        assert copies.write(step, LAYOUT, _State(float(step)), {"savedBy": "test"}) == LAYOUT.size
        assert value_of(copies) == (step, float(step))
    assert sorted(slot.step or 0 for slot in copies.slots) == [10, 15]
    assert 2 * LAYOUT.size < copies.bytes <= 2 * (LAYOUT.size + COPY_HEADER_BYTES)


def test_a_copy_that_fails_half_way_leaves_the_one_before() -> None:
    copies = MemoryCopies()
    copies.write(5, LAYOUT, _State(5.0), {})
    copies.write(10, LAYOUT, _State(10.0), {})
    with pytest.raises(CheckpointError, match="step 15 could not be copied to memory"):
        copies.write(15, LAYOUT, _State(15.0, fails_at=2), {})
    assert value_of(copies) == (10, 10.0)
    copies.write(20, LAYOUT, _State(20.0), {})  # into the slot that was spoilt
    assert value_of(copies) == (20, 20.0)
    assert sorted(slot.step or 0 for slot in copies.slots) == [10, 20]


def test_a_state_that_is_not_finite_is_no_copy() -> None:
    copies = MemoryCopies()
    copies.write(5, LAYOUT, _State(5.0), {})
    with pytest.raises(NotFinite):
        copies.write(10, LAYOUT, _State(float("nan")), {})
    assert value_of(copies) == (5, 5.0)


@pytest.mark.parametrize("damage", ["flipped", "cut off"])
def test_a_damaged_copy_is_named_and_passed_over(damage: str) -> None:
    copies = MemoryCopies()
    copies.write(5, LAYOUT, _State(5.0), {})
    copies.write(10, LAYOUT, _State(10.0), {})
    newest = state_file(copies, 10)
    content = bytearray(newest.read_bytes())
    content[-9] ^= 1
    newest.write_bytes(content if damage == "flipped" else content[:-9])
    found, problems = copies.newest()
    assert found is not None
    assert found.step == 5
    assert len(problems) == 1
    assert problems[0].startswith("passed over a damaged copy: the copy of step 10 in memory")


def test_what_trainers_count_is_seen_by_the_supervisor() -> None:
    copies = MemoryCopies()
    copies.count(starts=1)
    if (process := os.fork()) == 0:
        copies.count(starts=1, lost_steps=3)
        copies.write(7, LAYOUT, _State(7.0), {})
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    assert (copies.starts, copies.lost_steps, value_of(copies)) == (2, 3, (7, 7.0))


def wanted(every: int = 2, **changes: Any) -> dict[str, Any]:
    """12 steps, a copy in memory after every second one, and no checkpoint before the end."""
    document = manifest(**changes)
    document["spec"]["checkpoint"] = {"everySteps": 1000, "memory": {"everySteps": every}}
    return document


def ended(process: Any) -> int:
    process.join(300)
    return int(process.exitcode)


def status_of(claims: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((claims / "status.json").read_text())
    return said


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    claims = with_text(tmp_path_factory.mktemp("whole"))
    assert train_in_a_process(manifest(), claims) == 0
    return claims


POINTS: dict[str, tuple[list[Point | None], int]] = {  # and the trainers that it takes
    "in a forward pass": ([Point("trainer:Trainer", "_micro_batch", 13)], 2),
    "half way through an update": ([Point("optimizer:OffloadedAdamW", "_adamw", 40)], 2),
    "half way through a copy": ([Point("snapshot:Snapshot", "_fill", 8)], 2),
    "before the manifest of a copy": ([Point("memory_copy", "write_document", 3)], 2),
    "twice": ([Point("memory_copy", "write_document", 3)] * 2, 3),
    "while the result is written": ([Point("export", "_swap_in", 1)], 2),
}


@pytest.mark.parametrize(("points", "trainers"), POINTS.values(), ids=POINTS.keys())
def test_a_trainer_that_is_killed_is_followed_by_one_that_ends_with_the_same_bits(
    points: list[Point | None], trainers: int, uninterrupted: Path, tmp_path: Path
) -> None:
    claims = with_text(tmp_path / "claims")
    assert ended(start_supervised(wanted(), claims, points)) == 0
    told = (claims / "supervisor.txt").read_text()
    assert told.count("was killed by SIGKILL; another one goes on from the copy of step") == trainers - 1
    assert (claims / "log.txt").read_text().count("from the copy in this pod's memory") == trainers - 1
    assert status_of(claims)["replayMismatches"] == 0
    assert_same_result(claims, uninterrupted)


def test_lost_steps_of_all_trainers_of_the_attempt_are_added_up(tmp_path: Path) -> None:
    claims = with_text(tmp_path / "claims")
    crashes: list[Point | None] = [Point("memory_copy", "write_document", 3)] * 2
    assert ended(start_supervised(wanted(), claims, crashes)) == 0
    log = (claims / "log.txt").read_text()
    said = [int(part.split("; ")[1].split()[0]) for part in log.split("pod's memory)")[1:]]
    assert len(said) == 2
    assert status_of(claims)["lostSteps"] == sum(said) >= 4


def test_a_crash_that_comes_again_at_the_same_step_ends_the_run(tmp_path: Path) -> None:
    claims = with_text(tmp_path / "claims")
    # The copy of step 2 is whole when that of step 4 begins.
    first, again = Point("trainer:Trainer", "step", 6), Point("trainer:Trainer", "step", 1)
    assert ended(start_supervised(wanted(), claims, [first, again, None])) == ENDED_BY_SIGKILL
    assert (claims / "supervisor.txt").read_text().count("another one goes on") == 1
    assert not (claims / "out/model/config.json").exists()


def test_a_trainer_that_crashes_before_its_first_copy_is_not_started_again(tmp_path: Path) -> None:
    claims = with_text(tmp_path / "claims")
    crash: list[Point | None] = [Point("trainer:Trainer", "step", 2)]
    assert ended(start_supervised(wanted(), claims, crash)) == ENDED_BY_SIGKILL
    assert not (claims / "supervisor.txt").read_text()


def test_a_stop_is_passed_on_and_the_newest_state_is_on_disk(tmp_path: Path) -> None:
    claims = with_text(tmp_path / "claims")
    checkpoints = claims / "out/model/checkpoints"
    process = start_supervised(wanted(steps=100_000), claims, [])
    try:
        deadline = time.monotonic() + 120
        while not (checkpoints / "journal.jsonl").exists() or not losses(claims):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        assert ended(process) == 143
    finally:
        process.kill()
    assert max(CheckpointFolder(checkpoints, 2).steps()) == max(losses(claims))


def test_a_job_that_cannot_run_is_not_tried_again(tmp_path: Path) -> None:
    claims = with_text(tmp_path / "claims")
    assert ended(start_supervised(wanted(deviceMemory="1Ki"), claims, [])) == 2
    assert not (claims / "supervisor.txt").read_text()
