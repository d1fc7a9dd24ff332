"""What a request asks of the sampler. Pure Python.

The random number for token `index` of a request is a hash of (seed, index): it depends neither on the
batch nor on how often the request was preempted, so a seeded request repeats anywhere.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from busbar.workloads.serving.constraint import Constraint
    from busbar.workloads.serving.openai_format import GrammarSpec

COLD = 1e-5
"""Below this temperature sampling is greedy: dividing by it would overflow."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. Defaults are OpenAI's."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    visible: frozenset[int] = frozenset()
    """Special tokens whose text is needed whatever `skip_special_tokens` says: the marks of tool calls."""
    include_stop_text: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Positive logits of tokens that have come, in the prompt too, are divided by it, negative ones multiplied."""
    min_p: float = 0.0
    """Least probability, as a share of the likeliest token's."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """None: none; n: the chosen token's, and those of the n likeliest."""
    prompt_logprobs: int | None = None
    """None: none; n: those of the prompt's own tokens, and of the n likeliest at each place."""
    constraint: Constraint | None = None
    """What `allowed_token_ids` and `bad_words` leave of the vocabulary; None: everything."""
    grammar: GrammarSpec | None = None
    """What the answer follows; it ends where the grammar does, whatever `ignore_eos` says."""

    @property
    def greedy(self) -> bool:
        return self.temperature < COLD

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def edits_logits(self) -> bool:
        return self.penalises or bool(self.logit_bias) or self.constraint is not None

    @property
    def needs_order(self) -> bool:
        """Only some of the likeliest tokens may come."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass
class Randomness:
    """The random numbers of one request."""

    seed: int = field(default_factory=lambda: secrets.randbits(63))

    def uniform(self, index: int) -> float:
        """A number in [0, 1) for the token with this index."""
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


@dataclass(frozen=True)
class TokenLogprob:
    """One sampled token's log-probability under the unmodified distribution."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability), likeliest first."""
