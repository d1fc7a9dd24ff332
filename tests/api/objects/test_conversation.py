"""What the try-it box's form becomes, and what is refused before a key is made."""

from __future__ import annotations

import json

import pytest

from busbar.api.errors import Invalid
from busbar.api.objects.conversation import (
    MAX_CONVERSATION_CHARS,
    MAX_JSON_CHARS,
    MAX_PROMPT_CHARS,
    MAX_TOKENS,
    Target,
    ToolChoice,
    chatted,
    prompted,
)
from busbar.workloads.serving.openai_request import parse_chat, parse_completion

TARGET = Target("ada-lab", "chat")
SAID = json.dumps([{"role": "user", "content": "hello"}])
TOOL = {"type": "function", "function": {"name": "f"}}


def test_a_prompt_is_asked_of_the_model_or_of_one_of_its_adapters() -> None:
    alone = prompted(TARGET, "def ")
    assert (alone.path, alone.body["model"], alone.body["prompt"]) == (
        "/v1/completions",
        "ada-lab/chat",
        "def ",
    )
    adapted = prompted(Target("ada-lab", "chat", "sql", max_tokens=7, temperature=0.0), "def ")
    assert adapted.body["model"] == "ada-lab/chat:sql"
    assert (adapted.body["max_tokens"], adapted.body["temperature"]) == (7, 0.0)
    assert (adapted.body["stream"], adapted.body["stream_options"]) == (True, {"include_usage": True})


def test_a_turn_has_all_messages_and_only_what_was_filled_in() -> None:
    plain = chatted(TARGET, SAID)
    assert plain.path == "/v1/chat/completions"
    assert plain.body["messages"] == json.loads(SAID)
    assert not {"tools", "tool_choice", "response_format"} & set(plain.body)
    full = chatted(TARGET, SAID, json.dumps([TOOL]), ToolChoice.REQUIRED, '{"type": "object"}').body
    assert (full["tools"], full["tool_choice"]) == ([TOOL], "required")
    inner = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert full["response_format"] == {"type": "json_schema", "json_schema": inner}


BAD = [
    (
        "{",
        "",
        "",
        "messages must be JSON; line 1, column 2: Expecting property name enclosed in double quotes",
    ),
    ("[]", "", "", "the conversation has no message yet"),
    ('{"role": "user"}', "", "", "messages must be a list of messages"),
    ('["hello"]', "", "", "messages must be a list of messages"),
    (f"[{'1' * 5000}]", "", "", "messages: a number is too long, or the JSON is nested too deeply"),
    (
        " " * (MAX_CONVERSATION_CHARS + 1),
        "",
        "",
        "at most 100000 are sent from here, begin a new conversation",
    ),
    (SAID, '[{"type":\n"function",}]', "", "tools must be JSON; line 2, column 12: "),
    (SAID, json.dumps(TOOL), "", "tools must be a list of tools: [{…}, …]"),
    (SAID, " " * MAX_JSON_CHARS + "[]", "", "at most 50000 are sent from here, shorten it"),
    (SAID, "", "[]", "schema must be a JSON schema: an object, {…}"),
    (SAID, "", "[" * 100_000, "schema: 100000 characters; at most 50000 are sent from here, shorten it"),
]


@pytest.mark.parametrize(("messages", "tools", "schema", "sentence"), BAD)
def test_a_text_of_the_form_that_does_not_fit_is_named(
    messages: str, tools: str, schema: str, sentence: str
) -> None:
    with pytest.raises(Invalid) as caught:
        chatted(TARGET, messages, tools, ToolChoice.AUTO, schema)
    assert sentence in str(caught.value)
    assert caught.value.field in ("messages", "tools", "schema")


def test_our_engine_takes_what_the_box_sends() -> None:
    """Under the name that the gateway gives the model there; a field that the engine does not know would be its 400."""
    schema = '{"type": "object", "properties": {"name": {"type": "string"}}}'
    result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = json.dumps([*json.loads(SAID), {"role": "assistant", "content": "", "tool_calls": [call]}, result])
    with_tools = parse_chat(chatted(TARGET, said, json.dumps([TOOL]), ToolChoice.REQUIRED).body)
    assert with_tools.tools is not None
    assert with_tools.wanted.stream
    assert with_tools.wanted.include_usage
    formed = parse_chat(chatted(TARGET, SAID, schema=schema).body)
    assert formed.wanted.grammar is not None
    assert parse_completion(prompted(TARGET, "def ").body).prompts == ("def ",)


def test_numbers_and_prompts_out_of_range_are_refused_beside_accepted_ones() -> None:
    prompted(Target("n", "s", max_tokens=MAX_TOKENS, temperature=2.0), "p" * MAX_PROMPT_CHARS)
    for target, prompt, field in (
        (Target("n", "s", max_tokens=MAX_TOKENS + 1), "p", "max_tokens"),
        (Target("n", "s", max_tokens=0), "p", "max_tokens"),
        (Target("n", "s", temperature=2.1), "p", "temperature"),
        (Target("n", "s", temperature=float("nan")), "p", "temperature"),
        (Target("n", "s"), "p" * (MAX_PROMPT_CHARS + 1), "prompt"),
        (Target("n", "s"), " \n", "prompt"),
    ):
        with pytest.raises(Invalid) as caught:
            prompted(target, prompt)
        assert caught.value.field == field
