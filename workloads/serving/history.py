"""Where a request's sampling stands after the tokens so far: its token counts and its grammar.

A new request starts with an empty history. One that goes on from another replica replays the tokens that it has had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.token_counts import TokenCounts

if TYPE_CHECKING:
    from busbar.workloads.serving.grammar import Grammar, Guide


@dataclass(eq=False)
class History:
    """A request's state after `tokens`."""

    tokens: tuple[int, ...]
    """Sampled elsewhere."""
    counts: TokenCounts | None
    """Kept where a penalty needs it."""
    guide: Guide | None
    """Kept where the answer follows a grammar."""


def replay(
    prompt: Sequence[int], params: SamplingParams, grammar: Grammar | None, tokens: Sequence[int] = ()
) -> History:
    """The state of a request that has sampled `tokens` under its grammar. Touches no engine state: any thread may call it.

    Raises BadRequest where the tokens do not follow the request's grammar.
    """
    guide = None if grammar is None else grammar.start()
    if guide is not None and not guide.take(tokens):
        raise BadRequest("these tokens do not follow the request's grammar", param="choices")
    history = History(tuple(tokens), _counts(prompt, params), guide)
    if history.counts is not None:
        for token in tokens:
            history.counts.add(token)
    return history


def _counts(prompt: Sequence[int], params: SamplingParams) -> TokenCounts | None:
    """What the penalties of a request need; the prompt counts for the repetition penalty only."""
    if not params.penalises:
        return None
    return TokenCounts(prompt if params.repetition_penalty != 1.0 else ())
