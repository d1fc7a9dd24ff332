"""Where a request's text stands: its detokenizer, stop strings, token counts and grammar, after the tokens so far.

A new request starts with an empty history. One that goes on from another replica replays the tokens that it has
had: the text held back (half a character, what may begin a stop string) is then the same as it was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.text import Detokenizer, StopMatcher
from busbar.workloads.serving.token_counts import TokenCounts
from busbar.workloads.serving.vocabulary import Vocabulary

if TYPE_CHECKING:
    from busbar.workloads.serving.grammar import Guide


@dataclass(eq=False)
class History:
    """A request's text state after `tokens`."""

    tokens: tuple[int, ...]
    """Sampled elsewhere."""
    text: str
    """Theirs, as far as it was passed on; the rest is held back here."""
    detokenizer: Detokenizer
    matcher: StopMatcher
    counts: TokenCounts | None
    """Kept where a penalty needs it."""
    guide: Guide | None
    """Kept where the answer follows a grammar."""


def replay(
    vocabulary: Vocabulary,
    special: frozenset[int],
    prompt: Sequence[int],
    params: SamplingParams,
    tokens: Sequence[int] = (),
) -> History:
    """The state of a request that has sampled `tokens`. Touches no engine state: any thread may call it.

    Raises BadRequest where the tokens do not follow the request's grammar.
    """
    guide = None if params.grammar is None else params.grammar.start()
    if guide is not None and not guide.take(tokens):
        raise BadRequest("these tokens do not follow the request's grammar", param="choices")
    hidden = special - params.visible if params.skip_special_tokens else frozenset()
    history = History(
        tuple(tokens),
        "",
        Detokenizer(vocabulary, hidden),
        StopMatcher(params.stop, params.include_stop_text),
        _counts(prompt, params),
        guide,
    )
    for token in tokens:
        history.text += history.matcher.add(history.detokenizer.add(token))
        if history.counts is not None:
            history.counts.add(token)
    return history


def _counts(prompt: Sequence[int], params: SamplingParams) -> TokenCounts | None:
    """What the penalties of a request need; the prompt counts for the repetition penalty only."""
    if not params.penalises:
        return None
    return TokenCounts(prompt if params.repetition_penalty != 1.0 else ())
