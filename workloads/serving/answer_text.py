"""The text of one answer, made of its tokens where the answer is written, not where they are computed.

The engine knows end tokens and lengths; whoever reads its tokens finds stop strings in their text, and tells the engine,
which hears of it one step later or more. Tokens behind a stop string are dropped and counted nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.text import Detokenizer, StopMatcher
from busbar.workloads.serving.vocabulary import Vocabulary


class AnswerText:
    """Its detokenizer and its stop strings, after the tokens so far."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        special: frozenset[int],
        ends: frozenset[int],
        params: SamplingParams,
    ) -> None:
        """`special` tokens are never part of a text; behind those of `ends`, which are none either, nothing comes."""
        hidden = special - params.visible if params.skip_special_tokens else frozenset()
        self._detokenizer = Detokenizer(vocabulary, hidden)
        self._matcher = StopMatcher(params.stop, params.include_stop_text)
        self._ends = ends

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._matcher.matched is not None

    def add(self, tokens: Iterable[int]) -> str:
        """The text that these make certain."""
        return "".join(
            self._matcher.add(self._detokenizer.add(token)) for token in tokens if token not in self._ends
        )

    def take(self, delta: Delta) -> tuple[str, str | None]:
        """(the text that a delta makes certain, how the answer ends with it: None, stop or length)."""
        text, finish = self.add(delta.tokens), delta.finish
        if finish is not None:
            text += self._matcher.add(self._detokenizer.flush())
        if self.has_stopped:
            return text, "stop"
        if finish is not None:
            text += self._matcher.flush()
        return text, finish
