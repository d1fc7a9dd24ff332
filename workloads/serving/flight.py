"""A step that has been launched, and whose results nobody has looked at yet.

On a GPU the next step is launched as soon as the tokens of the last are known, before anybody has looked at them, so that the
device computes meanwhile. Whether a request ends with its grammar is then seen one step late; such a request, and one that is
cancelled (its text may have come to a stop string) or held meanwhile, takes part in the step, and what came out for it is
dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from busbar.workloads.serving.runner import Outcome
from busbar.workloads.serving.sequence import Chunk, State, Step


@dataclass(frozen=True)
class Flight:
    """What was launched, and when its planning began."""

    step: Step
    outcome: Outcome
    began: float
    drafted_s: float = 0.0
    """Of the seconds since then those that a draft took to guess."""

    def landed(self, is_live: Callable[[Chunk], bool]) -> Flight | None:
        """What there is for those who still want it: of live requests that run. None: nobody does."""

        def wants(chunk: Chunk) -> bool:
            return chunk.sequence.state is State.RUNNING and is_live(chunk)

        chunks = tuple(filter(wants, self.step.chunks))
        if len(chunks) == len(self.step.chunks):
            return self
        if not chunks:
            return None
        outcome = self.outcome
        rows = [row for row, chunk in enumerate(outcome.chunks) if wants(chunk)]
        logits = outcome.logits.index_select(0, torch.tensor(rows, device=outcome.logits.device))
        states = [(chunk, state) for chunk, state in outcome.states if wants(chunk)]
        return replace(
            self,
            step=replace(self.step, chunks=chunks),
            outcome=Outcome([outcome.chunks[row] for row in rows], logits, states),
        )
