"""Tool calls of real engines in every format: forced, free and streamed, and what templates are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tests.serving.engines import generate, load_engine, text_of
from tests.serving.inside import TOKEN, serving_inside
from tests.serving.pair import text_model_of
from tests.serving.processes import Service
from tests.serving.tool_models import TEMPLATES, save_tool_model

from busbar.workloads.serving.calling import reader_of, render, with_tools
from busbar.workloads.serving.chat import ChatTemplate
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.engine_link import EngineLink, Stream
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.generation import Job, collect
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.openai_request import parse_chat
from busbar.workloads.serving.openai_response import Choice
from busbar.workloads.serving.openai_tools import parse_tools
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.settings import EngineSettings

MODEL = "tiny"
SKY: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 5}, "day": {"enum": ["today", "tomorrow"]}},
    "required": ["place", "day"],
    "additionalProperties": False,
}
TIME: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "sky", "description": "The sky.", "parameters": SKY}},
    {"type": "function", "function": {"name": "time"}},
]
SCHEMAS = {"sky": SKY, "time": TIME}
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
PROMPT = list(range(70, 90))


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = save_tool_model(tmp_path_factory.mktemp(request.param), request.param)
    return load_engine(folder, deterministic=True, max_running=64)


async def answers(
    loaded: Loaded, count: int, **asked: Any
) -> tuple[list[Choice], list[tuple[str, dict[str, Any]]]]:
    """(answers under these tools, all calls in them that are whole)."""
    tools = parse_tools({"tools": TOOLS} | asked)
    assert tools is not None
    params = [
        await with_tools(
            SamplingParams(max_tokens=250, seed=i, temperature=0.8), tools, text_model_of(loaded)
        )
        for i in range(count)
    ]
    choices, calls = [], []
    for deltas in generate(loaded, [PROMPT] * count, params):
        choice = Choice(0, len(PROMPT), reader=reader_of(tools, text_model_of(loaded), "a"))
        for delta in deltas:
            choice.take(delta, delta.text, delta.finish)
        choices.append(choice)
        if choice.finish == "tool_calls":
            calls += [(str(call.name), json.loads(call.arguments)) for call in choice.calls]
        assert choice.text or choice.calls or not text_of(deltas).strip()
    return choices, calls


async def test_a_forced_answer_is_nothing_but_calls_that_fit(loaded: Loaded) -> None:
    choices, calls = await answers(loaded, 16, tool_choice="required")
    ended = [choice for choice in choices if choice.finish == "tool_calls"]
    assert len(ended) >= 8
    assert not any(choice.text for choice in ended)
    assert {name for name, _ in calls} == {"sky", "time"}
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])


async def test_a_named_tool_is_called_once(loaded: Loaded) -> None:
    choices, calls = await answers(loaded, 8, tool_choice=TOOLS[0] | {"function": {"name": "sky"}})
    assert {name for name, _ in calls} == {"sky"}
    assert len(calls) == sum(choice.finish == "tool_calls" for choice in choices)


async def test_without_parallel_calls_there_is_one(loaded: Loaded) -> None:
    choices, _ = await answers(loaded, 8, tool_choice="required", parallel_tool_calls=False)
    assert {len(choice.calls) for choice in choices} == {1}


async def test_a_free_answer_with_strict_tools_is_text_or_fits(loaded: Loaded) -> None:
    strict = [
        {"type": "function", "function": {"name": "sky", "strict": True, "parameters": SKY}},
        TOOLS[1],
    ]
    tools = parse_tools({"tools": strict})
    assert tools is not None
    params = await with_tools(SamplingParams(max_tokens=40, seed=1), tools, text_model_of(loaded))
    assert params.grammar is not None
    form, tokenizer = loaded.template.tool_format, loaded.core.tokenizer
    assert form is not None

    def follows(text: str) -> bool:
        assert params.grammar is not None
        return (
            loaded.core.grammars.compile(params.grammar)
            .start()
            .take(tokenizer.encode(text, add_special_tokens=False).ids)
        )

    good, bad = '{"place": "x", "day": "today"}', '{"place": 3'
    opening = {
        "hermes": "<tool_call>\n",
        "llama": "",
        "mistral": "[TOOL_CALLS][",
        "mistral-args": "[TOOL_CALLS]",
    }
    name = "sky[ARGS]" if form == "mistral-args" else f'{{"name": "sky", "{form.argument_key}": '
    assert follows("Some text. It is no call.")
    assert follows(opening[form] + name + good)
    assert not follows(opening[form] + name + bad)
    if form != "llama":
        assert follows("Text first.\n" + opening[form] + name + good)
        assert not follows("Text first.\n" + opening[form] + name + bad)


def test_a_template_is_given_the_tools_the_calls_and_their_results(loaded: Loaded) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "sky", "arguments": '{"place": "x"}'}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "grey"},
    ]
    text = render(parse_chat({**ASK, "messages": messages}), text_model_of(loaded))
    assert "The sky." in text
    assert "grey" in text
    if loaded.template.tool_format != "mistral-args":
        assert '"arguments": {"place": "x"}' in text
    assert "The sky." not in render(
        parse_chat({**ASK, "messages": messages, "tool_choice": "none"}), text_model_of(loaded)
    )


def test_the_format_is_read_off_the_template(loaded: Loaded, tmp_path: Path) -> None:
    for name, source in TEMPLATES.items():
        assert ChatTemplate(source, {}).tool_format == name
    assert ChatTemplate("{{ tools }}<tool_call><function=f>", {}).tool_format is None
    assert ChatTemplate("{{ tools }}", {}).has_tools
    assert not ChatTemplate("{{ messages }}<tool_call>", {}).has_tools
    assert ChatTemplate(None, {}).tool_format is None


@pytest.mark.parametrize(
    ("source", "message"),
    [(None, "no chat template"), ("{{ messages }}", "knows no tools"), ("{{ tools }}", "does not read")],
)
async def test_a_template_without_tools_says_so(
    loaded: Loaded, source: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(loaded), "template", ChatTemplate(source, {}))
    body = parse_chat(ASK)

    async def ask() -> None:
        assert body.tools is not None
        render(body, text_model_of(loaded))
        await with_tools(SamplingParams(), body.tools, text_model_of(loaded))

    with pytest.raises(BadRequest, match=message):
        await ask()


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_free_answer_without_parallel_calls_is_left_after_its_first_call(
    loaded: Loaded, parallel: bool
) -> None:
    """The model's tokens are given here, because a random one calls nothing by itself."""
    tools = parse_tools({"tools": TOOLS, "parallel_tool_calls": parallel})
    assert tools is not None
    model = text_model_of(loaded)
    params = await with_tools(SamplingParams(), tools, model)
    choice = Choice(0, 1, reader=reader_of(tools, model, "a"))
    job, stream = Job([1], params, choice, model.text_of(params)), Stream(1, confirms=True)
    form = loaded.template.tool_format
    assert form is not None
    call = f'{{"name": "time", "{form.argument_key}": {{}}}}'
    first = {"hermes": f"<tool_call>{call}", "llama": call, "mistral": f"[TOOL_CALLS][{call}"}
    pieces = [first.get(form, "[TOOL_CALLS]time[ARGS]{}"), " and", " so on"]
    for index, text in enumerate(pieces, 1):
        tokens = tuple(loaded.core.tokenizer.encode(text, add_special_tokens=False).ids)
        stream.put(Delta("1", tokens, index, finish="length" if index == 3 else None))
    await collect(EngineLink(), [stream], [job])
    assert (job.choice.finish, job.choice.completion_tokens) == (
        ("length", 3) if parallel else ("tool_calls", 1)
    )
    assert [call.name for call in job.choice.calls] == ["time"]


# -- through the ordinary client ------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = save_tool_model(tmp_path_factory.mktemp("served"), "hermes")
    engine = EngineSettings(folder, block_tokens=16, max_running=8, deterministic=True, threads=1)
    with serving_inside(engine, MODEL) as running:
        yield running


@pytest.fixture
def client(server: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as made:
        yield made


def joined(chunks: Any) -> tuple[dict[int, tuple[str, str, str]], str | None]:
    """(index → id, name, arguments; finish reason) of a stream."""
    calls: dict[int, tuple[str, str, str]] = {}
    finish = None
    for chunk in chunks:
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        for piece in choice.delta.tool_calls or []:
            if piece.id is not None:
                calls[piece.index] = (piece.id, piece.function.name, "")
            given, name, text = calls[piece.index]
            calls[piece.index] = (given, name, text + (piece.function.arguments or ""))
    return calls, finish


def test_forced_calls_are_the_same_whole_and_streamed_and_go_on_to_a_result(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASK, "tool_choice": "required", "max_tokens": 300, "seed": 3}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.content is None
    whole = [
        (c.function.name, c.function.arguments) for c in message.tool_calls or [] if c.type == "function"
    ]
    assert whole
    chunks = list(client.chat.completions.create(**asked, stream=True))
    calls, finish = joined(chunks)
    assert [call[1:] for call in calls.values()] == whole
    assert finish == "tool_calls"
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > len(whole), "in pieces"
    results: list[Any] = [
        {"role": "tool", "tool_call_id": given, "content": "3"} for given, _, _ in calls.values()
    ]
    said: Any = [
        {"id": given, "type": "function", "function": {"name": name, "arguments": arguments}}
        for given, name, arguments in calls.values()
    ]
    said = {"role": "assistant", "content": None, "tool_calls": said}
    after = client.chat.completions.create(
        model=MODEL, messages=[*ASK["messages"], said, *results], tools=TOOLS, max_tokens=5
    )
    assert after.usage is not None
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[*ASK["messages"], *results], tools=TOOLS)
    assert caught.value.param == "messages[1].tool_call_id"


def test_an_unforced_answer_of_a_model_that_does_not_call_is_its_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASK, "max_tokens": 20, "temperature": 0}
    free = client.chat.completions.create(**asked).choices[0]
    assert not free.message.tool_calls
    assert free.message.content
    pieces = client.chat.completions.create(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == free.message.content


def test_the_clients_own_strict_tools_are_parsed(client: openai.OpenAI) -> None:
    from pydantic import BaseModel

    class Look(BaseModel):
        far: bool

    answer = client.chat.completions.parse(
        **{**ASK, "tools": [openai.pydantic_function_tool(Look)]},
        tool_choice="required",
        max_tokens=200,
        parallel_tool_calls=False,  # so that it ends soon
        seed=2,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, Look)
