"""Gradients are exchanged beside the backward pass that computes those of the groups before them.

When backward comes to a group, all groups behind it are complete. Their exchanges begin then, one at a time and in the same
order on all ranks, last group first, and run while the groups before them are computed:

    reached    groups behind this one are complete: the exchange under way is waited for, the next one begins
    finish     the pass is over: those that are left

A group whose gradients come when backward is past it (a parameter that two groups share, say) cannot begin early. Which ones
these are the first step finds out, whose exchanges all wait for the end of the pass; the ranks agree on them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from busbar.workloads.training.gradient_shards import watch_backward
from busbar.workloads.training.groups import FlatGroup
from busbar.workloads.training.ranks import Pending, Ranks

Start = Callable[[FlatGroup], Pending | None]
Settle = Callable[[FlatGroup, Pending], object]


class EarlyExchange:
    """The exchanges of one rank's steps."""

    def __init__(
        self, model: nn.Module, groups: Sequence[FlatGroup], ranks: Ranks, start: Start, settle: Settle
    ) -> None:
        """
        Args:
            start: begins the exchange of a group's gradients, while no other one is under way; None: it has none.
            settle: waits for it, and takes what it brought.
        """
        self._groups, self._ranks, self._start_one, self._settle_one = groups, ranks, start, settle
        self._order = list(reversed(range(len(groups))))  # in which they are exchanged
        self._early: int | None = (
            None  # so many of them may begin before the pass is over; None: it is not known yet
        )
        self._late: set[int] = set()  # groups of which the first pass has told that they may not
        self._watched = False  # whether there was one on this rank
        self._runs = False  # the pass after which gradients are exchanged
        self._complete = len(groups)  # groups from this one on are, if they are not late
        self._begun = 0  # exchanges of this step, in their order
        self._under_way: tuple[FlatGroup, Pending] | None = None
        watch_backward(model, groups, self._reached)
        for index, flat in enumerate(groups):
            for member in flat.group.members:
                hook = partial(self._came, index, member.name)
                member.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """The last forward and backward pass of this rank's step begins."""
        self._runs, self._watched, self._complete = True, True, len(self._groups)

    def finish(self) -> None:
        """The pass is over, or this rank has none in this step: exchange what is left. All ranks call it."""
        self._runs = False
        if self._early is None:
            self._agree()
        for _ in range(self._begun, len(self._groups)):
            self._start_next()
        self._settle()
        self._begun = 0

    def _agree(self) -> None:
        """On what may begin early, from the next step on; later, if no rank has seen a pass."""
        *late, seen = self._ranks.most(
            [*(int(index in self._late) for index in range(len(self._groups))), int(self._watched)]
        )
        if seen:
            self._order.sort(key=lambda index: late[index])  # which keeps the order of the others
            self._early = len(late) - sum(late)

    def _reached(self, index: int) -> None:
        if not self._runs:
            return
        self._complete = min(self._complete, index + 1)
        while self._begun < (self._early or 0) and self._order[self._begun] >= self._complete:
            self._start_next()

    def _came(self, index: int, name: str, parameter: torch.Tensor) -> None:
        """Raises RuntimeError where a gradient comes after its group was exchanged."""
        if not self._runs or index < self._complete:
            return
        if self._early is None:
            self._late.add(index)
        elif index in self._order[: self._begun]:
            raise RuntimeError(
                f"{name} gets its gradient after those of {self._groups[index].group.name} were exchanged, which it did not "
                "in the first step"
            )

    def _start_next(self) -> None:
        self._settle()
        flat = self._groups[self._order[self._begun]]
        pending = self._start_one(flat)
        self._under_way = None if pending is None else (flat, pending)
        self._begun += 1

    def _settle(self) -> None:
        if self._under_way is not None:
            self._settle_one(*self._under_way)
            self._under_way = None
