"""Runs of a group's optimizer state: the unit that is placed, loaded, updated and stored.

The tensors of a chunk's state (see `moments`) lie side by side, so that one chunk is one copy:

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
from busbar.workloads.training.demand import chunk_sizes
from busbar.workloads.training.disk_tensor import DiskTensor, whole_pages
from busbar.workloads.training.groups import FlatGroup, Piece
from busbar.workloads.training.moments import StatePart, state_parts
from busbar.workloads.training.plan import MemoryPlan

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
    parts: tuple[StatePart, ...]

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

    def tensors(self, buffer: State) -> dict[str, State]:
        """The tensors of the state in `buffer`, by kind."""
        found, begin, data = {}, 0, buffer.view(torch.uint8)
        for part in self.parts:
            end = begin + part.elements(self.length) * part.dtype.itemsize
            found[part.kind] = data[begin:end].view(part.dtype)
            begin = end
        return found

    def atoms(self) -> Iterator[tuple[str, torch.Tensor | DiskTensor, slice]]:
        """(name, tensor, extent in the whole parameter's) of the state where it lives."""
        state: Any = self.state  # which is cut alike wherever it is
        kept = self.tensors(state)
        for piece in self.pieces:
            for part in self.parts:
                first, begin = piece.offset // part.per, piece.start // part.per
                size = part.elements(piece.length)
                name = f"{part.kind}/{piece.member.name}"
                yield name, kept[part.kind][first : first + size], slice(begin, begin + size)


def state_elements(length: int, parts: Sequence[StatePart]) -> int:
    """Size of the state of `length` parameters, in elements of fp32."""
    return sum(part.elements(length) * part.dtype.itemsize for part in parts) // 4


class Homes:
    """Where the state of a run's chunks lives, as the plan says; `disk` takes that of `plan.on_disk`."""

    def __init__(self, plan: MemoryPlan, device: Arena, host: Arena, disk: ScratchFile | None = None) -> None:
        self._plan, self._device, self._host, self._disk = plan, device, host, disk
        self._written = 0  # bytes of `disk` that have an owner
        self.parts = state_parts(plan.state, plan.dtype)

    def cut(self, flat: FlatGroup) -> Iterator[Chunk]:
        """The chunks of one group, or of this rank's slice of it."""
        name = flat.group.name
        resident = name not in self._plan.offloaded and name not in self._plan.on_disk
        start = flat.start  # of this rank's slice, which is all of the group where there is one rank
        for length in chunk_sizes(flat.length, self._plan.chunk_parameters):
            state = self._carve(name, state_elements(length, self.parts))
            pieces = tuple(flat.group.pieces(start, length))
            yield Chunk(flat, start, length, pieces, state, resident, self.parts)
            start += length

    def _carve(self, group: str, elements: int) -> torch.Tensor | DiskTensor:
        if group in self._plan.on_disk:
            assert self._disk is not None
            begin = self._written
            self._written += whole_pages(elements * 4)  # no two chunks share a page
            return DiskTensor(self._disk, begin, elements, torch.float32)
        arena = self._host if group in self._plan.offloaded else self._device
        return arena.carve("optimizer", elements, torch.float32)
