"""Runs of a group's optimizer state: the unit that is placed, loaded, updated and stored.

A chunk's fp32 tensors lie side by side, so that one chunk is one copy:

    float32     [ m | v ]
    bfloat16    [ m | v | low half of the master weight, int16 ]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from busbar.workloads.training.arena import Arena
from busbar.workloads.training.groups import FlatGroup, Piece
from busbar.workloads.training.plan import MemoryPlan, chunk_sizes


@dataclass(frozen=True)
class Chunk:
    """A run of one group, its pieces, and where its state lives."""

    flat: FlatGroup
    start: int  # in the group, elements
    length: int
    pieces: tuple[Piece, ...]
    state: torch.Tensor  # flat, as fp32, on the device when resident, else on the host
    resident: bool

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This chunk of a buffer of this rank's slice of the group."""
        return flat[self.start - self.flat.start :][: self.length]

    def parts(self, buffer: torch.Tensor, piece: Piece) -> list[torch.Tensor]:
        """m, v and, under bfloat16, the low half of the master weight of `piece` as views of `buffer`."""
        found = [buffer[part * self.length + piece.offset :][: piece.length] for part in range(2)]
        if buffer.numel() > 2 * self.length:
            low = buffer[2 * self.length :].view(torch.int16)
            found.append(low[piece.offset :][: piece.length])
        return found


def state_elements(length: int, dtype: str) -> int:
    """Size of the state of `length` parameters, in fp32 elements."""
    return 2 * length if dtype == "float32" else 2 * length + length // 2


def cut(flat: FlatGroup, plan: MemoryPlan, device: Arena, host: Arena) -> Iterator[Chunk]:
    """The chunks of one group, or of this rank's slice of it, with their state where the plan says."""
    resident = flat.group.name not in plan.offloaded
    arena = device if resident else host
    start = flat.start  # of this rank's slice, which is all of the group where there is one rank
    for length in chunk_sizes(flat.length, plan.chunk_parameters):
        state = arena.carve("optimizer", state_elements(length, plan.dtype), torch.float32)
        yield Chunk(flat, start, length, tuple(flat.group.pieces(start, length)), state, resident)
        start += length
