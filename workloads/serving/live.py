"""A request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from busbar.workloads.serving.history import History
from busbar.workloads.serving.pooling import Pool
from busbar.workloads.serving.prompt_logprobs import PromptLogprobs
from busbar.workloads.serving.sampling import Randomness, SamplingParams
from busbar.workloads.serving.sequence import Sequence


@dataclass(eq=False)
class Live:
    """A request that is in the engine."""

    id: str
    params: SamplingParams
    sequence: Sequence
    history: History
    randomness: Randomness
    arrived_s: float
    joined_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    pool: Pool = field(default_factory=Pool)
    """Of a text that is to become a vector."""
    prompt_logprobs: PromptLogprobs | None = None
    """Until the first token takes them along."""

    @property
    def sampled(self) -> int:
        return len(self.sequence.tokens) - self.sequence.prompt_len
