"""Blocks whose weights live on the host and come to the device for as long as they are computed.

All weights, gradients and optimizer state have their home on the host, where the optimizer updates them. On the device
are slots: for the weights of a block, and for its gradients. What stands around the blocks has a copy there.

    load      wait until the block's update is done and the slot is free;  copy home -> slot
    forward   wait for the load, while the next block is loaded;           only the block's inputs are kept
    backward  the same in reverse order: the block is computed again, and then its gradients are, in one stay of its
              weights on the device
    collect   when the backward pass of the next block begins: gradients of this one -> home, where those of later
              micro-batches are added up, as autograd would have done on the device

Which slot a block takes is said in `weight_slots`. While a block is in a slot its parameters refer to it; otherwise they refer to their home, so that checkpoints, export
and optimizer see nothing else. The numbers are those of `recompute`.

Queues and events are those of `streams`; whoever has to wait is the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from busbar.workloads.machine.streams import Event, Streams
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.demand import aligned
from busbar.workloads.training.groups import FlatGroup, blocks, frozen_outside, settle
from busbar.workloads.training.input_swap import InputSwap
from busbar.workloads.training.plan import MemoryPlan
from busbar.workloads.training.recompute import run_again_in_backward
from busbar.workloads.training.step_clock import StepClock
from busbar.workloads.training.streamed_plan import GRADIENT_SLOTS
from busbar.workloads.training.weight_slots import Slot, Weight, find

Forward = Callable[..., Any]


@dataclass
class _GradientSlot:
    room: torch.Tensor
    freed: Event | None = None  # it is zero again


@dataclass(frozen=True)
class _Block:
    flat: FlatGroup | None  # None: nothing in it is trained
    index: int | None  # of the group
    weights: list[Weight]
    sources: list[tuple[torch.Tensor, int]]  # bytes at home, and where they go in a slot

    def go_home(self) -> None:
        for weight in self.weights:
            weight.go_home()


@dataclass
class _Outer:
    """A group around the blocks, which is on the device all the time."""

    flat: FlatGroup
    weights: list[Weight]
    copy: torch.Tensor
    gradients: torch.Tensor | None  # None: there are none
    updated: Event | None = None  # at home, and not yet here
    loaded: Event | None = None


@dataclass
class Traffic:
    """Bytes over the link so far."""

    loaded: int = 0
    collected: int = 0


class BlockSlots:
    """The device's side of a model whose groups are at home on the host. It takes over the blocks' `forward`."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[FlatGroup],
        plan: MemoryPlan,
        device: Arena,
        host: Arena,
        streams: Streams,
        clock: StepClock,
        swap: InputSwap | None = None,
    ) -> None:
        self._groups, self._streams, self._clock, self._swap = groups, streams, clock, swap
        inner = blocks(model)
        by_name = {flat.group.name: index for index, flat in enumerate(groups)}
        self._blocks = [
            _block(block, by_name.get(f"block-{number}"), groups, host) for number, block in enumerate(inner)
        ]
        settle(frozen_outside(model), device)
        self._outer = {
            index: _outer(flat, device) for index, flat in enumerate(groups) if not flat.group.size.is_block
        }
        largest = max(_slot_bytes(block) for block in self._blocks)
        self._slots = [Slot(device.carve("slots", largest, torch.uint8)) for _ in range(plan.weight_slots)]
        trained = [block.flat for block in self._blocks if block.flat is not None]
        longest = max((flat.group.elements for flat in trained if flat.has_whole_gradients), default=0)
        dtype = groups[0].gradients.dtype
        self._gradient_slots = [
            _GradientSlot(device.carve("gradients", longest, dtype))
            for _ in range(GRADIENT_SLOTS if longest else 0)
        ]
        self._landing = host.carve("staging", longest, dtype) if longest else torch.empty(0, dtype=dtype)
        self._updated: list[Event | None] = [None] * len(groups)
        self._fresh = [True] * len(groups)  # no gradient of this step has come home yet
        self._turn = 0  # the gradient slot that is used next
        self._absent: Collection[int] = ()  # blocks that this step leaves out
        self._held: tuple[int, Slot, _GradientSlot | None] | None = None  # what backward is in
        self.traffic = Traffic()
        for number, block in enumerate(inner):
            setattr(block, "forward", self._streamed(number, block.forward))  # noqa: B010
        model.register_forward_pre_hook(lambda *_: self._begin())

    def updated(self, events: Sequence[Event], absent: Collection[int] = ()) -> None:
        """Weights change at home until `events`, one per group: what is on the device is old. The next step leaves the
        blocks `absent` out."""
        self._updated, self._absent = list(events), absent
        self._fresh = [True] * len(self._groups)
        for slot in self._slots:
            slot.block = None
        for index, outer in self._outer.items():
            outer.updated, outer.loaded = events[index], None
        self.reach(self._groups[0])
        present = (number for number in range(len(self._blocks)) if number not in absent)
        for _, number in zip(self._slots, present, strict=False):
            self._load(number, forward=True)

    def refresh(self) -> None:
        """Load what stands around the blocks, and the first of them: weights have changed at home, and are whole."""
        done = self._streams.compute.record()
        self.updated([done] * len(self._groups))
        for flat in self._groups:
            self.arrive(flat)

    def reset(self) -> None:
        """Forget a backward pass outside of training."""
        self.end_backward()
        self.collect()
        self._fresh = [True] * len(self._groups)

    def reach(self, flat: FlatGroup) -> None:
        """Begin to load the group, if it is one around the blocks and is old here."""
        outer = next((each for each in self._outer.values() if each.flat is flat), None)
        if outer is None or outer.updated is None:
            return
        load = self._streams.load
        load.wait(outer.updated)
        load.copy(outer.copy, outer.flat.weights)
        outer.loaded, outer.updated = load.record(), None
        self.traffic.loaded += outer.copy.numel() * outer.copy.itemsize

    def arrive(self, flat: FlatGroup) -> None:
        """Wait until the group's new weights are here, if it is one around the blocks."""
        self.reach(flat)
        for outer in self._outer.values():
            if outer.flat is flat and outer.loaded is not None:
                outer.loaded.wait()

    def end_backward(self) -> None:
        """Of a micro-batch."""
        if self._held is None:
            return
        number, slot, gradients = self._held
        self._held = None
        self._leave(number, slot)
        if gradients is not None:
            self._collect(self._blocks[number], gradients)

    def collect(self) -> None:
        """Bring the step's gradients home, all of them, and have all parameters refer to their homes."""
        store = self._streams.store
        store.wait(self._streams.compute.record())
        for outer in self._outer.values():
            if outer.gradients is None:
                continue
            store.copy(outer.flat.gradients, outer.gradients)
            store.submit(outer.gradients.zero_)
            self.traffic.collected += outer.gradients.numel() * outer.gradients.itemsize
        store.synchronize()
        for outer in self._outer.values():
            for weight in outer.weights:
                weight.go_home()

    def _begin(self) -> None:
        """A forward pass begins: what stands around the blocks is used where it is on the device."""
        for outer in self._outer.values():
            for weight in outer.weights:
                own = None if outer.gradients is None else weight.in_gradients(outer.gradients)
                weight.go(weight.in_slot(outer.copy.view(torch.uint8)), own)

    def _streamed(self, number: int, forward: Forward) -> Forward:
        moving = None if self._swap is None else partial(self._swap.moving, number)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                with self._passing(number):
                    return forward(*args, **kwargs)
            times = iter((True,))

            def compute(*args: Any, **kwargs: Any) -> Any:
                if not next(times, False):  # again, in backward
                    self._enter_backward(number)
                    return forward(*args, **kwargs)
                with self._passing(number):
                    return forward(*args, **kwargs)

            return run_again_in_backward(compute, args, kwargs, moving)

        return run

    @contextmanager
    def _passing(self, number: int) -> Iterator[None]:
        """In a forward pass."""
        slot = self._enter(number, forward=True)
        for weight in self._blocks[number].weights:
            weight.go(weight.in_slot(slot.room), None)
        yield
        self._leave(number, slot)

    def _enter_backward(self, number: int) -> None:
        self.end_backward()  # of the block behind it, whose gradients are complete now
        block, gradients = self._blocks[number], None
        slot = self._enter(number, forward=False)
        if block.flat is not None and self._gradient_slots:
            gradients = self._gradient_slots[self._turn]
            self._turn = (self._turn + 1) % len(self._gradient_slots)
            if gradients.freed is not None:
                gradients.freed.wait()
        for weight in block.weights:
            own = (
                None if gradients is None or weight.gradient is None else weight.in_gradients(gradients.room)
            )
            weight.go(weight.in_slot(slot.room), own)
        self._held = number, slot, gradients

    def _enter(self, number: int, *, forward: bool) -> Slot:
        """Wait for the weights of a block, and have the next one loaded meanwhile."""
        slot = self._load(number, forward=forward)
        self._clock.ended("forward" if forward else "backward")
        if slot.loaded is not None:
            slot.loaded.wait()
        self._clock.ended("load")
        following = self._following(number, forward=forward)
        if following is not None and len(self._slots) > 1:
            self._load(following, forward=forward, busy=slot)
        return slot

    def _following(self, number: int, *, forward: bool) -> int | None:
        absent = self._absent if torch.is_grad_enabled() else ()
        behind = range(number + 1, len(self._blocks)) if forward else reversed(range(number))
        following = next((each for each in behind if each not in absent), None)
        if following is not None or not forward:
            return following
        for index in self._outer:
            self.reach(self._groups[index])  # the head, if no gate asked for it yet
        return None if torch.is_grad_enabled() else 0  # of the next forward pass

    def _leave(self, number: int, slot: Slot) -> None:
        self._blocks[number].go_home()
        slot.used = self._streams.compute.record()

    def _load(self, number: int, *, forward: bool, busy: Slot | None = None) -> Slot:
        """The slot that has the block's weights, or will have them."""
        slot = find(self._slots, number, forward=forward, busy=busy)
        if slot.block == number:
            return slot
        block, load = self._blocks[number], self._streams.load
        if slot.used is not None:
            load.wait(slot.used)
        if block.index is not None and (updated := self._updated[block.index]) is not None:
            load.wait(updated)
        for source, offset in block.sources:
            load.copy(slot.room[offset:][: source.numel()], source)
            self.traffic.loaded += source.numel()
        slot.block, slot.loaded = number, load.record()
        return slot

    def _collect(self, block: _Block, gradients: _GradientSlot) -> None:
        """Bring the gradients of one block and micro-batch home."""
        assert block.flat is not None
        assert block.index is not None
        store, room = self._streams.store, gradients.room[: block.flat.group.elements]
        home, landing = block.flat.gradients, self._landing[: room.numel()]
        store.wait(self._streams.compute.record())
        if self._fresh[block.index]:
            store.copy(home, room)
            self._fresh[block.index] = False
        else:
            store.copy(landing, room)
            store.submit(lambda: home.add_(landing))
        store.submit(room.zero_)
        gradients.freed = store.record()
        self.traffic.collected += room.numel() * room.itemsize


def shares_blocks(model: nn.Module) -> bool:
    """Whether a parameter of a block is also one of another block, or of a module around the blocks."""
    inner = blocks(model)
    own = [{id(parameter) for parameter in block.parameters()} for block in inner]
    if sum(map(len, own)) > len(set().union(*own)):
        return True
    inside = {id(module) for block in inner for module in block.modules()}
    outside = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    return not outside.isdisjoint(set().union(*own))


def frozen_in_blocks(model: nn.Module) -> dict[str, int]:
    """Bytes of the frozen weights of each block that has some."""
    found = {
        f"block-{number}": sum(
            aligned(each.numel() * each.itemsize) for each in block.parameters() if not each.requires_grad
        )
        for number, block in enumerate(blocks(model))
    }
    return {name: size for name, size in found.items() if size}


def _slot_bytes(block: _Block) -> int:
    return max((offset + aligned(source.numel()) for source, offset in block.sources), default=0)


def _block(module: nn.Module, index: int | None, groups: Sequence[FlatGroup], host: Arena) -> _Block:
    """A block's weights, of which the frozen ones move to the host's `base` here."""
    flat = None if index is None else groups[index]
    weights = [] if flat is None else _trained(flat)
    sources = [] if flat is None else [(flat.weights.view(torch.uint8), 0)]
    offset = 0 if flat is None else aligned(flat.weights.numel() * flat.weights.itemsize)
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    settle(frozen, host)
    for parameter in frozen:
        home = parameter.data
        weights.append(Weight(parameter, home, None, offset))
        sources.append((home.reshape(-1).view(torch.uint8), offset))
        offset += aligned(home.numel() * home.itemsize)
    return _Block(flat, index, weights, sources)


def _trained(flat: FlatGroup) -> list[Weight]:
    return [
        Weight(
            member.parameter,
            member.parameter.data,
            member.parameter.grad,
            member.start * flat.weights.itemsize,
            member.start,
        )
        for member in flat.group.members
    ]


def _outer(flat: FlatGroup, device: Arena) -> _Outer:
    elements = flat.group.elements
    copy = device.carve("parameters", elements, flat.weights.dtype)
    gradients = None
    if flat.has_whole_gradients:
        gradients = device.carve("gradients", elements, flat.gradients.dtype)
    return _Outer(flat, _trained(flat), copy, gradients)
