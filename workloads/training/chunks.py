"""Runs of a group's optimizer state: the unit that is placed, loaded, updated and stored.

A chunk's fp32 tensors lie side by side, so that one chunk is one copy:

    float32     [ m | v ]
    bfloat16    [ m | v | low half of the master weight, int16 ]

It lives on the device, on the host or on a disk. From the disk, too, it is loaded and stored by a queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from busbar.workloads.machine.direct_file import ScratchFile
from busbar.workloads.machine.streams import Stream
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.disk_tensor import DiskTensor, whole_pages
from busbar.workloads.training.groups import FlatGroup, Piece
from busbar.workloads.training.plan import MemoryPlan, chunk_sizes

State = TypeVar("State", torch.Tensor, DiskTensor)


@dataclass(frozen=True)
class Chunk:
    """A run of one group, its pieces, and where its state lives."""

    flat: FlatGroup
    start: int  # in the group, elements
    length: int
    pieces: tuple[Piece, ...]
    state: torch.Tensor | DiskTensor  # flat, as fp32
    resident: bool  # it is updated where it is

    def load(self, queue: Stream, target: torch.Tensor) -> None:
        """Queue a copy of the state to `target`."""
        state = self.state
        if isinstance(state, DiskTensor):
            queue.submit(lambda: state.read(target))
        else:
            queue.copy(target, state)

    def store(self, queue: Stream, source: torch.Tensor) -> None:
        """Queue that the state becomes `source`."""
        state = self.state
        if isinstance(state, DiskTensor):
            queue.submit(lambda: state.write(source))
        else:
            queue.copy(state, source)

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This chunk of a buffer of this rank's slice of the group."""
        return flat[self.start - self.flat.start :][: self.length]

    def parts(self, buffer: State, piece: Piece) -> list[State]:
        """m, v and, under bfloat16, the low half of the master weight of `piece` as views of `buffer`."""
        found = [buffer[part * self.length + piece.offset :][: piece.length] for part in range(2)]
        if buffer.numel() > 2 * self.length:
            low = buffer[2 * self.length :].view(torch.int16)
            found.append(low[piece.offset :][: piece.length])
        return found

    def kept_parts(self, piece: Piece) -> Sequence[torch.Tensor | DiskTensor]:
        """The same of the state where it lives."""
        state: Any = self.state  # which is cut alike wherever it is
        return self.parts(state, piece)


def state_elements(length: int, dtype: str) -> int:
    """Size of the state of `length` parameters, in fp32 elements."""
    return 2 * length if dtype == "float32" else 2 * length + length // 2


class Homes:
    """Where the state of a run's chunks lives, as the plan says; `disk` takes that of `plan.on_disk`."""

    def __init__(self, plan: MemoryPlan, device: Arena, host: Arena, disk: ScratchFile | None = None) -> None:
        self._plan, self._device, self._host, self._disk = plan, device, host, disk
        self._written = 0  # bytes of `disk` that have an owner

    def cut(self, flat: FlatGroup) -> Iterator[Chunk]:
        """The chunks of one group, or of this rank's slice of it."""
        name = flat.group.name
        resident = name not in self._plan.offloaded and name not in self._plan.on_disk
        start = flat.start  # of this rank's slice, which is all of the group where there is one rank
        for length in chunk_sizes(flat.length, self._plan.chunk_parameters):
            state = self._carve(name, state_elements(length, self._plan.dtype))
            yield Chunk(flat, start, length, tuple(flat.group.pieces(start, length)), state, resident)
            start += length

    def _carve(self, group: str, elements: int) -> torch.Tensor | DiskTensor:
        if group in self._plan.on_disk:
            assert self._disk is not None
            begin = self._written
            self._written += whole_pages(elements * 4)  # no two chunks share a page
            return DiskTensor(self._disk, begin, elements, torch.float32)
        arena = self._host if group in self._plan.offloaded else self._device
        return arena.carve("optimizer", elements, torch.float32)
