"""A step that several ranks share: each computes its micro-batches and updates its slices of the weights (ZeRO stage 1).

    every micro-batch of this rank    forward, backward; gradients are added up (see `division`)
    reduce-scatter, group by group    each rank gets the sum of its slice of every group's gradients, beside the backward pass
                                      of its last micro-batch (see `early_exchange`)
    norm, clip, update                of this rank's slices (see `norm`, `optimizer`), whose state no other rank has
    all-gather, group by group        the updated weights, when the next forward pass reaches them, or the group before (see
                                      `gates`)

In fixed order the slices are exchanged as they are and added up here, as the upper levels of the tree.

Where gradients are divided (stage 2), they are exchanged while each micro-batch is computed (see `gradient_shards`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from busbar.workloads.training.arena import Arena
from busbar.workloads.training.division import FIXED, Division, micro_batch_seed
from busbar.workloads.training.early_exchange import EarlyExchange
from busbar.workloads.training.gradient_shards import GradientShards, tree
from busbar.workloads.training.groups import FlatGroup
from busbar.workloads.training.ranks import Pending, Ranks

Part = TypeVar("Part")


class Spread:
    """Steps of this rank's share. Buffers are those that the plan granted for it."""

    def __init__(
        self,
        ranks: Ranks,
        division: Division,
        groups: Sequence[FlatGroup],
        arena: Arena,
        seed: int,
        shards: GradientShards | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """With `model` gradients are exchanged beside its backward passes, where that is possible."""
        self.ranks, self._division, self._groups, self._seed = ranks, division, groups, seed
        self._fixed, self._shards = division.order == FIXED, shards
        self._sent_bytes = 0  # handed over for other ranks, by this one
        self._left_out: Collection[str] = ()  # groups without a gradient in this step
        if shards is not None:
            return
        dtype = groups[0].gradients.dtype
        self._held = [
            [arena.carve("gradients", flat.group.elements, dtype) for flat in groups]
            for _ in range(division.partial_sums)
        ]
        largest = max(groups, key=lambda flat: flat.group.elements)
        size = largest.group.elements if self._fixed else largest.length
        self._room = arena.carve("exchange", size, dtype)
        self.early: EarlyExchange | None = None
        one_leaf = (
            len(division.own(ranks.rank)) == 1
        )  # sums of several are complete only behind the last one's pass
        # Ranks that share sequences exchange them in the same pass, by other groups of ranks, and NCCL wants one order.
        if model is not None and ranks.size > 1 and one_leaf and division.sequence == 1:
            self.early = EarlyExchange(model, groups, ranks, self._start, self._settle)

    @property
    def sent_bytes(self) -> int:
        """Handed over for other ranks, by this one."""
        return self._sent_bytes + (0 if self._shards is None else self._shards.sent_bytes)

    def gradients(
        self,
        step: int,
        parts: Sequence[Part | None],
        work: Callable[[Part], torch.Tensor],
        computed: Callable[[], object],
        stand_by: Callable[[], object],
        left_out: Collection[str] = (),
    ) -> float:
        """Compute this rank's `parts` of the step and add up its slices over all ranks; returns the step's loss.

        Args:
            parts: of the whole step; None: nothing is learned from it.
            work: forward and backward of one part; returns its share of the loss.
            computed: called before gradients are read that no forward pass may have waited for.
            stand_by: called in the place of a forward pass that other ranks make, where gradients are divided.
            left_out: groups that the step leaves out on all ranks, of which nothing is exchanged.
        """
        self._left_out = left_out
        if self._shards is not None:
            self._shards.left_out = left_out
        self.ranks.at(f"computing step {step + 1}")
        losses = torch.zeros(len(parts), device=self._groups[0].weights.device)
        if self._shards is None:
            self._whole(step, parts, work, computed, losses)
        else:
            self._divided(self._shards, step, parts, work, stand_by, losses)
        self.ranks.add_up(losses)
        return float(sum(losses.cpu(), torch.zeros(())))

    def _divided(
        self,
        shards: GradientShards,
        step: int,
        parts: Sequence[Part | None],
        work: Callable[[Part], torch.Tensor],
        stand_by: Callable[[], object],
        losses: torch.Tensor,
    ) -> None:
        for each in self._division.rounds(self.ranks.rank):
            shards.begin(each)
            if each.index is None or (part := parts[each.index]) is None:
                stand_by()
                shards.pass_by()
            else:
                torch.manual_seed(self._seed_of(step, each.index))
                losses[each.index] = work(part)
            shards.finish()

    def _seed_of(self, step: int, index: int) -> int:
        part = self.ranks.rank % self._division.sequence
        return micro_batch_seed(self._seed, step, index, part)

    def _whole(
        self,
        step: int,
        parts: Sequence[Part | None],
        work: Callable[[Part], torch.Tensor],
        computed: Callable[[], object],
        losses: torch.Tensor,
    ) -> None:
        own = self._division.own(self.ranks.rank)
        for number, leaf in enumerate(own):
            if number:
                for flat in self._groups:
                    flat.gradients.zero_()
            last = next((index for index in reversed(leaf) if parts[index] is not None), None)
            for index in leaf:
                torch.manual_seed(self._seed_of(step, index))
                if self.early is not None and index == last:
                    self.early.begin()
                if (part := parts[index]) is not None:
                    losses[index] = work(part)
            computed()
            self._merge(number, len(own))
        computed()
        self.ranks.at(f"adding up the gradients of step {step + 1}")
        if self.early is not None:
            self.early.finish()
        elif self.ranks.size > 1:
            for flat in self._groups:
                if (pending := self._start(flat)) is not None:
                    self._settle(flat, pending)

    def _merge(self, number: int, leaves: int) -> None:
        """Add the leaf `number`, just computed, to the sums that it completes; the last one completes all."""
        level = 0
        while number >> level & 1:
            for flat, held in zip(self._groups, self._held[level], strict=True):
                flat.gradients.add_(held)
            level += 1
        if number + 1 < leaves:
            for flat, held in zip(self._groups, self._held[level], strict=True):
                held.copy_(flat.gradients)

    def _start(self, flat: FlatGroup) -> Pending | None:
        """Begin to exchange a group's gradients, through the room; None: there are none."""
        if flat.group.name in self._left_out:
            return None
        self._count(flat.gradients, flat)
        with _disable_current_modes():  # what gloo copies is planned as exchange, and no activation
            if self._fixed:
                return self.ranks.start_all_to_all(self._room[: flat.group.elements], flat.gradients)
            return self.ranks.start_reduce_scatter(self._room[: flat.length], flat.gradients)

    def _settle(self, flat: FlatGroup, pending: Pending) -> None:
        """Take this rank's slice of the sum."""
        pending.wait()
        if self._fixed:
            flat.own_gradients.copy_(tree(self._room[: flat.group.elements].view(self.ranks.size, -1)))
        else:
            flat.own_gradients.copy_(self._room[: flat.length])

    def gather_weights(self, flat: FlatGroup) -> Pending:
        """Begin to bring every rank the slices of a group that the others have updated."""
        self._count(flat.weights, flat)
        return self.ranks.start_all_gather(flat.weights, flat.own_weights)

    def _count(self, sent: torch.Tensor, flat: FlatGroup) -> None:
        self._sent_bytes += (self.ranks.size - 1) * flat.length * sent.itemsize
