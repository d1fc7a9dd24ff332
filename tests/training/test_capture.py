"""A copy of the state is that of one step although updates go on: what they would change is copied first."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from busbar.workloads.machine.streams import CallerStream
from busbar.workloads.training.capture import Abandoned, Capture, Source
from busbar.workloads.training.errors import CheckpointError

BLOCKS, GROUPS = 6, {"embedding": range(2), "block-0": range(1, 4), "head": range(4, 6)}


@dataclass
class Memory:
    """Six blocks of one byte, of three groups, and buffers for `buffers` of them."""

    buffers: int
    state: torch.Tensor = field(default_factory=lambda: torch.zeros(BLOCKS, dtype=torch.uint8))
    order: list[int] = field(default_factory=list)  # in which blocks were copied
    gate: Callable[[int], object] = lambda index: None
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.free: queue.LifoQueue[torch.Tensor] = queue.LifoQueue()
        for _ in range(self.buffers):
            self.free.put(torch.zeros(1, dtype=torch.uint8))

    def fill(self, index: int, data: torch.Tensor) -> None:
        self.gate(index)
        if self.failure is not None:
            raise self.failure
        self.order.append(index)
        data.copy_(self.state[index : index + 1])

    def capture(self) -> Capture:
        begun = Capture(Source(self.fill, BLOCKS, 1, GROUPS, CallerStream(), self.free))
        begun.start()
        return begun


def write_all(capture: Capture, written: dict[int, int]) -> None:
    while (block := capture.take()) is not None:
        written[block.start] = int(block.data[0])
        capture.give_back(block)


def write_in_a_thread(capture: Capture, written: dict[int, int]) -> threading.Thread:
    thread = threading.Thread(target=write_all, args=(capture, written))
    thread.start()
    return thread


@pytest.mark.parametrize("buffers", [1, 2, BLOCKS])
def test_what_an_update_changes_was_copied_before(buffers: int) -> None:
    memory, written = Memory(buffers), dict[int, int]()
    capture = memory.capture()
    writer = write_in_a_thread(capture, written)
    for name, blocks in GROUPS.items():
        capture.wait_for(name)
        memory.state[blocks.start : blocks.stop] = 1
    writer.join(60)
    capture.finish()
    assert written == dict.fromkeys(range(BLOCKS), 0)
    assert memory.free.qsize() == buffers
    assert capture.taken == BLOCKS


def test_an_update_that_does_not_come_in_order_has_its_group_copied_next() -> None:
    asked = threading.Event()
    memory = Memory(BLOCKS, gate=lambda index: asked.wait(60))
    capture = memory.capture()  # stands at block 0
    waiting = threading.Thread(target=capture.wait_for, args=("head",))
    waiting.start()
    while capture._wanted is None:  # until it waits
        waiting.join(0.001)
    asked.set()
    waiting.join(60)
    write_all(capture, {})
    capture.finish()
    assert memory.order == [0, 4, 5, 1, 2, 3]
    assert capture.waited_s > 0


def test_a_group_that_is_copied_is_not_waited_for() -> None:
    memory = Memory(BLOCKS)
    capture = memory.capture()
    write_all(capture, {})
    capture.wait_for("head")
    capture.finish()
    assert capture.waited_s == 0


def test_a_write_that_ended_early_holds_no_update_up_and_keeps_no_buffer() -> None:
    memory = Memory(2)
    capture = memory.capture()
    block = capture.take()
    assert block is not None
    waiting = threading.Thread(target=capture.wait_for, args=("head",))
    waiting.start()
    capture.give_back(block)
    capture.finish()
    waiting.join(60)
    assert not waiting.is_alive()
    assert memory.free.qsize() == 2


def test_all_writers_of_an_abandoned_copy_are_told() -> None:
    memory = Memory(2)
    capture = memory.capture()
    told: list[str] = []

    def work() -> None:
        try:
            write_all(capture, {})
        except Abandoned:
            told.append("abandoned")

    held = capture.take()
    assert held is not None
    capture.abandon()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    capture.give_back(held)
    capture.finish()
    assert told == ["abandoned"] * 3
    assert memory.free.qsize() == 2


def test_a_copy_that_fails_is_an_error_of_the_checkpoint_and_holds_no_update_up() -> None:
    memory = Memory(2, failure=RuntimeError("the device fell off the bus"))
    capture = memory.capture()
    with pytest.raises(CheckpointError, match=r"could not be copied.*fell off the bus"):
        write_all(capture, {})
    capture.wait_for("head")
    capture.finish()
    assert memory.free.qsize() == 2
