"""Bodies that are refused, each beside a neighbour that is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.openai_fields import ONLY_AT
from busbar.workloads.serving.openai_request import (
    SAMPLING_FIELDS,
    parse_chat,
    parse_completion,
    parse_tokenize,
)

MESSAGES = [{"role": "user", "content": "hi"}]

# field, refused values, accepted values
COMPLETION_ROWS: list[tuple[str, list[Any], list[Any]]] = [
    ("model", [None, "", 3], ["m"]),
    (
        "prompt",
        [None, [], 3, [1, "a"], [-1], [True], [["a"]], ["x"] * 65],
        ["", "a", [1], ["a", "b"], [[1], [2]]],
    ),
    ("max_tokens", [0, -1, 1.5, "4", True], [1, 100, None]),
    ("min_tokens", [-1, "2"], [0, 3]),
    ("temperature", [-0.1, 2.1, "hot", True], [0, 0.0, 1, 2.0, None]),
    ("top_p", [-0.5, 1.01, "x"], [0, 0.0, 0.01, 1, 1.0]),
    ("top_k", [-2, 1.5, "x"], [-1, 0, 5]),
    ("seed", ["x", 1.5, 2**63], [0, -5, 2**63 - 1]),
    ("stop", ["", [""], 3, ["a"] * 17, [1], "a" * 1025], ["a", ["a", "b"], [], None, "a" * 1024]),
    ("stop_token_ids", [3, ["a"], [-1]], [[], [1, 2]]),
    ("ignore_eos", [1, "true"], [True, False]),
    ("skip_special_tokens", [1], [False]),
    ("include_stop_str_in_output", ["no"], [True]),
    ("presence_penalty", [-2.1, 2.1, "x"], [-2, 0, 2]),
    ("frequency_penalty", [-2.1, 2.1, "x"], [-2, 0, 2]),
    (
        "logit_bias",
        [[], {"a": 1}, {"1": "x"}, {"1": True}, {"²": 1}, {"1": float("nan")}],
        [{}, {"1": -100}, {"5": 2.5}, {"1": 10**400}],
    ),
    (
        "allowed_token_ids",
        [[], 3, "5", {"5": 1}, [1, -1], ["1"], [True], [1.0], [[1]]],
        [[0], [5, 7, 5], list(range(2000)), None],
    ),
    (
        "bad_words",
        ["x", {"x": 1}, [""], [3], ["a", None], ["x" * 257], ["\ud800"], ["x"] * 301],
        [[], ["x"], ["a b", " ", "\n"], ["x" * 256], ["x"] * 300, None],
    ),
    ("cache_salt", [1, "x" * 257, "\ud800"], ["", "x" * 256, "ü"]),
    ("logprobs", [-1, 21, True, "x"], [0, 5, 20, None]),
    ("prompt_logprobs", [-1, 21, True, "x", 1.5], [0, 5, 20, None]),
    ("priority", [1.5, "high", True, 1_000_001, -1_000_001], [0, -5, 1_000_000, None]),
    ("stream", [1, "yes"], [True, False]),
    ("n", [17, 0, True], [1, 2, 16, None]),
    ("best_of", [2], [1]),
    ("echo", [True, 0], [False]),
    ("suffix", ["x"], ["", None]),
    ("min_p", [-0.1, 1.1, "x"], [0, 0.0, 0.1, 1]),
    ("repetition_penalty", [0, 2.1, "x"], [1, 1.1, 0.5, 2]),
    (
        "response_format",
        [
            "json",
            {},
            {"type": "xml"},
            {"type": ["text"]},
            {"type": "json_object", "schema": {}},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"schema": {}}},
            {"type": "json_schema", "json_schema": {"name": "", "schema": {}}},
            {"type": "json_schema", "json_schema": {"name": "a"}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": []}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": "yes"}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "description": 1}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "other": 1}},
        ],
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "description": "b"}},
            None,
        ],
    ),
    ("guided_json", [3, [], "x", "[]", True], [{}, "{}", {"type": "object"}, None]),
    ("guided_regex", ["", 3, "\ud800"], ["a+", None]),
    ("guided_choice", [[], "a", [""], [1], ["a", "\ud800"], ["x"] * 1001], [["a"], ["a", "b"], ["x"] * 1000]),
    ("guided_grammar", ["", {}, "\ud800"], ['start: "a"', None]),
    ("tools", [[{"type": "function"}], []], [None]),  # of chats only
    ("user", [], ["somebody"]),
    ("metadata", [], [{"a": "b"}]),
    ("no_such_field", [1, "x"], [None]),
]

CHAT_ROWS: list[tuple[str, list[Any], list[Any]]] = [
    (
        "messages",
        [
            None,
            [],
            "hi",
            ["hi"],
            [{"content": "x"}],
            [{"role": "user"}],
            [{"role": "user", "content": 3}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        ],
        [
            MESSAGES,
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "assistant", "content": None}, *MESSAGES],
        ],
    ),
    ("max_completion_tokens", [0, "x"], [5]),
    ("prompt_logprobs", [-1, 21, False], [0, 20]),
    ("logprobs", [1, "x"], [True, False]),
    ("top_logprobs", [3], [None]),  # without logprobs: true
    ("allowed_token_ids", [[], [-1], "5"], [[5]]),
    ("bad_words", [[""], "x"], [["x"]]),
    (
        "chat_template_kwargs",
        [
            *([], "x", {"": 1}, {"a b": 1}, {"x" * 65: 1}, {"Größe": 1}),
            *({name: 1} for name in ("messages", "tools", "add_generation_prompt", "bos_token", "range")),
            *({"a": float("nan")}, {"a": "\ud800"}, {"a": "x" * 16_376}),
        ],
        [{"enable_thinking": False}, {"self": [1, {"b": None}]}, {"x" * 64: 1}, {"a": "x" * 16_375}],
    ),
    ("reasoning_effort", ["", "much", 3, True, ["low"]], ["none", "low", "medium", "high", None]),
    ("continue_final_message", [True, 1, "x"], [False, None]),  # the last message is the user's
    ("add_generation_prompt", [0, "x"], [True, False, None]),
    ("tool_choice", ["required", {"type": "function"}], ["none", "auto"]),
    ("prompt", ["x"], [None]),
]


def cases(rows: list[tuple[str, list[Any], list[Any]]], accepted: bool) -> list[Any]:
    return [
        pytest.param(field, value, id=f"{field}={value!r}"[:60])
        for field, bad, good in rows
        for value in (good if accepted else bad)
    ]


@pytest.mark.parametrize(("field", "value"), cases(COMPLETION_ROWS, accepted=False))
def test_a_bad_completion_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_completion({"model": "m", "prompt": "a", field: value})
    assert (caught.value.param or "").startswith(field)
    assert field in str(caught.value)


@pytest.mark.parametrize(("field", "value"), cases(COMPLETION_ROWS, accepted=True))
def test_its_neighbour_is_accepted(field: str, value: object) -> None:
    parse_completion({"model": "m", "prompt": "a", field: value})


@pytest.mark.parametrize(("field", "value"), cases(CHAT_ROWS, accepted=False))
def test_a_bad_chat_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat({"model": "m", "messages": MESSAGES, field: value})
    named = "max_tokens" if field == "max_completion_tokens" else field
    assert (caught.value.param or "").startswith(named)


@pytest.mark.parametrize(("field", "value"), cases(CHAT_ROWS, accepted=True))
def test_its_chat_neighbour_is_accepted(field: str, value: object) -> None:
    parse_chat({"model": "m", "messages": MESSAGES, field: value})


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(BadRequest, match="must be a JSON object"):
        parse_completion(body)


def test_stream_options_need_a_stream_and_known_names() -> None:
    body = {"model": "m", "prompt": "a", "stream_options": {"include_usage": True}}
    with pytest.raises(BadRequest, match="needs stream: true"):
        parse_completion(body)
    assert parse_completion({**body, "stream": True}).wanted.include_usage
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert parse_completion({**body, "stream": True, "stream_options": both}).wanted.continuous_usage
    with pytest.raises(BadRequest, match="may hold include_usage and continuous_usage_stats only"):
        parse_completion({**body, "stream": True, "stream_options": {"other": 1}})


def test_every_field_that_is_not_built_is_refused_at_another_value() -> None:
    for field in ONLY_AT:
        with pytest.raises(BadRequest, match="not supported"):
            parse_chat({"model": "m", "messages": MESSAGES, field: "something else"})


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = parse_chat({"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert body.messages[0]["content"] == "ab"


def test_a_logit_bias_has_a_bounded_number_of_tokens_each_spelt_one_way() -> None:
    def bias(value: object) -> tuple[tuple[int, float], ...]:
        body = {"model": "m", "prompt": "a", "logit_bias": value}
        return parse_completion(body).wanted.params.logit_bias

    assert len(bias({str(token): 1 for token in range(300)})) == 300
    with pytest.raises(BadRequest, match="301 tokens; at most 300"):
        bias({str(token): 1 for token in range(301)})
    assert bias({"0": 1, "10": 2}) == ((0, 1.0), (10, 2.0))
    for name in ("00", "010", "+1", "1 ", " 1", "1_0", "9" * 11):
        with pytest.raises(BadRequest, match="is not a token id"):
            bias({name: 1})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("allowed_token_ids", [], "allowed_token_ids must be a list of at least one token id, not []"),
        ("allowed_token_ids", [1, -4], "allowed_token_ids[1] is -4; a token id is a whole number from 0"),
        ("bad_words", "no", "bad_words must be a list of up to 300 texts, not 'no'"),
        (
            "bad_words",
            ["a", ""],
            "bad_words[1] is ''; a bad word is a text of 1 to 256 characters of valid Unicode",
        ),
        ("bad_words", ["x"] * 301, "bad_words has 301 texts; at most 300 are served"),
    ],
)
def test_a_refused_constraint_is_told_in_one_sentence(field: str, value: object, message: str) -> None:
    for parse, prompt in ((parse_completion, {"prompt": "a"}), (parse_chat, {"messages": MESSAGES})):
        with pytest.raises(BadRequest) as caught:
            parse({"model": "m", **prompt, field: value})
        assert (str(caught.value), caught.value.param) == (message, field)


def test_an_answer_follows_one_grammar_and_no_list_of_tokens_beside_it() -> None:
    body = {"model": "m", "prompt": "a", "guided_regex": "a+"}
    found = parse_completion({**body, "response_format": {"type": "text"}, "bad_words": []}).wanted.grammar
    assert found is not None
    assert (found.kind, found.text, found.param) == ("regex", "a+", "guided_regex")
    rows: list[tuple[str, object]] = [
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
    ]
    for name, value in rows:
        with pytest.raises(BadRequest, match="guided_regex") as caught:
            parse_completion({**body, name: value})
        assert name in str(caught.value)


LONG = "x" * 10_000


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: LONG} for name in sorted(SAMPLING_FIELDS - {"bad_words"})),
        *({name: LONG} for name in ONLY_AT),
        *({name: LONG} for name in ("bad_words", "n", "stream", LONG)),
        {"temperature": 10**4000},
        {"logit_bias": {LONG: 1}},
        {"logit_bias": {"1": LONG}},
    ],
    ids=lambda wrong: next(iter(wrong))[:24],
)
def test_a_long_wrong_value_does_not_fill_the_message(wrong: dict[str, object]) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_completion({"model": "m", "prompt": "a", **wrong})
    assert len(str(caught.value)) < 300
    assert len(caught.value.param or "") <= 80


def test_a_message_is_continued_where_it_is_the_assistants_and_calls_nothing() -> None:
    said = {"role": "assistant", "content": "Well"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    both = {"continue_final_message": True, "add_generation_prompt": True}

    def asked(last: dict[str, Any], **more: Any) -> Any:
        body = {"model": "m", "messages": [*MESSAGES, last], "continue_final_message": True, **more}
        return parse_chat(body).rendering

    assert (asked(said).continues, asked(said).generation_prompt) == (True, False)
    assert asked(said, add_generation_prompt=False) == asked(said)
    assert asked({"role": "assistant", "content": None}).continues
    assert parse_chat({"model": "m", "messages": MESSAGES}).rendering.generation_prompt
    for last, more, part in (
        (said, both, "set one of them"),
        (MESSAGES[0], {}, "the last is the assistant's"),
        ({**said, "tool_calls": [call]}, {}, "calls tools"),
    ):
        with pytest.raises(BadRequest, match=part) as caught:
            asked(last, **more)
        assert caught.value.param == "continue_final_message"
    with pytest.raises(BadRequest, match="the last is the assistant's"):
        parse_tokenize({"prompt": "x", "continue_final_message": True})


def test_reasoning_effort_is_given_once() -> None:
    body = {"model": "m", "messages": MESSAGES, "chat_template_kwargs": {"reasoning_effort": "any"}}
    assert parse_chat(body).rendering.arguments == {"reasoning_effort": "any"}
    with pytest.raises(BadRequest, match="give it once") as caught:
        parse_chat({**body, "reasoning_effort": "low"})
    assert caught.value.param == "reasoning_effort"
    assert parse_tokenize({"messages": MESSAGES, "reasoning_effort": "low"}).rendering.effort == "low"


def test_prompt_logprobs_come_with_whole_answers_only() -> None:
    body = {"model": "m", "prompt": "a", "prompt_logprobs": 0}
    assert parse_completion({**body, "stream": False}).wanted.params.prompt_logprobs == 0
    with pytest.raises(BadRequest, match="whole answer only") as caught:
        parse_completion({**body, "stream": True})
    assert caught.value.param == "prompt_logprobs"


def test_max_completion_tokens_wins_over_the_old_name() -> None:
    body = parse_chat({"model": "m", "messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 7})
    assert body.wanted.max_tokens == 7
