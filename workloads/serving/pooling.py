"""One vector for a text: the hidden state of its last token, or the mean over all of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from busbar.workloads.serving.sequence import Chunk, Pooling


@dataclass(eq=False)
class Pool:
    """The hidden states of a text, as far as they are computed."""

    total: torch.Tensor | None = None
    """[width] float64: the sum over the first `count` tokens; of `LAST`, the last token's state."""
    count: int = 0

    def add(self, chunk: Chunk, states: torch.Tensor) -> None:
        """`states` [rows, width] of a chunk's tokens (of `LAST`: of its last token)."""
        if chunk.sequence.pooling is Pooling.LAST:
            self.total, self.count = states[-1].double(), 1
            return
        fresh = states[max(0, self.count - chunk.start) :]  # after a preemption some come again
        if len(fresh):
            added = fresh.double().sum(0)
            self.total = added if self.total is None else self.total + added
            self.count += len(fresh)

    def vector(self) -> tuple[float, ...]:
        """Not normalised."""
        if self.total is None:
            raise ValueError("no token of this text has been computed")
        found: list[float] = (self.total / self.count).tolist()
        return tuple(found)
