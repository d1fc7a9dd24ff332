"""One file of checkpointed state: blocks arrive in any order, and threads check and write them.

Each thread takes a block, looks whether its numbers are finite, computes the CRC-32 of every tensor's part in it,
and writes it to its place. At the end the parts' checksums are joined to one per tensor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from busbar.workloads.machine.checksum import combine, crc32
from busbar.workloads.machine.direct_file import DirectFile
from busbar.workloads.machine.streams import Event
from busbar.workloads.training.errors import CheckpointError, NotFinite
from busbar.workloads.training.layout import Entry, Layout

WRITERS = 4  # threads: a disk takes several writes at once, and checksums are computed beside them


@dataclass(frozen=True)
class Block:
    """Bytes of the data section from `start` on, in a buffer; `copied` happens when they are there."""

    start: int
    data: torch.Tensor  # uint8
    copied: Event
    buffer: torch.Tensor  # to give back


class Blocks(Protocol):
    """Where the blocks come from; threads share it."""

    def take(self) -> Block | None:
        """The next one, once there is one; None at the end."""

    def give_back(self, block: Block) -> None:
        """Its buffer may be filled again."""


def write_state(
    path: Path,
    step: int,
    layout: Layout,
    blocks: Blocks,
    note: Callable[[str], object] = lambda text: None,
    wrote: Callable[[int, float], object] = lambda size, seconds: None,
) -> dict[str, int]:
    """Write one file of state, durably; returns the checksum of each tensor. Raises CheckpointError or OSError.

    Args:
        wrote: told the bytes, and the seconds in which the disk had some of them to write.
    """
    header = layout.header()
    with DirectFile(path, len(header) + layout.size, note) as file:
        file.write(torch.frombuffer(bytearray(header), dtype=torch.uint8), 0)
        writing = _Writing(file, len(header), step, layout, blocks)
        writing.go()
    wrote(layout.size, file.busy.seconds)
    return writing.checksums()


class _Writing:
    """The threads that write one file, and what they found."""

    def __init__(self, file: DirectFile, data_start: int, step: int, layout: Layout, blocks: Blocks) -> None:
        self._file, self._data_start, self._step = file, data_start, step
        self._layout, self._blocks = layout, blocks
        self._parts: dict[str, list[tuple[int, int, int]]] = {entry.name: [] for entry in layout.entries}
        self._written: list[int] = []
        self._failures: list[BaseException] = []

    def go(self) -> None:
        """Write all blocks. Raises what the first thread that failed raised."""
        others = [
            threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
            for _ in range(WRITERS - 1)
        ]
        for thread in others:
            thread.start()
        self._work()
        for thread in others:
            thread.join()
        if self._failures:
            raise self._failures[0]
        if sum(self._written) != self._layout.size:
            raise CheckpointError(
                f"checkpoint of step {self._step}: {sum(self._written)} of {self._layout.size} bytes came"
            )

    def _work(self) -> None:
        try:
            while not self._failures and (block := self._blocks.take()) is not None:
                try:
                    self._write(block)
                finally:
                    self._blocks.give_back(block)
        except BaseException as problem:
            self._failures.append(problem)

    def _write(self, block: Block) -> None:
        block.copied.wait()
        for entry, start, part in self._layout.parts(block.start, block.data):
            if not is_finite(part.view(entry.dtype)):
                raise NotFinite(
                    f"checkpoint of step {self._step} is not written: {entry.name} holds numbers that are not "
                    "finite; the checkpoints before it stay"
                )
            self._parts[entry.name].append((start, part.numel(), crc32(part.numpy().data)))
        self._file.write(block.data, self._data_start + block.start)
        self._written.append(block.data.numel())

    def checksums(self) -> dict[str, int]:
        """The CRC-32 of each tensor, of its parts in their order."""
        return {entry.name: self._checksum(entry) for entry in self._layout.entries}

    def _checksum(self, entry: Entry) -> int:
        whole, position = 0, 0
        for start, length, part in sorted(self._parts[entry.name]):
            if start != position:
                raise CheckpointError(
                    f"checkpoint of step {self._step}: bytes of {entry.name} came twice or never"
                )
            whole, position = combine(whole, part, length), start + length
        return whole


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is a finite number; needs no memory beside the tensor."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if math.isfinite(
        float(tensor.sum())
    ):  # the fastest pass over it; one number that is not finite makes it so
        return True
    low, high = torch.aminmax(tensor)  # finite numbers may have an infinite sum
    return math.isfinite(float(low)) and math.isfinite(float(high))
