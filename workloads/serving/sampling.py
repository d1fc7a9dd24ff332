"""What a request asks of the sampler. Pure Python.

The random number for token `index` of a request is a hash of (seed, index): it depends neither on the
batch nor on how often the request was preempted, so a seeded request repeats anywhere.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

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
    include_stop_text: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """None: none; n: the chosen token's, and those of the n likeliest."""

    @property
    def greedy(self) -> bool:
        return self.temperature < COLD

    @property
    def edits_logits(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


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
