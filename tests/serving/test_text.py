"""Incremental detokenization, and stop strings that span several pieces."""

from __future__ import annotations

import random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serving.models import EOS, VOCAB, make_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from busbar.workloads.serving.text import UNFINISHED, Detokenizer, StopMatcher, special_tokens
from busbar.workloads.serving.vocabulary import Vocabulary

BYTE_LEVEL = make_tokenizer()


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama 2's kind: words with ▁, and unknown characters as single bytes."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁hello", "▁world", "lo", "x"]
    vocabulary = {word: i for i, word in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in words[:3]])
    return tokenizer


BYTE_FALLBACK = byte_fallback_tokenizer()


def pieces_of(tokenizer: Tokenizer, tokens: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(Vocabulary(tokenizer), special_tokens(tokenizer) if skip else frozenset())
    return [*(detokenizer.add(token) for token in tokens), detokenizer.flush()]


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=40))
def test_pieces_of_any_byte_level_tokens_join_to_the_whole_text(tokens: list[int]) -> None:
    whole = BYTE_LEVEL.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces_of(BYTE_LEVEL, tokens)) == whole


@settings(max_examples=120, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=6), st.integers(0, 7)), max_size=12))
def test_pieces_of_byte_fallback_tokens_join_to_the_whole_text(parts: list[str | int]) -> None:
    """Any text in UTF-8 bytes, with word and special tokens between."""
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else [8 + byte for byte in part.encode()]
    whole = BYTE_FALLBACK.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces_of(BYTE_FALLBACK, tokens)) == whole


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    text = "🚀漢字ēα"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(tokens) > len(text)  # some characters are split over tokens, which is the case under test
    pieces = pieces_of(tokenizer, tokens)
    assert all(UNFINISHED not in piece for piece in pieces)
    assert "🚀" in pieces


def test_special_tokens_show_only_when_asked_for() -> None:
    tokens = [EOS, *BYTE_LEVEL.encode("ab").ids]
    assert "".join(pieces_of(BYTE_LEVEL, tokens)) == "ab"
    assert "".join(pieces_of(BYTE_LEVEL, tokens, skip=False)) == "<|end|>ab"


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return int(found)


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, tokens: list[int], **options: bool) -> str:
        self.decoded += len(tokens)
        return str(self._tokenizer.decode(tokens, **options))

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


def replacement_character_tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are whole text, the replacement character among them."""
    return Tokenizer(models.WordLevel({"x": 0, UNFINISHED: 1}, unk_token="x"))


LONE_BYTES: dict[str, tuple[Tokenizer, int]] = {
    "byte level": (BYTE_LEVEL, id_of(BYTE_LEVEL, "Ģ")),  # the byte 0x80
    "byte fallback": (BYTE_FALLBACK, 8 + 0x80),
    "words": (replacement_character_tokenizer(), 1),
}


@pytest.mark.parametrize("kind", LONE_BYTES)
def test_bytes_that_never_become_a_character_cost_no_more_the_more_there_are(kind: str) -> None:
    tokenizer, token = LONE_BYTES[kind]
    vocabulary = Vocabulary(tokenizer)
    counting = CountingTokenizer(tokenizer)
    vocabulary.tokenizer = cast(Tokenizer, counting)
    detokenizer = Detokenizer(vocabulary)
    tokens = [token] * 1000
    pieces = [*(detokenizer.add(t) for t in tokens), detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)
    assert counting.decoded < 100 * len(tokens)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=5), max_size=8), st.lists(st.integers(3, 7), min_size=8, max_size=8))
def test_text_goes_on_rightly_after_bytes_that_are_no_text(runs: list[bytes], words: list[int]) -> None:
    """Each run of byte tokens is valid text as a whole or not at all; word tokens separate the runs."""
    tokens: list[int] = []
    for run, word in zip(runs, words, strict=False):
        tokens += [8 + byte for byte in b"\xff" + run]
        tokens.append(word)
    assert "".join(pieces_of(BYTE_FALLBACK, tokens)) == BYTE_FALLBACK.decode(tokens)


@given(st.lists(st.integers(1, VOCAB - 1), max_size=30))
def test_the_bytes_of_byte_level_tokens_join_to_the_text(tokens: list[int]) -> None:
    vocabulary = Vocabulary(BYTE_LEVEL)
    data = b"".join(map(vocabulary.bytes_of, tokens))
    assert data.decode(errors="replace") == BYTE_LEVEL.decode(tokens)


@given(st.text(max_size=20))
def test_the_bytes_of_fallback_tokens_are_those_of_the_character(text: str) -> None:
    vocabulary = Vocabulary(BYTE_FALLBACK)
    assert b"".join(vocabulary.bytes_of(8 + byte) for byte in text.encode()) == text.encode()
    hello = id_of(BYTE_FALLBACK, "▁hello")
    assert vocabulary.bytes_of(hello) == b" hello"


def test_added_tokens_are_the_bytes_of_their_name() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("a b", special=False)])
    assert Vocabulary(tokenizer).bytes_of(id_of(tokenizer, "a b")) == b"a b"
    assert Vocabulary(tokenizer).bytes_of(10**6) == b""


def naive(text: str, stops: list[str]) -> str:
    """The text before the stop string that is completed first."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_stop_strings_cut_the_same_place_however_the_text_arrives(
    text: str, stops: list[str], seed: int
) -> None:
    rng = random.Random(seed)
    matcher = StopMatcher(stops)
    shown, at = "", 0
    while at < len(text):
        size = rng.randrange(1, 5)
        shown += matcher.add(text[at : at + size])
        at += size
    shown += matcher.flush()
    assert shown == naive(text, stops)
    assert (matcher.matched is not None) == any(stop in text for stop in stops)


def test_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.add(p) for p in ("xE", "N", "x", "EN", "D", "y")] == ["x", "", "ENx", "", "", ""]
    assert matcher.matched == "END"


def test_the_stop_string_is_shown_when_asked_for() -> None:
    matcher = StopMatcher(["END"], include=True)
    assert matcher.add("aEN") + matcher.add("Db") == "aEND"
