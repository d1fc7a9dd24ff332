"""A request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from busbar.workloads.serving.history import History
from busbar.workloads.serving.metrics import Metrics
from busbar.workloads.serving.pooling import Pool
from busbar.workloads.serving.prompt_logprobs import PromptLogprobs
from busbar.workloads.serving.sampling import Randomness, SamplingParams
from busbar.workloads.serving.sequence import Sequence
from busbar.workloads.serving.speculation import Guesser


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

    guesser: Guesser | None = None
    """None: its tokens are not guessed."""
    confirms: bool = False
    """Its reader may end it, and says which tokens it has taken; the others are not counted."""
    counted: int = 0
    """Completion tokens that are counted, those sampled elsewhere included."""
    finish: str | None = None
    """How it has ended, as far as the tokens say, and when."""
    ended_s: float = 0.0

    @property
    def sampled(self) -> int:
        return len(self.sequence.tokens) - self.sequence.prompt_len

    @property
    def is_predictable(self) -> bool:
        """Whether what may come next depends on nothing but the tokens, so that several can be drawn at once."""
        history, params = self.history, self.params
        return (
            self.sequence.pooling is None
            and history.guide is None
            and history.counts is None
            and params.constraint is None
        )

    def observe(self, metrics: Metrics, now: float) -> None:
        """The request's times and lengths, after its end, when its tokens are counted."""
        joined, first, last = (now if t is None else t for t in (self.joined_s, self.first_s, self.last_s))
        metrics.e2e.observe(now - self.arrived_s)
        metrics.queue_time.observe(joined - self.arrived_s)
        metrics.prefill_time.observe(first - joined)
        metrics.decode_time.observe(last - first)
        metrics.inference_time.observe(last - joined)
        here = self.counted - len(self.history.tokens)
        if here > 1:
            metrics.tpot.observe((last - first) / (here - 1))
        metrics.request_prompt.observe(self.sequence.prompt_len)
        metrics.request_generation.observe(self.counted)
        metrics.params_n.observe(1)
        metrics.params_max_tokens.observe(self.params.max_tokens)
