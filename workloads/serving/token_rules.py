"""Which tokens may come next in an answer, and which end it. No state: any thread may ask."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from busbar.workloads.serving.constraint import make_constraint
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.history import History
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.vocabulary import Vocabulary


@dataclass(frozen=True)
class TokenRules:
    """Those of one model."""

    vocabulary: Vocabulary
    width: int
    """How many tokens the model knows."""
    eos: frozenset[int]

    def constrained(
        self, params: SamplingParams, allowed: Collection[int] | None, bad_words: Sequence[str]
    ) -> SamplingParams:
        """`params` under `allowed_token_ids` and `bad_words`. Raises BadRequest where they leave no token to
        begin with. Safe to call from any thread."""
        params = replace(params, constraint=make_constraint(self.vocabulary, self.width, allowed, bad_words))
        if self.is_stuck(params, (), 0):
            name = "bad_words" if allowed is None else "allowed_token_ids"
            raise BadRequest(
                f"{name} leaves no token to begin with, without those of {len(bad_words)} bad_words and, as "
                f"min_tokens is {params.min_tokens}, {'without' if params.min_tokens else 'with'} the end "
                "tokens; allow another token",
                param=name,
            )
        return params

    def is_over(self, history: History, params: SamplingParams) -> bool:
        """Whether nothing may follow a history's tokens, whatever their text says."""
        return (
            len(history.tokens) >= params.max_tokens
            or (history.guide is not None and history.guide.over)
            or not self.ends(params).isdisjoint(history.tokens)
            or self.is_stuck(params, history.tokens, 0)
        )

    def ends(self, params: SamplingParams) -> frozenset[int]:
        """Tokens behind which nothing comes."""
        if params.ignore_eos and params.grammar is None:
            return params.stop_token_ids
        return params.stop_token_ids | self.eos

    def forbidden(self, params: SamplingParams, tokens: Sequence[int], first: int) -> frozenset[int]:
        """Tokens that may not come next, beside those that never may. Those from `first` on were generated."""
        early = params.min_tokens > len(tokens) - first
        forbidden = (self.eos | params.stop_token_ids) if early else frozenset()
        if params.constraint is not None:
            forbidden |= params.constraint.banned_after(tokens, first)
        return forbidden

    def is_stuck(self, params: SamplingParams, tokens: Sequence[int], first: int) -> bool:
        """Whether a constraint leaves no token to come next."""
        constraint = params.constraint
        return constraint is not None and constraint.leaves_nothing(self.forbidden(params, tokens, first))
