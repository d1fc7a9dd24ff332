"""Inputs of blocks that wait for backward in host memory.

With recomputed activations (`recompute`) the inputs of all blocks are what grows with the depth of a model. Here they
leave the device while their block is computed, and come back when backward is about to reach it:

    forward    block n begins: its input -> host, beside its computation
    backward   block n begins: the input of the block below, n - 1 -> device, beside it

So the device has the inputs of two blocks at a time. That of the last block stays, as backward begins with it. Moved is
what a gradient goes back to; masks and positions, which all blocks share, stay. The bytes come back as they went, so no bit
of a loss or gradient changes.

Both directions have queues of their own (see `streams`): a load of optimizer state may wait for an update, and an input
behind it would wait for it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

import torch
from torch.autograd.graph import saved_tensors_hooks

from busbar.workloads.machine.streams import CallerStream, Event, Streams
from busbar.workloads.training.demand import aligned
from busbar.workloads.training.errors import OutOfArena
from busbar.workloads.training.step_clock import StepClock


@dataclass
class _Moved:
    """An input on the host."""

    home: torch.Tensor
    device: torch.device
    stored: Event
    there: torch.Tensor | None = None  # where it is on the device again, or will be
    loaded: Event | None = None


class InputSwap:
    """The inputs of a model's blocks, of one micro-batch at a time.

    Args:
        room: bytes on the host.
        last: the number of the last block.
    """

    def __init__(self, room: torch.Tensor, last: int, streams: Streams, clock: StepClock) -> None:
        self.room, self._last, self._streams, self._clock = room, last, streams, clock
        self._moved: dict[int, list[_Moved]] = {}  # by block
        self._leaving: list[tuple[torch.Tensor, Event]] = []  # not free on the device before the event
        self.used = 0  # bytes of the room, by this micro-batch
        self._newest = last  # the block whose input was moved last

    @contextmanager
    def moving(self, number: int, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """What autograd saves of `inputs` meanwhile, those of block `number`, goes to the host."""
        if number <= self._newest:  # the first of a micro-batch; a step may leave blocks out
            self._moved.clear()
            self.used = 0
        self._newest = number
        for _, stored in self._leaving:
            self._streams.compute.wait(stored)  # long ago: the block before this one was computed meanwhile
        self._leaving.clear()
        moves = WeakSet[torch.UntypedStorage]()  # autograd keeps it as long as what it makes of them
        for each in inputs if number != self._last else ():
            if each.requires_grad and each.is_contiguous():
                moves.add(each.untyped_storage())
        with saved_tensors_hooks(partial(self._move, number, moves), partial(self._bring_back, number)):
            yield

    def _move(
        self, number: int, moves: WeakSet[torch.UntypedStorage], tensor: torch.Tensor
    ) -> torch.Tensor | _Moved:
        """What autograd keeps of a tensor."""
        moves_it, tensor = tensor.untyped_storage() in moves, tensor.detach()
        if not moves_it:
            return tensor
        size, store = tensor.numel() * tensor.itemsize, self._streams.store
        start, self.used = self.used, self.used + aligned(size)
        if self.used > self.room.numel():
            raise OutOfArena(
                f"inputs of the blocks need {self.used} bytes of the host, and their plan has {self.room.numel()}"
            )
        home = self.room[start:][:size].view(tensor.dtype).view(tensor.shape)
        store.wait(self._streams.compute.record())
        store.copy(home, tensor)
        moved = _Moved(home, tensor.device, store.record())
        self._leaving.append((tensor, moved.stored))
        self._moved.setdefault(number, []).append(moved)
        return moved

    def _bring_back(self, number: int, kept: torch.Tensor | _Moved) -> torch.Tensor:
        """What `_move` made something of, for the backward pass of block `number`."""
        found = kept if isinstance(kept, torch.Tensor) else self._arrived(kept)
        below = max((each for each in self._moved if each < number), default=None)
        for moved in () if below is None else self._moved[below]:
            self._load(moved)
        return found

    def _arrived(self, moved: _Moved) -> torch.Tensor:
        self._clock.ended("backward")
        there, loaded = self._load(moved)
        self._streams.compute.wait(loaded)
        self._clock.ended("load")
        moved.there = moved.loaded = None  # from now on it is the caller's
        return there

    def _load(self, moved: _Moved) -> tuple[torch.Tensor, Event]:
        if moved.there is None or moved.loaded is None:
            load = self._streams.load
            moved.there = torch.empty_like(moved.home, device=moved.device)
            load.wait(self._streams.compute.record())  # what had this memory before
            load.wait(moved.stored)
            load.copy(moved.there, moved.home)
            moved.loaded = load.record()
        return moved.there, moved.loaded

    def close(self) -> None:
        self._streams.close()


def at_once(last: int) -> InputSwap:
    """One that copies nothing beside anything, with room for any model; for fake tensors, of which none takes memory."""
    caller = CallerStream()
    room = torch.empty(2**60, dtype=torch.uint8, device="cpu")
    return InputSwap(room, last, Streams(caller, caller, caller, caller), StepClock(torch.device("cpu")))
