"""Of two starts of one run that reach the same disk the later one writes, and the earlier one ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.free_port import free_port
from tests.training.pod import Pod
from tests.training.small import with_text
from tests.training.states import write_state

from busbar.workloads.training import fence as fences
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.errors import CheckpointError, Superseded
from busbar.workloads.training.fence import Fence, Turn

STEPS = 150
ATTEMPT, REPLACED, NEXT = Turn(2), Turn(2, 1), Turn(3)


def taken(folder: Path, turn: Turn, run: str = "one") -> Fence:
    fence = Fence(folder, run, turn)
    fence.take()
    return fence


@pytest.mark.parametrize(("earlier", "later"), [(ATTEMPT, NEXT), (ATTEMPT, REPLACED), (REPLACED, NEXT)])
def test_the_later_start_shuts_the_earlier_one_out(earlier: Turn, later: Turn, tmp_path: Path) -> None:
    first = taken(tmp_path, earlier)
    first.check()
    second = taken(tmp_path, later)
    second.check()
    with pytest.raises(
        Superseded, match=f"^{later} of this run writes to .*, and this is {earlier}: it ends"
    ):
        first.check()
    with pytest.raises(Superseded):
        taken(tmp_path, earlier)
    second.check()  # what was refused has changed nothing


def test_a_start_may_begin_again(tmp_path: Path) -> None:
    first, again = taken(tmp_path, ATTEMPT), taken(tmp_path, ATTEMPT)
    first.check()
    again.check()


def test_ranks_that_move_no_folders_are_not_asked(tmp_path: Path) -> None:
    taken(tmp_path, NEXT)
    Fence(tmp_path, "one", ATTEMPT).check()


@pytest.mark.parametrize(
    "found", ["", "{", "[]", '{"run": "another", "attempt": 9, "replacement": 0}', '{"run": "one"}']
)
def test_what_says_nothing_of_this_run_stops_nobody(found: str, tmp_path: Path) -> None:
    (tmp_path / fences.NAME).write_text(found)
    taken(tmp_path, ATTEMPT).check()


def test_a_loop_looks_every_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    fence = taken(tmp_path, ATTEMPT)
    fence.check_at_times()
    taken(tmp_path, NEXT)
    now += fences.AGAIN_S - 1
    fence.check_at_times()
    now += 1
    with pytest.raises(Superseded):
        fence.check_at_times()


def test_nothing_is_committed_or_removed_by_a_start_that_is_shut_out(tmp_path: Path) -> None:
    state = {"weights/a": torch.arange(100, dtype=torch.float32)}
    fence = taken(tmp_path, ATTEMPT)
    folder = CheckpointFolder(tmp_path, 1, confirm=fence.check)
    write_state(folder, 4, state, {})
    taken(tmp_path, NEXT)
    with pytest.raises(CheckpointError, match="attempt 3 of this run writes"):
        write_state(folder, 8, state, {})
    assert folder.steps() == [4]
    write_state(CheckpointFolder(tmp_path, 5), 12, state, {})
    with pytest.raises(Superseded):
        folder.remove_old(12)
    assert folder.steps() == [12, 4]
    assert not list(tmp_path.glob(".tmp-step*"))


@pytest.fixture(scope="module")
def overtaken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A pod that stands still in mid-training, as one whose node is cut off; its job ends in another, and it wakes up."""
    folder = with_text(tmp_path_factory.mktemp("overtaken"))
    first = Pod(folder, 1, free_port(), {"everySteps": 5}, steps=STEPS)
    first.wait_for_step(20)
    process = first.process.pid
    (trainer,) = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    both = [process, int(trainer)]
    for each in both:
        os.kill(each, signal.SIGSTOP)
    second = Pod(folder, 2, free_port(), steps=STEPS)
    facts: dict[str, Any] = {"second": second.end(), "written": contents(folder)}
    for each in both:
        os.kill(each, signal.SIGCONT)
    facts["first"] = first.end()
    facts["left"] = contents(folder)
    return facts


def contents(folder: Path) -> dict[str, bytes]:
    """All that counts: the result and the checkpoints."""
    files = [*(folder / "model").rglob("*"), *(folder / "checkpoints").glob("step-*/*")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()}


def test_a_pod_that_was_cut_off_ends_when_it_sees_its_successor(overtaken: dict[str, Any]) -> None:
    code, output = overtaken["first"]
    assert code == 1, output
    assert "attempt 2 of this run writes to" in output
    assert overtaken["second"][0] == 0, overtaken["second"][1]


def test_it_changes_nothing_that_counts(overtaken: dict[str, Any]) -> None:
    assert overtaken["written"]["model/busbar.json"]
    assert json.loads(overtaken["written"]["model/busbar.json"])["steps"] == STEPS
    assert overtaken["left"] == overtaken["written"]
