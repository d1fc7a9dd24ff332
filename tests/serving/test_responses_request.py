"""/v1/responses without an engine: what is refused and what it is called, and what the chat route gets."""

from __future__ import annotations

from typing import Any

import pytest

from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.openai_request import parse_chat
from busbar.workloads.serving.responses_request import (
    REFUSED,
    SAME_AS_CHAT,
    TRANSLATED,
    names_of,
    own_names,
    parse_responses,
)

ASK: dict[str, Any] = {"model": "m", "input": "hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM: dict[str, Any] = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
TOOL: dict[str, Any] = {"type": "function", "name": "sky", "description": "The sky.", "parameters": SCHEMA}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "sky", "arguments": "{}"}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "grey"}


def item(content: object, role: str = "user", **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


# field, refused values, accepted values
ROWS: list[tuple[str, list[Any], list[Any]]] = [
    ("model", [None, "", 3], ["m"]),
    (
        "input",
        [
            *(
                None,
                [],
                3,
                {},
                ["hi"],
                [{}],
                [item("x", "tool")],
                [item("x", role="")],
                [item(None)],
                [item(3)],
            ),
            *([item("x", name="a")], [item("x", type="item_reference")], [item("x", type=["message"])]),
            [{"type": "reasoning", "summary": []}],
            [item([{"type": "input_image", "image_url": "x"}])],
            [item([{"type": "input_text"}])],
            [item([{"type": "input_text", "text": "x", "more": 1}])],
            [
                item(
                    [{"type": "output_text", "text": "x", "annotations": [{"type": "url_citation"}]}],
                    "assistant",
                )
            ],
            *(
                [RESULT],
                [CALL, CALL],
                [CALL, RESULT, RESULT],
                [{**CALL, "arguments": "["}],
                [{**CALL, "name": ""}],
            ),
            [{**CALL, "arguments": {}}],
        ],
        [
            *(
                "",
                "hi",
                [item("x")],
                [item("x", "developer", type="message", id="msg_1", status="completed")],
            ),
            [item([{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}])],
            [item([{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}], "assistant")],
            *([CALL], [CALL, RESULT], [CALL, {**RESULT, "output": [{"type": "input_text", "text": "grey"}]}]),
        ],
    ),
    ("instructions", [3, ["x"]], ["x", "", None]),
    ("max_output_tokens", [0, -1, 1.5, "4", True], [1, 100, None]),
    ("temperature", [-0.1, 2.1, "hot"], [0, 2, None]),
    ("top_p", [-0.1, 1.1], [0, 0.5, 1]),
    ("stream", ["yes", 1], [True, False, None]),
    ("stream_options", [{"include_usage": True}, []], [{"include_obfuscation": False}, {}, None]),
    (
        "text",
        [
            *("x", {"verbosity": "low"}, {"format": "json"}, {"format": {"type": "xml"}}),
            *({"format": {"type": "text", "name": "x"}}, {"format": {"type": "json_schema"}}),
            *({"format": {**FORM, "name": ""}}, {"format": {**FORM, "schema": 3}}),
        ],
        [{}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}, {"format": FORM}, None],
    ),
    (
        "tools",
        [*("x", [{"type": "web_search"}], ["x"], [{"type": "function"}], [{**TOOL, "defer_loading": True}])],
        [[], [TOOL], [{"type": "function", "name": "f"}], None],
    ),
    (
        "tool_choice",
        [
            "required",
            "always",
            {"type": "function"},
            {"type": "web_search"},
            {"type": "function", "name": "sky"},
        ],
        ["none", "auto", None],
    ),  # there are no tools
    ("parallel_tool_calls", ["no"], [True, False]),
    ("reasoning", ["low", {"effort": 3}, {"summary": "auto"}], [{}, {"effort": None}, {"effort": "low"}]),
    (
        "metadata",
        [
            *([], {"a": 1}, {"a": None}, {"x" * 65: ""}, {"a": "x" * 513}, {"a": "\ud800"}),
            {str(i): "" for i in range(17)},
        ],
        [{}, {"a": "b"}, {"x" * 64: "x" * 512}, {str(i): "" for i in range(16)}, None],
    ),
    ("store", [True, 0, "no"], [False, None]),
    ("previous_response_id", ["resp_1"], [None]),
    ("conversation", ["conv_1", {"id": "conv_1"}], [None]),
    ("prompt", [{"id": "pmpt_1"}], [None]),
    ("background", [True], [False, None]),
    ("truncation", ["auto"], ["disabled", None]),
    ("include", [["reasoning.encrypted_content"]], [[], None]),
    ("max_tool_calls", [1], [None]),
    ("top_logprobs", [1], [0, None]),
    ("logprobs", [True], [False]),
    ("n", [2], [1]),
    ("messages", [[{"role": "user", "content": "hi"}]], [None]),
    ("max_tokens", [5], [None]),
    ("response_format", [{"type": "text"}], [None]),
    ("reasoning_effort", ["low"], [None]),
    ("top_k", [-2], [5]),
    ("guided_regex", [""], ["a+"]),
    ("user", [], ["somebody"]),
    ("context_management", [[{"type": "compaction"}]], [None]),
    ("no_such_field", [1], [None]),
]


def cases(accepted: bool) -> list[Any]:
    return [
        pytest.param(field, value, id=f"{field}={value!r}"[:60])
        for field, bad, good in ROWS
        for value in (good if accepted else bad)
    ]


@pytest.mark.parametrize(("field", "value"), cases(accepted=False))
def test_a_bad_field_is_refused_by_its_name_on_this_route(field: str, value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_responses({**ASK, field: value})
    assert (caught.value.param or "").startswith(field)
    assert field in str(caught.value)


@pytest.mark.parametrize(("field", "value"), cases(accepted=True))
def test_its_neighbour_is_accepted(field: str, value: object) -> None:
    parse_responses({**ASK, field: value})


def test_every_field_is_read_in_one_way() -> None:
    assert not TRANSLATED & REFUSED.keys()
    assert not SAME_AS_CHAT & (TRANSLATED | REFUSED.keys())


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_a_field_that_is_not_built_says_what_to_do(field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_responses({**ASK, field: {"some": "thing"}})
    name, reason = str(caught.value).split(" is not served: ")
    assert name.startswith(f"{field}=")
    assert reason == REFUSED[field][1]


def test_a_request_is_read_as_the_chat_that_means_the_same() -> None:
    asked = {
        "model": "m",
        "instructions": "Be brief.",
        "max_output_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "stop": "x",
        "stream": True,
        "reasoning": {"effort": "low"},
        "input": [
            item("a", "developer"),
            item([{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]),
            item(
                [{"type": "output_text", "text": "d", "annotations": []}], "assistant", type="message", id="1"
            ),
            {**CALL, "id": "fc_1", "status": "completed"},
            {**CALL, "call_id": "c2"},
            *(RESULT, {**RESULT, "call_id": "c2"}, {**CALL, "call_id": "c3"}, {**RESULT, "call_id": "c3"}),
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "sky"},
    }
    function = {"name": "sky", "arguments": "{}"}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in (1, 2, 3)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": "grey"} for i in (1, 2, 3)]
    chat = {
        "model": "m",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "stop": "x",
        "stream": True,
        "reasoning_effort": "low",
        "messages": [
            *({"role": "system", "content": "Be brief."}, {"role": "system", "content": "a"}),
            *(
                {"role": "user", "content": "bc"},
                {"role": "assistant", "content": "d", "tool_calls": calls[:2]},
            ),
            *(*results[:2], {"role": "assistant", "content": "", "tool_calls": calls[2:]}, results[2]),
        ],
        "tools": [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}],
        "tool_choice": {"type": "function", "function": {"name": "sky"}},
    }
    found, same = parse_responses(asked), parse_chat(chat)
    assert found.messages == same.messages
    assert (found.wanted, found.rendering, found.tools) == (same.wanted, same.rendering, same.tools)


def test_a_schema_is_the_one_of_a_chat_but_for_its_name() -> None:
    found = parse_responses({**ASK, "text": {"format": FORM}}).wanted.grammar
    inner = {name: value for name, value in FORM.items() if name != "type"}
    form = {"type": "json_schema", "json_schema": inner}
    same = parse_chat({"model": "m", "messages": [item("hi")], "response_format": form}).wanted.grammar
    assert found == same


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        (
            {"text": {"format": {**FORM, "schema": 3}}},
            "text.format.schema",
            "text.format.schema must be a JSON",
        ),
        (
            {"tools": [{**TOOL, "strict": 1}]},
            "tools[0].strict",
            "tools[0].strict must be true or false, not 1",
        ),
        (
            {"text": {"format": FORM}, "tools": [TOOL]},
            "text.format.schema",
            "text.format.schema cannot be combined with tools",
        ),
        (
            {"text": {"format": FORM}, "guided_regex": "a"},
            "text",
            "text.format beside guided_regex: an answer follows one of them only",
        ),
        (
            {"text": {"format": FORM}, "bad_words": ["x"]},
            "bad_words",
            "bad_words cannot be combined with text.format.schema",
        ),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "reasoning.effort must be one of none"),
    ],
)
def test_an_error_about_a_chats_field_has_this_routes_name(
    more: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_responses({**ASK, **more})
    assert str(caught.value).startswith(message)
    assert (caught.value.param or "").startswith(param)


def test_names_are_changed_around_the_work_on_a_body_of_this_route_only() -> None:
    error = BadRequest("the prompt is empty; give at least one token", param="prompt")
    with pytest.raises(BadRequest) as caught, names_of(parse_responses(ASK)):
        raise error
    assert (caught.value.param, str(caught.value)) == ("input", str(error))
    with pytest.raises(BadRequest) as kept, names_of(parse_chat({"model": "m", "messages": [item("hi")]})):
        raise error
    assert kept.value is error
    with pytest.raises(BadRequest) as nameless, own_names():
        raise BadRequest("too complex")
    assert nameless.value.param is None
