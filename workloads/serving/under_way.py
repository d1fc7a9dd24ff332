"""Blocks of prompts that some sequence computes, so that those which begin alike wait for them instead of computing them too.

A block counts from the step that computes its first token until it is full, which may be many steps later where steps are
small or many owners take turns. Of two that are within the same block, the one that is further goes on, and the other waits.
Nobody waits for batch work but batch work, and nobody waits for a sequence that has had no token for `PATIENCE` steps: it
may have to give way for long, and whoever waits for it would give way with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from busbar.workloads.serving.sequence import Sequence, State

PATIENCE = 16
"""Steps: half a second where a step takes 30 ms. So many owners can take turns in steps of one prompt each."""


class UnderWay:
    """Of the step that is being planned; the steps are counted here."""

    def __init__(self, block_tokens: int, on: bool) -> None:
        """With `on` False nothing is ever under way: nothing is shared."""
        self._size, self._on = block_tokens, on
        self._step = 0
        self._now: set[bytes] = set()
        """What the step computes a part of."""
        self._begun: dict[bytes, Sequence] = {}
        """By what is computed in part, who goes on with it."""

    def begin(self, running: Iterable[Sequence]) -> None:
        """A step is going to be planned."""
        self._step += 1
        self._now.clear()
        self._begun.clear()
        if not self._on:
            return
        for sequence in running:
            index, part = divmod(sequence.computed, self._size)
            if not part or sequence.missing == 1 or index >= len(sequence.names):
                continue
            if self._step - sequence.stepped > PATIENCE:
                continue
            other = self._begun.setdefault(sequence.names[index], sequence)
            if (-sequence.computed, sequence.order) < (-other.computed, other.order):
                self._begun[sequence.names[index]] = sequence

    def gets(self, sequence: Sequence, count: int) -> None:
        """The step computes the next `count` tokens of the sequence, whose full blocks have names."""
        sequence.stepped = self._step
        if self._on and sequence.missing > 1:
            first, last = sequence.computed // self._size, -(-(sequence.computed + count) // self._size)
            self._now.update(sequence.names[first:last])

    def has(self, name: bytes, sequence: Sequence) -> bool:
        """Whether somebody computes the block for which this sequence would be next."""
        if name in self._now:
            return True
        other = self._begun.get(name, sequence)
        waits = sequence.owner.batch or not other.owner.batch
        return other is not sequence and waits and other.state is State.RUNNING
