"""/v1/responses of the engine: its events, and the same answers as the chat route gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from tests.serving.adapted import Family
from tests.serving.inside import TOKEN, serving_inside
from tests.serving.processes import Service
from tests.serving.test_responses_request import ASK, FORM, SCHEMA, TOOL
from tests.serving.tool_models import save_tool_model

from busbar.kube.contracts.streams import SIDE_LINE
from busbar.workloads.serving.errors import BadRequest, EngineFailed, EngineLeaving
from busbar.workloads.serving.openai_response import Choice
from busbar.workloads.serving.responses_answer import ResponsesAnswer
from busbar.workloads.serving.responses_request import parse_responses
from busbar.workloads.serving.settings import EngineSettings
from busbar.workloads.serving.toolreader import CallPiece


def answer(for_gateway: bool = False, **more: Any) -> ResponsesAnswer:
    return ResponsesAnswer(
        id="resp-1",
        created=5,
        model="m",
        chat=True,
        for_gateway=for_gateway,
        token_text=str,
        token_bytes=lambda token: b"",
        asked=parse_responses({**ASK, **more}),
    )


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for text in data.decode().split("\n\n")[:-1]:
        event, lines = text.split("\n", 1)
        document = json.loads(lines.split("\n")[0].removeprefix("data: "))
        assert event == f"event: {document['type']}"
        found.append(document)
    return found


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in found]


TEXT_ENDS = ["output_text.done", "content_part.done", "output_item.done"]


def test_a_text_comes_in_the_events_of_openai_numbered_without_a_gap() -> None:
    made, choice = answer(), Choice(0, 3)
    data = made.opening([choice])
    for text, finish in (("a", None), ("", None), ("b", None), ("c", "stop")):
        choice.text, choice.finish = text, finish
        choice.completion_tokens += 1
        data += made.chunk(choice, [choice])
    found = events(data + made.ending([choice]))
    deltas = ["output_text.delta"]
    assert kinds(found) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *(*deltas * 3, *TEXT_ENDS, "completed"),
    ]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["delta"] for event in found if "delta" in event] == ["a", "b", "c"]
    assert {event["item_id"] for event in found if "item_id" in event} == {"msg-resp-1-0"}
    assert found[0]["response"]["status"] == found[1]["response"]["status"] == "in_progress"
    assert found[0]["response"]["usage"] is None
    assert found[2]["item"]["content"] == []
    assert found[3]["part"]["text"] == ""
    assert found[7]["text"] == found[8]["part"]["text"] == found[9]["item"]["content"][0]["text"] == "abc"
    last = found[-1]["response"]
    assert (last["status"], last["store"], last["usage"]["input_tokens"]) == ("completed", False, 3)
    whole = Choice(0, 3, "abc", completion_tokens=4, finish="stop")
    assert answer().whole([whole]) == last


def test_an_answer_cut_short_is_incomplete_and_says_why() -> None:
    made, choice = answer(), Choice(0, 3, "a", finish="length")
    found = events(made.chunk(choice, [choice]) + made.ending([choice]))
    assert kinds(found)[-1] == "incomplete"
    assert found[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found[-1]["response"]["output"][0]["status"] == "incomplete"


def test_an_answer_without_a_text_is_an_empty_message() -> None:
    made, choice = answer(), Choice(0, 3, finish="stop")
    found = events(made.chunk(choice, [choice]))
    assert kinds(found) == ["output_item.added", "content_part.added", *TEXT_ENDS]
    assert made.whole([Choice(0, 3, finish="stop")])["output"][0]["content"][0]["text"] == ""


def test_text_behind_a_call_ends_it_also_where_both_come_at_once() -> None:
    made, choice = answer(tools=[TOOL]), Choice(0, 3, "Well,")
    data = made.chunk(choice, [choice])
    choice.calls = [CallPiece(0, '{"a"', "c1", "sky")]
    data += made.chunk(choice, [choice])
    choice.text = "and"
    choice.calls = [CallPiece(0, ":1}"), CallPiece(1, "{}", "c2", "sky")]
    choice.finish = "tool_calls"
    data += made.chunk(choice, [choice])
    found = events(data + made.ending([choice]))
    arguments = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(found) == [
        *("output_item.added", "content_part.added", "output_text.delta", *TEXT_ENDS),
        *("output_item.added", arguments[0], *arguments),
        *("output_item.added", "content_part.added", "output_text.delta", *TEXT_ENDS),
        *("output_item.added", *arguments, "completed"),
    ]
    output = found[-1]["response"]["output"]
    assert [(each["type"], each["status"]) for each in output] == [
        ("message", "completed"),
        ("function_call", "completed"),
    ] * 2
    assert [each["arguments"] for each in output[1::2]] == ['{"a":1}', "{}"]
    assert [event["output_index"] for event in found[:-1]] == [0] * 6 + [1] * 5 + [2] * 6 + [3] * 4


def test_for_the_gateway_the_last_event_of_several_tells_all_their_tokens() -> None:
    made, choice = answer(for_gateway=True), Choice(0, 3, tokens=[5])
    choice.text, choice.finish = "ab", "stop"
    choice.tokens += [6]
    *others, last = made.chunk(choice, [choice]).split(b"\n\n")[:-1]
    assert last.endswith(b"\n:busbar 0 1 3 0 5,6")
    assert len(others) == 5
    assert not any(b":busbar" in event for event in others)
    assert choice.tokens == []
    choice = Choice(0, 3, tokens=[5])
    assert answer().chunk(choice, [choice]) == b""
    moving = Choice(0, 3, tokens=[5])
    assert answer(for_gateway=True).chunk(moving, [moving]) == b":\n:busbar 0 0 3 0 5\n\n", (
        "no event tells of it yet"
    )


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (EngineFailed("broken"), "server_error", b"! failed"),
        (EngineLeaving("bye"), "server_error", b"! leaving"),
        (BadRequest("too complex"), "invalid_prompt", b""),
    ],
)
def test_a_stream_that_fails_ends_with_its_event(error: Any, code: str, cause: bytes) -> None:
    made, choice = answer(for_gateway=True), Choice(0, 3, "a")
    made.chunk(choice, [choice])
    sent, _, side = made.failed(error, [choice]).removesuffix(b"\n\n").partition(SIDE_LINE)
    (event,) = events(sent + b"\n\n")
    assert event["type"] == "response.failed"
    assert event["response"]["error"] == {"code": code, "message": str(error)}
    assert (event["response"]["status"], event["response"]["output"][0]["status"]) == ("failed", "incomplete")
    assert side == cause


def test_an_answer_repeats_the_request_and_is_a_response_of_openais_client() -> None:
    asked: dict[str, Any] = {
        "instructions": "Be \ud800 brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "temperature": 0.25,
        "top_p": 0.5,
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [{**TOOL, "strict": True}],
        "text": {"format": FORM},
        "reasoning": {"effort": "low"},
    }
    found = answer(**asked).whole([Choice(0, 3, "a", finish="stop")])
    for name, value in {**asked, "reasoning": {"effort": "low", "summary": None}}.items():
        assert found[name] == value
    sent = events(answer(**asked).opening([]))[0]["response"]
    assert sent["instructions"] == asked["instructions"], "half a character came back as its escape"
    Response.model_validate({**found, "instructions": "Be brief."}, strict=True)


# -- through the ordinary client ------------------------------------------------------------------

MODEL = "tiny"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SAID: dict[str, Any] = {"model": MODEL, "input": "hi"}
ENDLESS: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
}
"""No finite arguments fit its schema."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = save_tool_model(tmp_path_factory.mktemp("responses"), "hermes")
    engine = EngineSettings(folder, block_tokens=16, max_running=8, deterministic=True, threads=1)
    with serving_inside(engine, MODEL) as running:
        yield running


@pytest.fixture
def client(server: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as made:
        yield made


def test_a_text_is_that_of_the_chat_route_whole_and_streamed(client: openai.OpenAI) -> None:
    for more in ({"temperature": 0}, {"temperature": 0.9, "top_p": 0.8, "extra_body": {"seed": 5}}):
        chat = client.chat.completions.create(**CHAT, max_tokens=24, **more)
        whole = client.responses.create(**SAID, max_output_tokens=24, **more)
        assert whole.output_text == chat.choices[0].message.content
        assert chat.usage is not None
        assert whole.usage is not None
        assert whole.usage.input_tokens == chat.usage.prompt_tokens
        assert whole.usage.output_tokens == chat.usage.completion_tokens
        assert (whole.status, chat.choices[0].finish_reason) in (
            ("incomplete", "length"),
            ("completed", "stop"),
        )
        streamed = list(client.responses.create(**SAID, max_output_tokens=24, **more, stream=True))
        text = "".join(e.delta for e in streamed if e.type == "response.output_text.delta")
        assert text == whole.output_text
        assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
        last = streamed[-1]
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.output_text == text
        assert last.response.usage is not None
        assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_a_conversation_is_that_of_the_chat_route(client: openai.OpenAI) -> None:
    first = client.responses.create(**SAID, instructions="Be brief.", max_output_tokens=6, temperature=0)
    assert first.store is False
    assert first.instructions == "Be brief."
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6, temperature=0)
    asked: list[Any] = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "more"}]
    more: dict[str, Any] = {"instructions": "Be brief.", "max_output_tokens": 6, "temperature": 0}
    again = client.responses.create(model=MODEL, input=asked, **more)
    assert again.output_text == chat.choices[0].message.content
    third = client.responses.create(model=MODEL, input=asked, **more)
    assert third.usage is not None
    assert third.usage.input_tokens_details.cached_tokens > 0


def test_a_schema_holds_and_the_clients_own_parser_reads_the_answer(client: openai.OpenAI) -> None:
    form: Any = {"format": {**FORM, "schema": {**SCHEMA, "required": ["a"], "additionalProperties": False}}}
    whole = client.responses.create(**SAID, text=form, max_output_tokens=90, extra_body={"seed": 1})
    jsonschema.validate(json.loads(whole.output_text), form["format"]["schema"])

    class Look(BaseModel):
        far: bool

    parsed = client.responses.parse(**SAID, text_format=Look, max_output_tokens=90, extra_body={"seed": 1})
    assert isinstance(parsed.output_parsed, Look)


def test_the_clients_own_reader_of_streams_gets_the_whole_answer(client: openai.OpenAI) -> None:
    with client.responses.stream(**SAID, max_output_tokens=8, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response() if "response.completed" in kinds else None
    whole = client.responses.create(**SAID, max_output_tokens=8, temperature=0)
    assert kinds[-1] == f"response.{whole.status}"
    assert final is None or final.output_text == whole.output_text


def test_forced_calls_are_those_of_the_chat_route_and_go_on_to_a_result(client: openai.OpenAI) -> None:
    function = {name: value for name, value in TOOL.items() if name != "type"}
    tools: Any = [{"type": "function", "function": function}]
    chat = client.chat.completions.create(**CHAT, tools=tools, tool_choice="required", max_tokens=300, seed=3)
    said = chat.choices[0].message.tool_calls or []
    expected = [(call.function.name, call.function.arguments) for call in said if call.type == "function"]
    assert expected
    asked: dict[str, Any] = {**SAID, "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 300}
    asked["extra_body"] = {"seed": 3}
    whole = client.responses.create(**asked)
    calls = [each for each in whole.output if each.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == expected
    assert len(calls) == len(whole.output)
    streamed = list(client.responses.create(**asked, stream=True))
    done = [event for event in streamed if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [arguments for _, arguments in expected]
    pieces = [event for event in streamed if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in pieces) == "".join(arguments for _, arguments in expected)
    assert len(pieces) > len(calls)
    results = [{"type": "function_call_output", "call_id": c.call_id, "output": "grey"} for c in calls]
    asked_again: Any = [{"role": "user", "content": "hi"}, *whole.output, *results]
    after = client.responses.create(model=MODEL, input=asked_again, tools=asked["tools"], max_output_tokens=5)
    assert after.output_text
    twice: Any = [*asked_again, results[0]]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=twice, tools=asked["tools"])
    assert caught.value.param == f"input[{len(asked_again)}].call_id"


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"store": True}, "store", "nothing is stored here; leave it out"),
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id",
            "send the earlier items again in `input`",
        ),
        ({"model": "other"}, "model", "other"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "maximum context length"),
        ({"input": "x " * 5000}, "input", "maximum context length"),
        ({"text": {"format": {**FORM, "schema": {"$ref": "#"}}}}, "text.format.schema", "no finite value"),
        ({"tools": [ENDLESS]}, "tools[0].parameters", r"^[^\n]*tools\[0\]\.parameters"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_names_the_field_of_this_route_before_anything_is_sent(
    client: openai.OpenAI, more: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.responses.create(**{**SAID, **more}, stream=stream)
    assert caught.value.param == param
    assert caught.value.status_code == (404 if param == "model" else 400)


def test_an_answer_that_fails_in_its_middle_ends_with_the_event_of_a_failure(client: openai.OpenAI) -> None:
    body = {"guided_grammar": 'start: e\ne: e e | e e e | "a" | "b"', "logit_bias": {"0": -100}}
    stream = client.responses.create(**SAID, max_output_tokens=400, extra_body=body, stream=True)
    last = list(stream)[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "invalid_prompt"
    assert "too complex" in last.response.error.message
    assert last.response.usage is not None
    assert 0 < last.response.usage.output_tokens < 400


def test_an_adapter_is_asked_for_by_its_name(tiny: Family) -> None:
    engine = EngineSettings(tiny.folder, block_tokens=16, threads=1, adapters=tiny.sources)
    name = f"{MODEL}:{tiny.sources[0].name}"
    with (
        serving_inside(engine, MODEL) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key=TOKEN, max_retries=0) as client,
    ):
        chat = client.chat.completions.create(**{**CHAT, "model": name}, max_tokens=12, temperature=0)
        found = client.responses.create(**{**SAID, "model": name}, max_output_tokens=12, temperature=0)
        plain = client.responses.create(**SAID, max_output_tokens=12, temperature=0)
    assert found.model == name
    assert found.output_text == chat.choices[0].message.content
    assert found.output_text != plain.output_text
