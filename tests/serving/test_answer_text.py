"""Text of an answer, made of deltas by whoever reads them."""

from __future__ import annotations

import pytest
from tests.serving.models import EOS, make_tokenizer

from busbar.workloads.serving.answer_text import AnswerText
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.text import special_tokens
from busbar.workloads.serving.vocabulary import Vocabulary

TOKENIZER = make_tokenizer()


def text_under(params: SamplingParams, ends: frozenset[int] = frozenset({EOS})) -> AnswerText:
    return AnswerText(Vocabulary(TOKENIZER), special_tokens(TOKENIZER), ends, params)


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


def test_the_text_of_an_end_token_is_not_shown_and_what_was_held_back_is() -> None:
    said = text_under(SamplingParams(stop=("abc",)), ends=frozenset({EOS, *tokens_of("z")}))
    assert said.take(Delta("r", tokens_of("xab"))) == ("x", None)
    assert said.take(Delta("r", tokens_of("z"), finish="stop")) == ("ab", "stop")
    assert not said.has_stopped


@pytest.mark.parametrize("finish", [None, "length"])
@pytest.mark.parametrize(("include", "shown"), [(False, "x"), (True, "xab")])
def test_a_stop_string_is_the_end_whatever_the_engine_says(
    finish: str | None, include: bool, shown: str
) -> None:
    said = text_under(SamplingParams(stop=("ab",), include_stop_text=include))
    assert said.take(Delta("r", tokens_of("xabc"), finish=finish)) == (shown, "stop")
    assert said.take(Delta("r", tokens_of("more"))) == ("", "stop")


def test_a_character_that_never_ends_is_shown_at_the_end() -> None:
    half = tokens_of("\u00e9")[:1]
    said = text_under(SamplingParams())
    assert said.take(Delta("r", half)) == ("", None)
    assert said.take(Delta("r", finish="length")) == ("\ufffd", "length")


def test_tokens_that_came_before_give_the_text_that_another_has_shown() -> None:
    first, second = (text_under(SamplingParams(stop=("cde",))) for _ in range(2))
    assert first.add(tokens_of("abc")) + first.add(tokens_of("x")) == "abcx"
    assert second.add(tokens_of("abcd")) == "ab"
    assert second.take(Delta("r", tokens_of("e"))) == ("", "stop")
