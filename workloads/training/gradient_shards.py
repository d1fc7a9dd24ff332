"""Gradients of which each rank keeps its slice alone (ZeRO stage 2).

The gradients of a group are whole only while backward computes them, in one room that all groups use in turn:

    begin      the room is cleared for the last group
    reached    backward comes to a group before: what the room has is complete. It is exchanged, this rank's slice of the
               sum is added to the slices of the step, and the room is cleared for the next group
    finish     the same for the groups that are left

Every rank exchanges every group after each of its micro-batches, last group first, whether its backward pass reached
the group or not, and as many times as the rank that has most micro-batches (`Division.rounds`).

In fixed order an exchange brings this rank its slice of every rank's gradients. They are the leaves of a subtree, which
is added up here; the levels above it are added up in the slices, as the rounds go on. With several micro-batches per
leaf the slices of all ranks' leaves have to be kept until the leaf ends, which takes as much as whole gradients do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from busbar.workloads.training.arena import Arena
from busbar.workloads.training.division import FIXED, Division, Round
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.groups import FlatGroup, blocks
from busbar.workloads.training.ranks import Ranks


class GradientShards:
    """The slices of one rank, and the room. Buffers are those that the plan granted."""

    def __init__(
        self,
        ranks: Ranks,
        division: Division,
        groups: Sequence[FlatGroup],
        arena: Arena,
        model: nn.Module,
        before_backward: Callable[[int], object] = lambda index: None,
        passed_by: Callable[[int], object] = lambda index: None,
    ) -> None:
        """`before_backward` is called with the index of each group, when the gradients behind it are exchanged; `passed_by`
        before that, where only other ranks make the backward pass."""
        self._before_backward, self._passed_by = before_backward, passed_by
        self._ranks, self._division, self._groups = ranks, division, groups
        self._fixed = division.order == FIXED
        dtype = groups[0].gradients.dtype
        largest = max(groups, key=lambda flat: flat.group.elements)
        self._room = arena.carve("exchange", largest.group.elements, dtype)
        self._came = arena.carve("exchange", len(self._room) if self._fixed else largest.length, dtype)
        self._held = [
            [arena.carve("gradients", flat.length, dtype) for flat in groups]
            for _ in range(division.partial_sums)
        ]
        self._leaf = [
            arena.carve("gradients", flat.group.elements, dtype)
            for flat in groups
            if self._fixed and division.leaf_size > 1
        ]
        self._round = Round(None)
        self.left_out: Collection[str] = ()  # groups that have no gradient in this step, on any rank
        self._at: int | None = (
            None  # the group whose gradients the room takes; None: no backward pass is under way
        )
        self.sent_bytes = 0  # handed over for other ranks, by this one
        watch_backward(model, groups, self._arrive)

    def begin(self, of: Round) -> None:
        """A micro-batch, or the time of one that this rank does not have."""
        self._round = of
        self._take(len(self._groups) - 1)

    def reached(self, index: int) -> None:
        """Backward is about to compute gradients of the group with this index."""
        while self._at is not None and self._at > index:
            self._exchange(self._at)
            self._take(self._at - 1)

    def pass_by(self) -> None:
        """Take part in a backward pass that the other ranks make, and this one does not."""
        for index in reversed(range(len(self._groups))):
            self._passed_by(index)
            self._arrive(index)

    def _arrive(self, index: int) -> None:
        self.reached(index)
        self._before_backward(index)

    def finish(self) -> None:
        """The backward pass is over. Raises InvalidJob if it came back to a group that it had left."""
        self.reached(0)
        self._exchange(0)
        self._at = None
        for flat in self._groups:
            for member in flat.group.members:
                if member.parameter.grad is not None:
                    raise InvalidJob(
                        "spec.engine.parallelism.sharding",
                        f"{member.name} of this model gets its gradient after those of {flat.group.name} were exchanged",
                        "set sharding: optimizer",
                    )

    def _take(self, index: int) -> None:
        """Have the room take the gradients of a group; those of some of its parameters may have come before."""
        self._at = index
        flat = self._groups[index]
        room = self._room[: flat.group.elements].zero_()
        for member in flat.group.members:
            view, early = member.view(room), member.parameter.grad
            if early is not None:
                view.copy_(early)
            member.parameter.grad = view

    def _exchange(self, index: int) -> None:
        flat = self._groups[index]
        room = self._room[: flat.group.elements]
        for member in flat.group.members:
            member.parameter.grad = None
        if flat.group.name in self.left_out:
            return
        self.sent_bytes += (self._ranks.size - 1) * flat.length * room.itemsize
        if not self._fixed:
            own = self._came[: flat.length]
            with _disable_current_modes():  # what gloo copies is planned as exchange, and no activation
                self._ranks.reduce_scatter(own, room)
            flat.gradients.add_(own)
            return
        came = self._came[: flat.group.elements]
        self._ranks.all_to_all(came, room)
        if self._leaf:
            leaf = self._leaf[index]
            leaf.copy_(came) if self._round.begins else leaf.add_(came)
            came = leaf
        if self._round.ends:
            self._merge(index, tree(came.view(self._ranks.size, -1)))

    def _merge(self, index: int, own: torch.Tensor) -> None:
        """Add a subtree that is complete to the sums that it completes; the last one completes all."""
        level, number = 0, self._round.number
        while number >> level & 1:
            own.add_(self._held[level][index])
            level += 1
        last = number + 1 == self._division.leaves // self._ranks.size
        (self._groups[index].gradients if last else self._held[level][index]).copy_(own)


def watch_backward(model: nn.Module, groups: Sequence[FlatGroup], reached: Callable[[int], object]) -> None:
    """Call `reached` with a group's index when a backward pass is about to compute gradients of it.

    That is when the gradient of a block's output is there, and for the embedding that of the first block's input: all
    that stands behind them has been computed by then. For the last group nothing is called.
    """
    inner = blocks(model)
    by_name = {flat.group.name: index for index, flat in enumerate(groups)}

    for number, block in enumerate(inner):
        if (index := by_name.get(f"block-{number}")) is not None:
            when_backward_comes(block, partial(reached, index))
    if inner and "embedding" in by_name:
        came = partial(_when_there, partial(reached, by_name["embedding"]))
        inner[0].register_forward_pre_hook(partial(_before, came), with_kwargs=True)


def when_backward_comes(block: nn.Module, call: Callable[[], object]) -> None:
    """Call it when the gradient of a block's output is there."""
    block.register_forward_hook(partial(_after, partial(_when_there, call)))


def _when_there(call: Callable[[], object], given: object) -> None:
    found = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    if torch.is_grad_enabled() and (first := next(found, None)) is not None:
        first.register_hook(lambda gradient: _nothing(call()))  # type: ignore[no-untyped-call]


def _before(call: Callable[[Any], object], module: nn.Module, args: Any, kwargs: Any) -> None:
    call((args, kwargs))


def _after(call: Callable[[Any], object], module: nn.Module, args: Any, output: Any) -> None:
    call(output)


def _nothing(done: object) -> None:
    """Tells torch that a hook changes nothing."""


def tree(rows: torch.Tensor) -> torch.Tensor:
    """The sum of a power of two rows, pairwise; uses them up."""
    distance = 1
    while distance < len(rows):
        for first in range(0, len(rows), 2 * distance):
            rows[first].add_(rows[first + distance])
        distance *= 2
    return rows[0]
