"""Slots on the device that the weights of a model's blocks pass through, from wherever they have their home.

A block's weights come into a slot before they are computed with. They come from the host (`block_slots`), or from the
ranks of a gang that have a slice of them each (`peer_slots`). A slot keeps what it has until another block needs it, so
the last blocks of a forward pass are still there when backward begins, and the first ones when the next forward pass
does: the slot that is needed last is given away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from busbar.workloads.machine.streams import Event


@dataclass
class Slot:
    room: torch.Tensor  # bytes on the device
    block: int | None = None  # whose weights it has, or will have when it is loaded
    loaded: Event | None = None
    used: Event | None = None  # the last pass through it is over


@dataclass(frozen=True)
class Weight:
    """A parameter at home, and where it stands in a slot."""

    parameter: nn.Parameter
    home: torch.Tensor
    gradient: torch.Tensor | None  # at home; None: it is not trained, or has its gradient elsewhere
    offset: int  # bytes in a slot
    start: int = 0  # elements in the gradients of its group

    def in_slot(self, room: torch.Tensor) -> torch.Tensor:
        found = room[self.offset :][: self.home.numel() * self.home.itemsize]
        return found.view(self.home.dtype).view(self.home.shape)

    def in_gradients(self, room: torch.Tensor) -> torch.Tensor:
        return room[self.start :][: self.home.numel()].view(self.home.shape)

    def go(self, weights: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Have the parameter refer to these."""
        self.parameter.grad = None  # which has to be where the weights are
        self.parameter.data = weights
        self.parameter.grad = gradient

    def go_home(self) -> None:
        self.go(self.home, self.gradient)


def find(slots: Sequence[Slot], number: int, *, forward: bool, busy: Slot | None = None) -> Slot:
    """The slot that has the weights of a block, or the one to load them into; never `busy`, if it has others."""
    for slot in slots:
        if slot.block == number:
            return slot
    free = [slot for slot in slots if slot is not busy]
    return next((each for each in free if each.block is None), None) or _needed_last(free, forward=forward)


def _needed_last(slots: Sequence[Slot], *, forward: bool) -> Slot:
    """Forward passes go up and backward passes down, one after the other."""
    return (min if forward else max)(slots, key=lambda slot: -1 if slot.block is None else slot.block)
