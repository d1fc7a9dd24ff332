"""Answers under a grammar: every one that ends is valid, whatever the model's weights say."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import itertools
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tests.serving.engines import Said, generate, load_engine, text_of, tokens_of
from tests.serving.models import EOS, VOCAB, make_tokenizer

from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.folding import SMALL
from busbar.workloads.serving.grammar import Allowed, Grammar, Grammars, GrammarTooComplex, Guide
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.openai_format import GrammarKind, GrammarSpec
from busbar.workloads.serving.sampler import Draw, sample
from busbar.workloads.serving.sampling import Randomness, SamplingParams
from busbar.workloads.serving.vocabulary import Vocabulary

PROMPT = list(range(70, 90))
SHORT = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
TREE = {"type": "object", "properties": {"left": {"$ref": "#"}, "n": DIGIT}, "additionalProperties": False}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"name": SHORT, "age": DIGIT, "tags": {"type": "array", "items": SHORT, "maxItems": 2}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "choice": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"enum": ["ä", 'q"\\', 3]}]},
    "array": {"type": "array", "items": {"type": "array", "items": DIGIT, "maxItems": 2}, "maxItems": 3},
    "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "recursive": TREE,
    "number": {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "maxItems": 1},
    "const": {"type": "object", "properties": {"kind": {"const": "🙂"}}, "required": ["kind"]},
}


@pytest.fixture(scope="module")
def loaded(llama: tuple[Path, Any]) -> Loaded:
    return load_engine(llama[0], deterministic=True, max_running=64)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Vocabulary(make_tokenizer()), VOCAB + 16, frozenset({EOS}), frozenset())


def schema_of(schema: object, param: str = "response_format") -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), param)


def regex_of(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text, "guided_regex")


def under(loaded: Loaded, spec: GrammarSpec, **asked: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 80} | asked, grammar=spec)


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_that_ends_fits_its_schema(loaded: Loaded, name: str) -> None:
    validator = jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.8}, {"top_p": 0.9}, {"top_k": 3}, {"top_k": 80}]
    ways += [{"min_p": 0.1}, {"temperature": 0.0}, {"frequency_penalty": 1.0, "logit_bias": ((EOS, 40.0),)}]
    params = [under(loaded, schema_of(SCHEMAS[name]), seed=i, **ways[i % len(ways)]) for i in range(24)]
    answers = generate(loaded, [PROMPT] * len(params), params)
    ended = [text_of(deltas) for deltas in answers if deltas[-1].finish == "stop"]
    assert len(ended) >= 8
    for text in ended:
        validator.validate(json.loads(text))


def test_any_object_is_an_object_however_the_answer_was_drawn(loaded: Loaded) -> None:
    params = [under(loaded, schema_of({"type": "object"}), seed=i, max_tokens=200) for i in range(32)]
    answers = [deltas for deltas in generate(loaded, [PROMPT] * 32, params) if deltas[-1].finish == "stop"]
    assert answers
    assert all(isinstance(json.loads(text_of(deltas)), dict) for deltas in answers)


def test_regular_expressions_choices_and_grammars_are_followed(loaded: Loaded) -> None:
    lark = 'start: item ("," item)*\nitem: "x" | "(" start ")"'
    gbnf = 'root ::= "yes" | "no"'
    rows = [
        (regex_of("[a-c]{3}[0-9]?"), "[a-c]{3}[0-9]?"),
        (GrammarSpec(GrammarKind.LARK, 'start: "zwei 🙂" | "drei\\n"', "guided_choice"), "zwei 🙂|drei\n"),
        (GrammarSpec(GrammarKind.LARK, gbnf, "guided_grammar"), "yes|no"),
        (GrammarSpec(GrammarKind.LARK, lark, "guided_grammar"), r"[x(),]+"),
    ]
    for spec, pattern in rows:
        for deltas in generate(loaded, [PROMPT] * 8, [under(loaded, spec, seed=i) for i in range(8)]):
            assert re.fullmatch(pattern, text_of(deltas)), text_of(deltas)


def test_an_answer_ends_with_its_grammar_even_where_end_tokens_are_ignored_or_forbidden(
    loaded: Loaded,
) -> None:
    for asked in ({"ignore_eos": True}, {"min_tokens": 100}, {"max_tokens": 3}):
        (deltas,) = generate(loaded, [PROMPT], under(loaded, regex_of("abc"), **asked))
        assert (text_of(deltas), deltas[-1].finish) == ("abc", "stop")


def test_min_tokens_holds_where_the_grammar_lets_it(loaded: Loaded) -> None:
    (deltas,) = generate(loaded, [PROMPT], under(loaded, regex_of("[ab]+"), min_tokens=30, max_tokens=40))
    assert len(tokens_of(deltas)) >= 30


def test_an_answer_may_end_at_its_length_or_a_stop_string_before_its_grammar_does(loaded: Loaded) -> None:
    (deltas,) = generate(loaded, [PROMPT], under(loaded, regex_of("a{50}b"), max_tokens=4))
    assert (deltas[-1].finish, set(text_of(deltas))) == ("length", {"a"})
    (deltas,) = generate(loaded, [PROMPT], under(loaded, regex_of("aaabbb"), stop=("ab",)))
    assert (deltas[-1].finish, text_of(deltas)) == ("stop", "aa")


def test_neighbours_without_a_grammar_and_log_probabilities_stay_the_same(loaded: Loaded) -> None:
    plain = SamplingParams(max_tokens=30, seed=4, logprobs=2)
    generate(loaded, [PROMPT], plain)  # so that the others all find the prompt's blocks
    alone = generate(loaded, [PROMPT], plain)[0]
    strict = under(loaded, schema_of(SCHEMAS["object"]), seed=4, logprobs=2)
    together = generate(loaded, [PROMPT] * 3, [plain, strict, plain])
    assert together[0] == [with_id(delta, "0") for delta in alone]
    first, free = together[1][0].logprobs[0], alone[0].logprobs[0]
    assert first.top == free.top, "they are those of the model's own distribution"
    assert text_of(together[1]).startswith("{")


def with_id(delta: Said, request_id: str) -> Said:
    return replace(delta, request_id=request_id)


def test_a_preempted_answer_and_one_that_goes_on_elsewhere_follow_their_grammar(
    llama: tuple[Path, Any], loaded: Loaded
) -> None:
    asked = under(loaded, schema_of(SCHEMAS["object"]), seed=8)
    (whole,) = generate(loaded, [PROMPT], asked)
    for cut in range(1, len(whole)):
        before = tokens_of(whole[:cut])
        history = loaded.core.replay(PROMPT, asked, before)
        if loaded.core.rules.is_over(history, asked):
            assert cut == len(whole)
            continue
        loaded.core.submit("0", PROMPT, asked, 0.0, history=history)
        after: list[Delta] = []
        while not loaded.core.idle:
            after += loaded.core.step()
        assert before + tokens_of(after) == tokens_of(whole)
    crowded = load_engine(llama[0], deterministic=True, kv_bytes=9 * 16 * 2 * 2 * 2 * 16 * 4)
    params = [under(crowded, schema_of(SCHEMAS["object"]), seed=8)] * 6
    answers = generate(crowded, [PROMPT] * 6, params)
    assert crowded.core.scheduler.preemption_count > 0
    assert {tuple(tokens_of(deltas)) for deltas in answers} == {tuple(tokens_of(whole))}


def test_forged_tokens_do_not_go_on_under_a_grammar(loaded: Loaded) -> None:
    asked = under(loaded, regex_of("aaabbb"))
    good = loaded.core.tokenizer.encode("a").ids
    loaded.core.replay(PROMPT, asked, good)
    with pytest.raises(BadRequest, match="do not follow"):
        loaded.core.replay(PROMPT, asked, [*good, *loaded.core.tokenizer.encode("b").ids])


def test_an_answer_whose_grammar_breaks_a_limit_ends_alone(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busbar.workloads.serving.grammar.MAX_LEXER_STATES", 40)
    strict = under(loaded, regex_of("[a-z]{500}x"), max_tokens=200)
    free = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
    ended, other = generate(loaded, [PROMPT] * 2, [strict, free])
    assert (ended[-1].finish, ended[-1].refused) == ("error", True)
    assert "too complex" in str(ended[-1].error)
    assert len(tokens_of(other)) == 200
    assert loaded.core.scheduler.pool.used == 0


def test_an_answer_has_a_bounded_processor_time_for_its_grammar(grammars: Grammars) -> None:
    matcher = grammars.compile(regex_of("a+")).matcher
    token = make_tokenizer().encode("a").ids
    for seconds, steps in ((0.004, 1000), (0.02, 9)):  # of a mask, and of a token taken
        clock = itertools.count(0.0, seconds)
        guide = Guide(matcher.deep_copy(), 52, clock.__next__)
        done = 0
        with contextlib.suppress(GrammarTooComplex):
            while done < 1000:
                guide.allowed()
                guide.take(token)
                done += 1
        assert done == steps


# -- the mask -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [100, 400, SMALL + 77])
def test_masks_leave_exactly_their_tokens_and_rows_come_back(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(6, width, generator=generator) * 3
    kept = logits.clone()
    sets = [torch.randperm(width, generator=generator)[:count].sort().values for count in (1, 2, 40)]
    masks = [mask_of(tokens, width) for tokens in sets]
    for asked in (
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=70),
        SamplingParams(top_p=0.5),
    ):
        for seed in range(20):
            draws = [
                Draw(asked, Randomness(seed), row, allowed=masks[row // 2] if row % 2 else None)
                for row in range(6)
            ]
            found = sample(logits, draws)
            assert all(found[row].token in sets[row // 2] for row in (1, 3, 5))
            assert torch.equal(logits, kept)
            if asked.greedy:
                assert [f.token for f in found[::2]] == logits[::2].argmax(-1).tolist()


def mask_of(tokens: torch.Tensor, width: int) -> Allowed:
    bits = torch.zeros(-(-width // 32) * 4, dtype=torch.uint8)
    for token in tokens.tolist():
        bits[token // 8] |= 1 << token % 8
    return Allowed(bits, len(tokens))


def test_a_mask_knows_its_tokens_and_whether_others_are_left() -> None:
    allowed = mask_of(torch.tensor([3, 64, 99]), 100)
    assert allowed.tokens() == [3, 64, 99]
    assert allowed.any_but({3, 64})
    assert allowed.any_but({3, 64, 98, 1})
    assert not allowed.any_but({3, 64, 99, 7})


# -- bad grammars ---------------------------------------------------------------------------------

EVEN = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"]}
ODD = {"type": "object", "properties": {"b": {"$ref": "#"}}, "required": ["b"]}
KIND = {"type": "object", "required": ["kind"]}
MANY = {f"p{i}": DIGIT for i in range(1000)}

BAD: list[tuple[GrammarSpec, str]] = [
    (schema_of({"type": "objec"}), "is wrong: type is 'objec'; write array, boolean, "),
    (schema_of({"type": 3}), "is wrong: type is 3; write array, "),
    (schema_of({"type": None}), "is wrong: type is None; write array, "),
    (schema_of({"type": []}), r"is wrong: type is \[\]; write array, "),
    (schema_of({"type": ["string", {}]}), "is wrong: type is .*; write array, "),
    (schema_of({"type": "object", "properties": {"a": {"type": 3}}}), "wrong at '/properties/a': type is 3"),
    (schema_of({"anyOf": [DIGIT, {"items": {"type": []}}]}), "wrong at '/anyOf/1/items': type is"),
    (schema_of({"properties": {"a": 3}}), "wrong at '/properties/a': a schema is an object, true or false"),
    (schema_of({"properties": {"a": {"anyOf": []}}}), "wrong at '/properties/a': anyOf is an empty list"),
    (schema_of({"not": {"type": "string"}}), 'nothing enforces the keywords "not"; leave'),
    (schema_of({"enum": []}), "is wrong: enum is an empty list, which no value fits"),
    (schema_of({"$ref": "#/nowhere"}), "cannot be served"),
    (schema_of({"$ref": "file:///etc/hostname"}), "not fetch"),
    (schema_of({"const": "\ud800"}), "is wrong"),
    (schema_of({"x-guidance": {"lenient": True}, "not": {}}), 'the keywords "not"'),
    (schema_of({"oneOf": [{"type": "string"}, {"minLength": 3}]}), "several may; write anyOf"),
    (schema_of({"type": "object", "required": 5}), "cannot be served"),
    (schema_of({"$ref": "#"}), "no finite value"),
    (schema_of({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "no finite value"),
    (schema_of(EVEN | {"$defs": {"b": ODD}}), "no finite value"),
    (schema_of({"properties": {f"p{i}": {} for i in range(10_000)}}), "more than 5000 parts"),
    (
        schema_of({"type": "object", "properties": {f"p{i}": DIGIT for i in range(3000)}}),
        "cannot be served: .*row",
    ),
    (schema_of({"type": "string", "pattern": "(a"}), "regex"),
    (regex_of("(a"), "regex"),
    (regex_of("(?=a)b"), "look-around"),
    (regex_of("[^\\s\\S]"), "cannot be served"),
    (regex_of("((a{1,100}){1,100}){1,100}" * 20), "too many"),
    (GrammarSpec(GrammarKind.LARK, "start: x", "guided_grammar"), "unknown name"),
    (GrammarSpec(GrammarKind.LARK, 'start: start "a"', "guided_grammar"), "cannot be served"),
    (GrammarSpec(GrammarKind.LARK, "anything", "guided_grammar"), "guided_grammar is wrong"),
]
GOOD = [
    schema_of({"type": "object"}),
    schema_of({"type": "string"}),
    schema_of({"type": ["string", "null"]}),
    schema_of({"const": {"type": 3, "anyOf": []}}),
    schema_of({"type": "object", "properties": {"type": {"enum": [[], {"type": []}]}, "items": True}}),
    schema_of({"type": "array", "items": [DIGIT]}),
    schema_of({"enum": [f"v{i}" for i in range(10_000)]}),
    schema_of({"$ref": "#/$defs/b", "$defs": {"b": DIGIT}}),
    schema_of({"anyOf": [{"$ref": "#/anyOf/1"}, {"type": "null"}]}),
    schema_of({"oneOf": [KIND | {"properties": {"kind": {"const": name}}} for name in "ab"]}),
    schema_of({"type": "array", "items": {"$ref": "#"}}),
    schema_of(EVEN | {"$defs": {"b": ODD | {"required": []}}}),
    schema_of({"type": "object", "properties": MANY}),
    schema_of({"type": "string", "pattern": "(a)"}),
    regex_of("(a|b)*a(a|b){2000}"),
    regex_of("(a{1,1000}){1,1000}"),
    regex_of("(x+x+)+y"),
    GrammarSpec(GrammarKind.LARK, 'start: "a" start | "b"', "guided_grammar"),
    GrammarSpec(GrammarKind.LARK, 'root ::= "a"', "guided_grammar"),
]


@pytest.mark.parametrize(("spec", "message"), BAD, ids=[row[0].text[:40] for row in BAD])
def test_a_bad_grammar_is_refused_by_its_field(grammars: Grammars, spec: GrammarSpec, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        grammars.compile(spec)
    assert caught.value.param == spec.param
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("spec", GOOD, ids=[spec.text[:40] for spec in GOOD])
def test_its_neighbour_is_compiled_and_remembered(grammars: Grammars, spec: GrammarSpec) -> None:
    found = grammars.compile(spec)
    assert grammars.compile(spec) is found
    assert found.start().allowed().count > 0


async def test_a_grammar_that_takes_too_long_is_refused_while_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop's clock moves only here, so that a busy machine makes no other grammar late."""
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)
    grammars = Grammars(Vocabulary(make_tokenizer()), VOCAB, frozenset({EOS}), frozenset(), compile_s=0.2)
    known = await grammars.get(regex_of("known"))
    begun, held, compile_now = threading.Semaphore(0), threading.Event(), grammars.compile

    def slow(spec: GrammarSpec) -> Grammar:
        begun.release()
        held.wait()
        return compile_now(spec)

    monkeypatch.setattr(grammars, "compile", slow)
    try:
        asked = [asyncio.create_task(grammars.get(regex_of(f"slow{i}"))) for i in range(3)]
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=60)
        now_s += 0.3
        found = await asyncio.gather(*asked, return_exceptions=True)
        kinds = sorted(type(each).__name__ for each in found)
        assert kinds == ["BadRequest", "BadRequest", "Overloaded"], "the third had no thread"
        assert "longer than 0.2 s" in str(next(e for e in found if isinstance(e, BadRequest)))
        assert await grammars.get(regex_of("known")) is known
    finally:
        held.set()


async def test_too_long_a_grammar_is_refused_beside_one_that_is_not() -> None:
    grammars = Grammars(Vocabulary(make_tokenizer()), VOCAB, frozenset({EOS}), frozenset(), compile_s=60)
    await grammars.get(regex_of("a" * 10_000))
    with pytest.raises(BadRequest, match="200001 characters; at most 200000"):
        await grammars.get(regex_of("a" * 200_001))


async def test_without_the_package_a_grammar_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = Grammars(Vocabulary(make_tokenizer()), VOCAB, frozenset({EOS}), frozenset())
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "llguidance":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    grammars.prepare()
    with pytest.raises(BadRequest, match=r"pip install 'busbar\[grammar\]'") as caught:
        await grammars.get(regex_of("a"))
    assert caught.value.param == "guided_regex"


async def test_a_model_without_an_end_token_has_no_grammars() -> None:
    grammars = Grammars(Vocabulary(make_tokenizer()), VOCAB, frozenset(), frozenset({EOS}))
    grammars.prepare()
    with pytest.raises(BadRequest, match="no end token"):
        await grammars.get(regex_of("a"))


def test_only_the_latest_grammars_are_remembered(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busbar.workloads.serving.grammar.REMEMBERED", 2)
    first = grammars.compile(regex_of("first"))
    grammars.compile(regex_of("second"))
    assert grammars.compile(regex_of("first")) is first
    grammars.compile(regex_of("third"))
    assert grammars.compile(regex_of("first")) is first
