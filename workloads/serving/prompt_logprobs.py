"""Log-probabilities of a prompt's own tokens, computed with the prompt, a piece at a time.

Only the likeliest of each position are kept, in flat arrays: 12 bytes a token, and 8 for each of the likeliest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

ROWS_AT_ONCE = 64
"""Logits of so many tokens are in memory at a time."""


class PromptLogprobs:
    """Those of the tokens behind the first, as far as they are computed."""

    def __init__(self, count: int) -> None:
        """With the `count` likeliest tokens of each position."""
        self.count = count
        self.tokens = array("i")
        self.logprobs = array("f")
        self.ranks = array("i")
        """1: no token is likelier."""
        self.top_tokens = array("i")
        """Of each position the likeliest, one position after the other."""
        self.top_logprobs = array("f")

    @property
    def arrays(self) -> tuple[array[int] | array[float], ...]:
        """All that is known, for whoever copies it."""
        return self.tokens, self.logprobs, self.ranks, self.top_tokens, self.top_logprobs

    @torch.inference_mode()
    def add(
        self, states: torch.Tensor, tokens: Sequence[int], head: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """The next tokens, each with the hidden state of the one before it; `head` makes logits of states."""
        for first in range(0, len(tokens), ROWS_AT_ONCE):
            some = tokens[first : first + ROWS_AT_ONCE]
            logits = head(states[first : first + len(some)])
            total = logits.logsumexp(-1, keepdim=True)
            own = logits.gather(1, torch.tensor(some, device=logits.device)[:, None])
            best = logits.topk(min(self.count, logits.shape[1]))
            self.tokens.extend(some)
            self.logprobs.extend((own - total)[:, 0].tolist())
            self.ranks.extend(((logits > own).sum(-1) + 1).tolist())
            self.top_tokens.extend(best.indices.flatten().tolist())
            self.top_logprobs.extend((best.values - total).flatten().tolist())

    def document(self, token_text: Callable[[int], str]) -> list[dict[int, dict[str, Any]] | None]:
        """As vLLM gives them: null for the first token, then for each its own and the likeliest, by token id."""
        text_of = cache(token_text)

        def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
            return {"logprob": logprob, "rank": rank, "decoded_token": text_of(token)}

        found: list[dict[int, dict[str, Any]] | None] = [None]
        width = len(self.top_tokens) // max(1, len(self.tokens))
        for i, token in enumerate(self.tokens):
            place = {token: entry(token, self.logprobs[i], self.ranks[i])}
            for j in range(width):
                likely = self.top_tokens[i * width + j]
                if likely != token:
                    place[likely] = entry(likely, self.top_logprobs[i * width + j], j + 1)
            found.append(place)
        return found
