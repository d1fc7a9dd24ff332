"""A consistent copy of the state that is taken while training goes on.

Weights and optimizer state do not change in forward and backward passes, so a thread copies them then, block by block
in forward order, into buffers that the writers give back. An update that reaches a group of which blocks are not
copied yet has them copied next, and waits for that alone. With as many buffers as blocks the copy runs at the speed
of memory; with fewer at that of the disk, once they are full. Two are enough.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from busbar.workloads.machine.streams import Event, Stream
from busbar.workloads.training.errors import CheckpointError
from busbar.workloads.training.state_file import Block


class Abandoned(Exception):
    """The running write was cancelled in favour of a newer state."""


@dataclass(frozen=True)
class Source:
    """What is copied, and through which buffers."""

    fill: Callable[[int, torch.Tensor], object]  # copies what stands at that byte of the data section
    size: int  # of the data section
    block_bytes: int
    groups: Mapping[str, range]  # the blocks of each group
    copies: Stream
    free: queue.LifoQueue[torch.Tensor]  # the last one returned first: its bytes are in the CPU's caches

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block_bytes)


class Capture:
    """One copy: a thread makes it, writers `take` its blocks, and updates `wait_for` their groups."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._changed = threading.Condition()
        self._pending = set(range(source.blocks))
        self._next = 0  # no pending block is before it
        self._wanted: range | None = None  # an update waits for these
        self._copied: Event | None = None  # all copies that were begun so far
        self._cancelled = False
        self._ready: queue.SimpleQueue[Block | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._copy, name="checkpoint-copier", daemon=True)
        self._abandoned = False
        self._failure: BaseException | None = None
        self.taken = 0  # bytes that the writers are done with
        self.waited_s = 0.0  # that updates lost

    def start(self) -> None:
        self._thread.start()

    def wait_for(self, group: str) -> Event | None:
        """Wait until the copies of a group's blocks are begun; returns the event of their end, if there is one."""
        blocks = self._source.groups[group]
        with self._changed:
            if self._is_copied(blocks):
                return self._copied
            started = time.monotonic()
            self._wanted = blocks
            self._changed.wait_for(lambda: self._is_copied(blocks))
            self._wanted = None
            self.waited_s += time.monotonic() - started
            return self._copied

    def _is_copied(self, blocks: range) -> bool:
        return self._cancelled or self._next >= blocks.stop or self._pending.isdisjoint(blocks)

    def take(self) -> Block | None:
        """The next block that is copied or being copied; None at the end. Raises Abandoned, CheckpointError."""
        block = self._ready.get()
        if block is None:
            self._ready.put(None)  # for the next thread
        if self._abandoned:
            if block is not None:
                self._source.free.put(block.buffer)
            raise Abandoned
        if block is None and self._failure is not None:
            raise CheckpointError(f"the state could not be copied: {self._failure!r}") from self._failure
        return block

    def give_back(self, block: Block) -> None:
        with self._changed:
            self.taken += block.data.numel()
        self._source.free.put(block.buffer)

    def abandon(self) -> None:
        """Have the writers stop: a newer state will be written."""
        self._abandoned = True
        self.cancel()

    def cancel(self) -> None:
        """End the copy where it is. Updates go on; buffers that no writer has taken are free again."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
        self._free_ready()

    def finish(self) -> None:
        """Wait for the copying thread, once all writers have ended; afterwards all buffers are free."""
        self.cancel()
        self._thread.join()
        self._free_ready()

    def _free_ready(self) -> None:
        try:
            while (block := self._ready.get_nowait()) is not None:
                self._source.free.put(block.buffer)
            self._ready.put(None)
        except queue.Empty:
            return

    def _copy(self) -> None:
        try:
            while not self._cancelled and self._pending:
                self._copy_one(self._source.free.get())
        except BaseException as problem:
            self._failure = problem
            self.cancel()
        finally:
            self._ready.put(None)

    def _copy_one(self, buffer: torch.Tensor) -> None:
        index = self._choose()
        if index is None:
            self._source.free.put(buffer)
            return
        start = index * self._source.block_bytes
        data = buffer[: min(self._source.block_bytes, self._source.size - start)]
        try:
            self._source.copies.submit(lambda: self._source.fill(start, data))
            copied = self._source.copies.record()
        except BaseException:
            self._source.free.put(buffer)
            raise
        self._ready.put(Block(start, data, copied, buffer))
        with self._changed:
            self._copied = copied
            self._pending.discard(index)
            while self._next not in self._pending and self._next < self._source.blocks:
                self._next += 1
            self._changed.notify_all()

    def _choose(self) -> int | None:
        """A block that an update waits for, else the first one that is missing; None if the copy was cancelled."""
        with self._changed:
            if self._cancelled:
                return None
            wanted = [index for index in self._wanted or () if index in self._pending]
            return wanted[0] if wanted else self._next
