"""Tools and tool messages that are refused, each beside a neighbour that is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.openai_request import parse_chat, parse_tokenize
from busbar.workloads.serving.openai_tools import MAX_TOOLS, Calling, check_tools, parse_tools

USER: dict[str, Any] = {"role": "user", "content": "hi"}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def call(given: str = "1", arguments: object = "{}", **more: Any) -> dict[str, Any]:
    return {"id": given, "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def assistant(*calls: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def result(given: object = "1", content: object = "3") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": given, "content": content}


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
MANY = [tool(f"f{i}") for i in range(MAX_TOOLS + 1)]
# (field of the error, refused, accepted)
ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("tools", {"tools": "f"}, {"tools": [tool()]}),
    ("tools", {"tools": MANY}, {"tools": MANY[1:]}),
    ("tools[0]", {"tools": [{"type": "function"}]}, {"tools": [tool()]}),
    ("tools[0]", {"tools": [tool() | {"type": "custom"}]}, {"tools": [tool() | {"type": "function"}]}),
    ("tools[0]", {"tools": [tool() | {"more": 1}]}, {"tools": [tool()]}),
    ("tools[0].function", {"tools": [tool(more=1)]}, {"tools": [tool(description="d")]}),
    ("tools[0].function.name", {"tools": [tool("")]}, {"tools": [tool("f-1.a_B")]}),
    ("tools[0].function.name", {"tools": [tool("a b")]}, {"tools": [tool("ab")]}),
    ("tools[0].function.name", {"tools": [tool("x" * 65)]}, {"tools": [tool("x" * 64)]}),
    ("tools[1].function.name", {"tools": [tool(), tool()]}, {"tools": [tool(), tool("g")]}),
    ("tools[0].function.description", {"tools": [tool(description=3)]}, {"tools": [tool(description=None)]}),
    ("tools[0].function.strict", {"tools": [tool(strict="yes")]}, {"tools": [tool(strict=True)]}),
    ("tools[0].function.parameters", {"tools": [tool(parameters=[])]}, {"tools": [tool(parameters=SCHEMA)]}),
    ("tools[0].function.parameters", {"tools": [tool(parameters={})]}, {"tools": [tool(parameters=None)]}),
    ("tool_choice", {"tool_choice": "required"}, {"tool_choice": "required", "tools": [tool()]}),
    (
        "tool_choice",
        {"tool_choice": tool("g"), "tools": [tool()]},
        {"tool_choice": tool(), "tools": [tool()]},
    ),
    ("tool_choice", {"tool_choice": "any", "tools": [tool()]}, {"tool_choice": "auto", "tools": [tool()]}),
    (
        "tool_choice",
        {"tool_choice": tool(x=1), "tools": [tool()]},
        {"tool_choice": "none", "tools": [tool()]},
    ),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools"}}, {"tool_choice": None}),
    ("parallel_tool_calls", {"parallel_tool_calls": "no"}, {"parallel_tool_calls": False}),
    (
        "response_format",
        {"tools": [tool()], "response_format": {"type": "json_object"}},
        {"tools": [tool()], "response_format": {"type": "json_object"}, "tool_choice": "none"},
    ),
    ("bad_words", {"tools": [tool()], "bad_words": ["x"]}, {"tools": [tool()], "bad_words": []}),
    ("allowed_token_ids", {"tools": [tool()], "allowed_token_ids": [1]}, {"allowed_token_ids": [1]}),
    (
        "messages[0].tool_calls[0].id",
        {"messages": [assistant(call(given=""))]},
        {"messages": [assistant(call())]},
    ),
    (
        "messages[0].tool_calls[1].id",
        {"messages": [assistant(call(), call())]},
        {"messages": [assistant(call(), call("2"))]},
    ),
    ("messages[0].tool_calls", {"messages": [assistant() | {"tool_calls": 3}]}, {"messages": [assistant()]}),
    (
        "messages[0].tool_calls",
        {"messages": [assistant(call()) | {"role": "user", "content": ""}]},
        {"messages": [assistant(call())]},
    ),
    (
        "messages[0].tool_calls[0]",
        {"messages": [assistant(call(type="custom"))]},
        {"messages": [assistant(call(type="function"))]},
    ),
    (
        "messages[0].tool_calls[0].function.arguments",
        {"messages": [assistant(call(arguments="{"))]},
        {"messages": [assistant(call(arguments='{"x": 1}'))]},
    ),
    (
        "messages[0].tool_calls[0].function.arguments",
        {"messages": [assistant(call(arguments={}))]},
        {"messages": [assistant(call(arguments="{}"))]},
    ),
    ("messages[0].tool_call_id", {"messages": [result()]}, {"messages": [assistant(call()), result()]}),
    (
        "messages[1].tool_call_id",
        {"messages": [assistant(call()), result("2")]},
        {"messages": [assistant(call("2")), result("2")]},
    ),
    (
        "messages[2].tool_call_id",
        {"messages": [assistant(call()), result(), result()]},
        {"messages": [assistant(call(), call("2")), result("2"), result("1")]},
    ),
    (
        "messages[1].content",
        {"messages": [assistant(call()), result(content=None)]},
        {"messages": [assistant(call()), result(content=[{"type": "text", "text": "3"}])]},
    ),
    (
        "chat_template_kwargs",
        {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ),
]


@pytest.mark.parametrize(("param", "bad", "good"), ROWS, ids=[f"{i}-{row[0]}" for i, row in enumerate(ROWS)])
def test_a_bad_body_is_refused_by_the_fields_path_and_its_neighbour_is_taken(
    param: str, bad: dict[str, Any], good: dict[str, Any]
) -> None:
    base = {"model": "m", "messages": [USER]}
    with pytest.raises(BadRequest) as caught:
        parse_chat(base | bad)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300
    parse_chat(base | good)


def test_templates_get_arguments_as_objects() -> None:
    messages = [assistant(call(arguments='{"x": 1}')), result()]
    parsed = parse_chat({"model": "m", "messages": messages}).messages
    assert parsed[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert parsed[0]["content"] == ""
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}', (
        "the request is left as it was"
    )


def test_what_may_be_called_follows_from_the_choice() -> None:
    two = [tool(parameters=SCHEMA), tool("g", strict=True)]
    free = parse_tools({"tools": two})
    assert free is not None
    assert (free.calling, free.needs_grammar, len(free.callable)) == (Calling.AUTO, True, 2)
    named = parse_tools({"tools": two, "tool_choice": tool()})
    assert named is not None
    assert (named.calling, [t.name for t in named.callable], len(named.listed)) == ("required", ["f"], 2)
    assert parse_tools({"tools": two, "tool_choice": "none"}) is None
    plain = parse_tools({"tools": two[:1], "parallel_tool_calls": False})
    assert plain is not None
    assert not plain.needs_grammar
    assert not plain.parallel


def test_the_schemas_of_tools_are_bounded_together() -> None:
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}
    fine = parse_tools(
        {"tools": [tool(f"f{i}", parameters=wide) for i in range(2)], "tool_choice": "required"}
    )
    many = parse_tools(
        {"tools": [tool(f"f{i}", parameters=wide) for i in range(3)], "tool_choice": "required"}
    )
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    loop = parse_tools({"tools": [tool(parameters=endless)], "tool_choice": "required"})
    assert fine is not None
    assert many is not None
    assert loop is not None
    check_tools(fine)
    for wrong, message in ((many, "more than 5000 parts"), (loop, "no finite value")):
        with pytest.raises(BadRequest, match=message):
            check_tools(wrong)


def test_the_tokenize_route_takes_tools_too() -> None:
    body = parse_tokenize({"messages": [USER], "tools": [tool()]})
    assert body.tools is not None
    with pytest.raises(BadRequest):
        parse_tokenize({"messages": [USER], "tools": [tool(), tool()]})
