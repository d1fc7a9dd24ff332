"""Weights of which each rank keeps its slice alone (ZeRO stage 3): a block comes into a slot from all ranks.

    forward    gather the block's weights into a slot, those that are trained and those that are not; compute; let them go
    backward   when the gradient of the block's output is there, gather them again, unless the slot has them still

What autograd keeps of a block for backward refers to the slot, which other blocks use in between. So a weight is not
kept itself but as its place in the slot, and is found there again when backward asks for it. With recomputed
activations nothing of it is kept: the block is computed again in the same stay.

What stands around the blocks is gathered once per step, when the forward pass reaches it, and stays: a tied table is
used at both ends. A parameter that is in no slot refers to a number that is not one, so that a weight that was not
gathered cannot go unnoticed.

All ranks gather the same blocks in the same order. One that has no micro-batch when others have one makes a forward
pass whose result nobody uses (see `trainer`), and gathers what their backward passes come through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from busbar.workloads.training.arena import Arena
from busbar.workloads.training.demand import aligned
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.first_weights import without_memory
from busbar.workloads.training.gradient_shards import when_backward_comes
from busbar.workloads.training.groups import FlatGroup, FrozenBlock, blocks
from busbar.workloads.training.input_swap import InputSwap
from busbar.workloads.training.ranks import Ranks
from busbar.workloads.training.recompute import run_again_in_backward
from busbar.workloads.training.weight_slots import Slot, find

Forward = Callable[..., Any]
SLOTS = 1  # gathering waits for the other ranks, and nothing is computed meanwhile


@dataclass(frozen=True)
class _InSlot:
    """What autograd keeps instead of a weight, or of a view of it."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # bytes in the slot

    def of(self, room: torch.Tensor) -> torch.Tensor:
        start = (room.storage_offset() + self.offset) // self.dtype.itemsize
        return room.view(self.dtype).as_strided(self.size, self.stride, start)


@dataclass(frozen=True)
class _Block:
    """What a slot takes: the group that is trained, and behind it what is not."""

    flat: FlatGroup | None
    frozen: FrozenBlock | None

    @property
    def trained_bytes(self) -> int:
        return 0 if self.flat is None else aligned(_size(self.flat))

    @property
    def size(self) -> int:
        return self.trained_bytes + (0 if self.frozen is None else self.frozen.size)

    def trained(self, room: torch.Tensor) -> torch.Tensor:
        """Where a slot has the group."""
        assert self.flat is not None
        return room[: _size(self.flat)].view(self.flat.weights.dtype)

    def not_trained(self, room: torch.Tensor) -> torch.Tensor:
        assert self.frozen is not None
        return room[self.trained_bytes :][: self.frozen.size]

    def views(self, room: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter and its weights in a slot."""
        if self.flat is not None:
            for member in self.flat.group.members:
                yield member.parameter, member.view(self.trained(room))
        if self.frozen is not None:
            for parameter, start in self.frozen.parameters:
                yield parameter, self.frozen.view(parameter, start, self.not_trained(room))


class PeerSlots:
    """The whole weights on one rank, a few at a time. It takes over the blocks' `forward`."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[FlatGroup],
        ranks: Ranks,
        arena: Arena,
        *,
        recomputes: bool,
        swap: InputSwap | None = None,
        frozen: Mapping[int, FrozenBlock] | None = None,
    ) -> None:
        """`frozen`: the blocks' weights that are not trained, by the blocks' numbers."""
        self._groups, self._ranks, self._recomputes, self._swap = groups, ranks, recomputes, swap
        inner, frozen = blocks(model), frozen or {}
        numbers = {f"block-{number}": number for number in range(len(inner))}
        trained = {numbers[flat.group.name]: flat for flat in groups if flat.group.name in numbers}
        self._by_number = {
            number: _Block(trained.get(number), frozen.get(number))
            for number in range(len(inner))
            if number in trained or number in frozen
        }
        ends = {"embedding": -1, "head": len(inner)}
        self._places = [{**numbers, **ends}[flat.group.name] for flat in groups]
        largest = max((block.size for block in self._by_number.values()), default=0)
        self._slots = [Slot(arena.carve("slots", largest, torch.uint8)) for _ in range(SLOTS)]
        self._outer = {
            flat.group.name: arena.carve("slots", flat.group.elements, flat.weights.dtype)
            for flat in groups
            if flat.group.name not in numbers
        }
        self._owner = {
            parameter: number
            for number, block in self._by_number.items()
            for parameter, _ in block.views(self._slots[0].room)
        }
        self._expected = 0  # the block that a forward pass comes to next
        self.sent_bytes = 0  # handed over for other ranks, by this one
        for number, block in enumerate(inner):
            if number in self._by_number:
                setattr(block, "forward", self._through_a_slot(number, block.forward))  # noqa: B010
            if number in self._by_number and number not in trained:
                when_backward_comes(block, partial(self._hold, number, forward=False))
        self.refresh()

    def refresh(self) -> None:
        """All weights have changed, and are whole on the ranks together."""
        for flat in self._groups:
            self.updated(flat)

    def updated(self, flat: FlatGroup) -> None:
        """A group's weights have changed on all ranks: gather it, or forget that it was gathered."""
        copy = self._outer.get(flat.group.name)
        if copy is None:
            for slot in self._slots:
                if slot.block is not None and self._by_number[slot.block].flat is flat:
                    slot.block = None
            return
        self._gather(flat, copy)
        for member in flat.group.members:
            member.parameter.data = member.view(copy)

    def before_backward(self, index: int) -> None:
        """Backward is about to come to the group with this index."""
        if self._places[index] in self._by_number:
            self._hold(self._places[index], forward=False)

    def pass_by(self, index: int) -> None:
        """Backward passes of other ranks come through the blocks between the group with this index and the one behind it, of
        which nothing is trained."""
        behind = (
            self._places[index + 1] if index + 1 < len(self._places) else max(self._by_number, default=-1) + 1
        )
        for number in reversed(range(self._places[index] + 1, behind)):
            if number in self._by_number:
                self._hold(number, forward=False)

    def whole(self, target: torch.device | None, *, frozen: bool = True) -> None:
        """Gather the weights of all blocks, after which the model is only read: on `target`, or nowhere on this rank.

        Without `frozen` what is not trained stays as it is.
        """
        for number, block in self._by_number.items():
            kept = block if frozen else replace(block, frozen=None)
            if not kept.size:
                continue
            room = self._hold(number, forward=True).room
            if target is not None:
                for parameter, weights in kept.views(room[: kept.size].to(target, copy=True)):
                    parameter.data = weights

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's weights, until those of another block are gathered; all ranks read the same ones."""
        number = self._owner.get(parameter)
        if number is None:
            return parameter.detach()
        room = self._hold(number, forward=True).room
        return next(weights for each, weights in self._by_number[number].views(room) if each is parameter)

    def _through_a_slot(self, number: int, forward: Forward) -> Forward:
        moving = None if self._swap is None else partial(self._swap.moving, number)

        def compute(*args: Any, **kwargs: Any) -> Any:
            with self._holding(number, forward=True):
                return forward(*args, **kwargs)

        def again(*args: Any, **kwargs: Any) -> Any:
            with self._holding(number, forward=False):
                return forward(*args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._in_order(number)
            if not torch.is_grad_enabled():
                return compute(*args, **kwargs)
            if self._recomputes:
                ways = iter((compute,))

                def once_more(*args: Any, **kwargs: Any) -> Any:
                    return next(ways, again)(*args, **kwargs)

                return run_again_in_backward(once_more, args, kwargs, moving)
            keep = saved_tensors_hooks(self._keep, partial(self._find, number))
            with keep:
                return compute(*args, **kwargs)

        return run

    def _in_order(self, number: int) -> None:
        """Raises InvalidJob where a pass leaves blocks out: other ranks would wait for this one."""
        known = list(self._by_number)
        if number != known[0] and number != self._expected:
            raise InvalidJob(
                "spec.engine.parallelism.sharding",
                f"parameters is not possible here: this model computed block {number} where block {self._expected} is "
                "next, and all pods have to gather the same ones",
                "set sharding: gradients, or have the model leave no blocks out",
            )
        self._expected = known[(known.index(number) + 1) % len(known)]

    @contextmanager
    def _holding(self, number: int, *, forward: bool) -> Iterator[None]:
        """In a pass through the block."""
        room = self._hold(number, forward=forward).room
        for parameter, weights in self._by_number[number].views(room):
            parameter.data = weights
        yield
        for parameter, _ in self._by_number[number].views(room):
            without_memory(parameter)

    def _hold(self, number: int, *, forward: bool) -> Slot:
        """The slot that has the block's weights."""
        slot = find(self._slots, number, forward=forward)
        if slot.block != number:
            block = self._by_number[number]
            if block.flat is not None:
                self._gather(block.flat, block.trained(slot.room))
            if block.frozen is not None:
                self._ranks.all_gather(block.not_trained(slot.room), block.frozen.own)
                self.sent_bytes += (self._ranks.size - 1) * block.frozen.own.numel()
            slot.block = number
        return slot

    def _gather(self, flat: FlatGroup, whole: torch.Tensor) -> None:
        self._ranks.all_gather(whole, flat.weights)
        self.sent_bytes += (self._ranks.size - 1) * flat.length * whole.itemsize

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor | _InSlot:
        """What autograd keeps of a tensor."""
        for slot in self._slots:
            offset = tensor.data_ptr() - slot.room.data_ptr()
            if 0 <= offset < slot.room.numel() and tensor.device == slot.room.device:
                return _InSlot(tensor.dtype, tensor.size(), tensor.stride(), offset)
        return tensor

    def _find(self, number: int, kept: torch.Tensor | _InSlot) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else kept.of(self._hold(number, forward=False).room)


def _size(flat: FlatGroup) -> int:
    """Bytes of the whole group."""
    return flat.group.elements * flat.weights.itemsize
