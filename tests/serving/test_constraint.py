"""`allowed_token_ids` and `bad_words`, against transformers' own processors and tokenizers of several kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.serving.engines import generate, load_engine, text_of, tokens_of
from tests.serving.models import EOS, VOCAB, greedy, make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from busbar.workloads.serving.constraint import Constraint, make_constraint, token_sequences
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.folding import SMALL
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.sampler import Draw, sample
from busbar.workloads.serving.sampling import Randomness, SamplingParams
from busbar.workloads.serving.vocabulary import Vocabulary

PROMPTS = [list(range(70, 90)), list(range(100, 107)), [200, 201, 90, 91, 92]]


@pytest.fixture(scope="module")
def loaded(llama: tuple[Path, Any]) -> Loaded:
    return load_engine(llama[0], deterministic=True)


def id_of(name: str) -> tuple[int, ...]:
    return (PIECES.index(name),)


# -- the tokens of a word -------------------------------------------------------------------------


def test_a_byte_level_word_is_banned_with_and_without_a_space() -> None:
    tokenizer = make_tokenizer()
    found = token_sequences(Vocabulary(tokenizer), "hello")
    assert found == {
        tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in ("hello", " hello")
    }
    assert len(found) == 2
    assert token_sequences(Vocabulary(tokenizer), " hello") == found


def test_a_word_of_spaces_stays_what_it_is() -> None:
    tokenizer = make_tokenizer()
    found = token_sequences(Vocabulary(tokenizer), " ")
    assert tuple(tokenizer.encode(" ").ids) in found


PIECES = ["<unk>", "\u2581", "f", "o", "fo", "foo", "\u2581foo", "b", "\u2581b"]
MERGES = [("f", "o"), ("fo", "o"), ("\u2581", "foo"), ("\u2581", "b")]


def space_first(kind: str) -> Tokenizer:
    """A tokenizer that puts a space before every text, as Llama 2's and Mistral's do."""
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=MERGES, unk_token="<unk>")
    )
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    return tokenizer


@pytest.mark.parametrize("kind", ["metaspace", "prepend"])
def test_where_every_text_begins_with_a_space_a_word_inside_of_a_text_is_banned_too(kind: str) -> None:
    tokenizer = space_first(kind)
    found = token_sequences(Vocabulary(tokenizer), "foo")
    assert {id_of("\u2581foo"), id_of("foo")} <= found
    assert all(tokenizer.decode(list(each)).strip() == "foo" for each in found)


def test_a_byte_level_tokenizer_that_adds_a_space_is_treated_the_same() -> None:
    tokenizer = make_tokenizer()
    plain = token_sequences(Vocabulary(tokenizer), "hello")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert token_sequences(Vocabulary(tokenizer), "hello") == plain


def test_words_of_one_token_are_banned_always_and_longer_ones_at_their_last_token() -> None:
    vocabulary = Vocabulary(make_tokenizer())
    long = vocabulary.tokenizer.encode("zq", add_special_tokens=False).ids
    assert len(long) == 2
    single = vocabulary.tokenizer.encode("a", add_special_tokens=False).ids
    made = make_constraint(vocabulary, VOCAB, None, ["zq", "a"])
    assert single[0] in made.banned
    assert not made.banned & set(long)
    assert made.banned_after([5, long[0]], 0) == {long[1]}
    assert made.banned_after([5, long[0]], 1) == {long[1]}
    assert made.banned_after([5, long[0]], 2) == frozenset(), "the prompt's tokens begin no bad word"
    assert made.banned_after([long[0], 5], 0) == frozenset()
    assert made.banned_after([], 0) == frozenset()


def test_a_token_that_the_model_does_not_have_is_named_beside_those_that_it_has() -> None:
    vocabulary = Vocabulary(make_tokenizer())
    make_constraint(vocabulary, VOCAB, [VOCAB - 1], [])
    with pytest.raises(BadRequest, match=f"allowed_token_ids has {VOCAB}; .* 0 to {VOCAB - 1}"):
        make_constraint(vocabulary, VOCAB, [3, VOCAB], [])


def test_a_word_that_the_tokenizer_cannot_write_is_named() -> None:
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="y"))
    tokenizer.normalizer = normalizers.Replace("z", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    make_constraint(Vocabulary(tokenizer), 1, None, ["x"])
    with pytest.raises(BadRequest, match=r"bad_words\[1\] is 'z'"):
        make_constraint(Vocabulary(tokenizer), 1, None, ["x", "z"])


# -- sampling -------------------------------------------------------------------------------------


class AlmostOne(Randomness):
    """The largest number that can be drawn, where rounded sums fall short of the point."""

    def uniform(self, index: int) -> float:
        return 1 - 2.0**-53


class Nothing(Randomness):
    def uniform(self, index: int) -> float:
        return 0.0


@pytest.mark.parametrize("width", [300, SMALL + 999])
@pytest.mark.parametrize("randomness", [AlmostOne(), Nothing()])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9999999}, {"top_k": 200}, {"temperature": 0.0}])
def test_rounding_never_lets_another_token_through(
    width: int, randomness: Randomness, more: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(40):
        chosen = torch.randperm(width, generator=generator)[: 1 + number * 4].tolist()
        # The ends of the row and of its cells are where a rounded place would fall.
        allowed = frozenset(chosen) - {0, width - 1, *range(127, width, 128), *range(128, width, 128)}
        if not allowed:
            continue
        logits = torch.randn((1, width), generator=generator) * 4
        for made in (Constraint(width, allowed), Constraint(width, None, frozenset(range(width)) - allowed)):
            row = Draw(SamplingParams(**more, constraint=made), randomness, 0)
            assert sample(logits, [row])[0].token in allowed


# -- the engine -----------------------------------------------------------------------------------


def params(loaded: Loaded, allowed: list[int] | None, words: list[str], **more: Any) -> SamplingParams:
    params = SamplingParams(max_tokens=40, temperature=0.0, **more)
    return loaded.core.rules.constrained(params, allowed, words)


def test_greedy_tokens_under_allowed_token_ids_are_those_of_transformers(
    llama: tuple[Path, Any], loaded: Loaded
) -> None:
    allowed = [EOS, *range(30, 300, 9)]
    found = generate(loaded, PROMPTS, params(loaded, allowed, []))
    for prompt, deltas in zip(PROMPTS, found, strict=True):
        expected = greedy(llama[1], prompt, 40, prefix_allowed_tokens_fn=lambda *_: allowed)
        assert tokens_of(deltas) == expected
        assert set(expected) <= set(allowed)


def test_greedy_tokens_under_bad_words_are_those_of_transformers(
    llama: tuple[Path, Any], loaded: Loaded
) -> None:
    """The words are what the model would say: single tokens, and a pair."""
    tokenizer = loaded.core.tokenizer
    for prompt in PROMPTS:
        free = greedy(llama[1], prompt, 40)
        texts = {tokenizer.decode(free[i : i + n]) for n in (1, 2) for i in range(2, 20, 3)}
        words = sorted(text for text in texts if text.strip() and "\ufffd" not in text)
        sequences = {each for word in words for each in token_sequences(loaded.core.vocabulary, word)}
        assert {len(each) for each in sequences} >= {1, 2}
        (deltas,) = generate(loaded, [prompt], params(loaded, None, words))
        expected = greedy(llama[1], prompt, 40, bad_words_ids=[list(each) for each in sequences])
        assert tokens_of(deltas) == expected != free
        assert not any(word in text_of(deltas) for word in words if len(tokenizer.encode(word).ids) == 1)


def test_sampled_tokens_keep_both_rules_with_logprobs_of_the_whole_vocabulary(loaded: Loaded) -> None:
    allowed = list(range(30, 110))
    params = SamplingParams(max_tokens=200, seed=3, logprobs=4, temperature=1.5)
    free = generate(loaded, [PROMPTS[0]], params)[0]
    asked = loaded.core.rules.constrained(params, allowed, ["a", "ex"])
    (deltas,) = generate(loaded, [PROMPTS[0]], asked)
    tokens = tokens_of(deltas)
    assert len(tokens) == 200
    banned = {each for word in ("a", "ex") for each in token_sequences(loaded.core.vocabulary, word)}
    assert set(tokens) <= set(allowed)
    for sequence in banned:
        places = range(len(tokens) - len(sequence) + 1)
        assert not any(tuple(tokens[i : i + len(sequence)]) == sequence for i in places)
    assert deltas[0].logprobs[0].top == free[0].logprobs[0].top, "logprobs are of the unmodified distribution"


def test_a_preempted_request_generates_the_same_tokens(llama: tuple[Path, Any], loaded: Loaded) -> None:
    asked = [
        loaded.core.rules.constrained(
            SamplingParams(max_tokens=60, seed=seed, ignore_eos=True), range(20, 200), ["re", "zq", "a"]
        )
        for seed in range(4)
    ]
    prompts = [list(range(70 + i, 100 + i)) for i in range(4)]
    alone = [tokens_of(generate(loaded, [p], [a])[0]) for p, a in zip(prompts, asked, strict=True)]
    block = loaded.core.runner.cache.shape.block_bytes
    tight = load_engine(llama[0], deterministic=True, kv_bytes=16 * block)
    assert [tokens_of(deltas) for deltas in generate(tight, prompts, asked)] == alone
    assert tight.core.scheduler.preemption_count > 0


def test_an_answer_ends_where_no_token_may_follow(loaded: Loaded) -> None:
    (token,) = loaded.core.tokenizer.encode("z", add_special_tokens=False).ids
    asked = loaded.core.rules.constrained(SamplingParams(max_tokens=9, seed=1), [token], ["zz"])
    (deltas,) = generate(loaded, [PROMPTS[0]], [asked])
    assert (tokens_of(deltas), text_of(deltas), deltas[-1].finish) == ([token], "z", "stop")
    assert loaded.core.rules.is_over(loaded.core.replay(PROMPTS[0], asked, [token]), asked)
    assert not loaded.core.rules.is_over(loaded.core.replay(PROMPTS[0], asked, []), asked)


def test_a_request_that_may_begin_with_no_token_is_refused(loaded: Loaded) -> None:
    core = loaded.core
    (token,) = core.tokenizer.encode("z", add_special_tokens=False).ids
    with pytest.raises(BadRequest, match="allowed_token_ids leaves no token"):
        core.rules.constrained(SamplingParams(), [token], ["z"])
    with pytest.raises(BadRequest, match="min_tokens is 2, without the end tokens"):
        core.rules.constrained(SamplingParams(min_tokens=2), [EOS], [])
    core.rules.constrained(SamplingParams(), [EOS], [])
    core.rules.constrained(SamplingParams(min_tokens=2), [EOS, token], [])


def test_bad_words_may_be_the_whole_vocabulary_only_by_being_refused() -> None:
    made = Constraint(3, None, frozenset({0, 1}))
    assert not made.leaves_nothing({1})
    assert made.leaves_nothing({2})
