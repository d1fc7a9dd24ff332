"""The gateway in front of our real serving engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError
from tests.gateway.parts import KEY_A, House, route, text_of
from tests.serving.processes import Running, serving

from busbar.kube.contracts.workload import ReplicaRole

pytestmark = pytest.mark.engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama on disk."""
    import torch
    from tests.serving.models import save_model

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gateway-model")
    save_model(folder)
    return folder


def at(*engines: Running) -> dict[str, Any]:
    endpoints = [
        {"pod": f"m-1-{index}", "url": engine.url, "ready": True, "draining": False}
        for index, engine in enumerate(engines)
    ]
    return route("m", *endpoints, bearer="secret")


def client(house: House) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=house.public + "/v1", api_key=KEY_A, max_retries=0)


AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | "b"'
"""Takes more time with every token."""
ASK: dict[str, Any] = {
    "model": "m",
    "prompt": "def add(a, b):",
    "max_tokens": 24,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


async def test_completions_streams_and_usage_of_the_real_engine(house: House, model: Path) -> None:
    with serving(model, "--model-id", "m", token="secret") as engine:
        await house.publish(at(engine))
        async with client(house) as openai:
            whole = await openai.completions.create(**ASK)
            stream = await openai.completions.create(**ASK, stream=True)
            chunks = [chunk async for chunk in stream]
            shown = await openai.completions.create(
                **ASK, stream=True, stream_options={"include_usage": True}
            )
            last = [chunk async for chunk in shown][-1]
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert all(chunk.usage is None for chunk in chunks)
        assert whole.usage is not None
        assert last.usage == whole.usage
        await house.api.wait_for(3)
        assert house.api.total("id-a") == (
            3,
            3 * whole.usage.prompt_tokens,
            3 * whole.usage.completion_tokens,
        )


async def test_schemas_vectors_and_tokens_of_the_real_engine(house: House, model: Path) -> None:
    with serving(model, "--model-id", "m", token="secret") as engine:
        await house.publish(at(engine))
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        strict = {"additionalProperties": False} | schema
        form["json_schema"]["schema"] = strict
        chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": 1}
        async with client(house) as openai:
            whole = await openai.chat.completions.create(**chat, max_tokens=90, response_format=form)
            stream = await openai.chat.completions.create(
                **chat, max_tokens=90, response_format=form, stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == whole.choices[0].message.content
            assert json.loads(text)["a"] in (1, 2)
            found = await openai.embeddings.create(model="m", input=["def add", "x"])
            assert [len(each.embedding) for each in found.data] == [64, 64]
            with pytest.raises(BadRequestError) as caught:
                await openai.embeddings.create(model="m", input=[])
            assert caught.value.param == "input"
            wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
            with pytest.raises(BadRequestError, match="no finite value"):
                await openai.chat.completions.create(**chat, response_format=wrong)
            with pytest.raises(APIError, match="too complex"):
                [
                    chunk
                    async for chunk in await openai.completions.create(
                        model="m",
                        prompt="x",
                        max_tokens=400,
                        stream=True,
                        logit_bias={"0": -100},
                        extra_body={"guided_grammar": AMBIGUOUS},
                    )
                ]
        status, tokens = await house.ask_at("/tokenize", prompt="def add")
        assert (status, tokens["count"]) == (200, len(tokens["tokens"]))
        status, text = await house.ask_at("/detokenize", tokens=tokens["tokens"])
        assert (status, text) == (200, {"prompt": "def add"})
        await house.api.wait_for(4)  # what has no tokens is not recorded
        assert whole.usage is not None
        records = [house.api.records[name] for name in sorted(house.api.records)]
        counts = [(record["promptTokens"], record["completionTokens"]) for record in records]
        answer = (whole.usage.prompt_tokens, whole.usage.completion_tokens)
        assert counts[:3] == [answer, answer, (found.usage.prompt_tokens, 0)]
        assert 0 < counts[3][1] < 400, "what came before the error"
        assert engine.status()["kvBlocksFree"] == engine.status()["kvBlocksTotal"]


async def test_responses_of_the_real_engine_are_its_chats_and_are_counted(house: House, model: Path) -> None:
    asked: dict[str, Any] = {"model": "m", "temperature": 0, "extra_body": {"ignore_eos": True}}
    with serving(model, "--model-id", "m", token="secret") as engine:
        await house.publish(at(engine))
        async with client(house) as openai:
            chat = await openai.chat.completions.create(
                **asked, messages=[{"role": "user", "content": "hi"}], max_tokens=24
            )
            whole = await openai.responses.create(**asked, input="hi", max_output_tokens=24)
            stream = await openai.responses.create(**asked, input="hi", max_output_tokens=24, stream=True)
            events = [event async for event in stream]
            with pytest.raises(BadRequestError, match="nothing is stored here") as caught:
                await openai.responses.create(**asked, input="hi", store=True, stream=True)
            assert caught.value.param == "store"
    assert whole.output_text == chat.choices[0].message.content
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert whole.usage is not None
    await house.api.wait_for(3)
    assert house.api.total("id-a") == (3, 3 * whole.usage.input_tokens, 3 * 24)


async def test_a_responses_stream_that_no_other_engine_takes_ends_with_its_error_and_counts_what_came(
    house: House, tmp_path: Path
) -> None:
    from tests.serving.models import save_deep_model

    await house.stop_gateway()
    house.overrides["hold_timeout_s"] = 5.0
    await house.start_gateway()
    save_deep_model(tmp_path / "deep")
    with serving(tmp_path / "deep", "--model-id", "m", token="secret") as engine:
        await house.publish(at(engine))
        async with client(house) as openai:
            events = []
            async for event in await openai.responses.create(
                model="m", input="hi", stream=True, extra_body={"ignore_eos": True}
            ):
                events.append(event)
                if event.type == "response.output_text.delta":
                    engine.process.kill()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "error"
    assert "no other replica" in last.message
    await house.api.wait_for(1)
    requests, prompt, completion = house.api.total("id-a")
    assert (requests, prompt > 0) == (1, True)
    assert sum(event.type == "response.output_text.delta" for event in events) <= completion < 400


async def test_no_request_fails_while_one_of_two_engines_drains_and_leaves(house: House, model: Path) -> None:
    with (
        serving(model, "--model-id", "m", token="secret") as old,
        serving(model, "--model-id", "m", token="secret") as new,
    ):
        await house.publish(at(old, new))
        expected = (await house.ask(**_raw()))[1]["choices"][0]["text"]
        requests = [asyncio.create_task(house.stream(**_raw())) for _ in range(6)]
        await asyncio.sleep(0.05)
        old.process.send_signal(signal.SIGTERM)  # before the routes change
        requests += [asyncio.create_task(house.stream(**_raw())) for _ in range(6)]
        assert {text_of(stream) for stream in await asyncio.gather(*requests)} == {expected}


async def test_no_answer_changes_while_engines_end_and_streams_move(tmp_path: Path) -> None:
    from tests.gateway.disturbance import Disturbance, Event
    from tests.serving.models import save_model

    save_model(tmp_path / "model", num_hidden_layers=8)
    (tmp_path / "house").mkdir()
    disturbance = Disturbance(tmp_path / "house", tmp_path / "model", clients=4, max_tokens=32)
    happenings = [Event.KILL, Event.MIGRATE, Event.TERMINATE, Event.MIGRATE, Event.SCALE_DOWN, Event.MIGRATE]
    report = await disturbance.run(happenings, lambda: None)
    assert report.events == {"kill": 1, "terminate": 1, "scale-down": 1, "migrate": 3}
    assert report.moved["copied"] > 0
    assert (report.failed, report.changed, report.broken) == ([], [], 0)
    assert report.resumed + report.moved_on > 0
    assert report.counted == report.expected


async def test_no_answer_changes_while_engines_with_roles_end_on_both_sides(tmp_path: Path) -> None:
    from tests.gateway.disturbance import Disturbance, Event
    from tests.serving.models import save_model

    save_model(tmp_path / "model", num_hidden_layers=16)
    (tmp_path / "house").mkdir()
    roles = (ReplicaRole.PREFILL, ReplicaRole.DECODE)
    disturbance = Disturbance(tmp_path / "house", tmp_path / "model", clients=4, max_tokens=32, roles=roles)
    sides = [Event.KILL, Event.KILL, Event.TERMINATE, Event.SCALE_DOWN]
    report = await disturbance.run(sides, lambda: None)
    assert report.events == {"kill": 2, "terminate": 1, "scale-down": 1}
    assert (report.failed, report.changed, report.broken) == ([], [], 0)
    assert report.moved_on > 0
    assert report.counted == report.expected


async def test_a_stream_of_an_adapter_goes_on_at_another_engine(house: House, tmp_path: Path) -> None:
    from tests.serving.adapted import save_adapter
    from tests.serving.models import save_model

    base = save_model(tmp_path / "model", num_hidden_layers=16)
    save_adapter(base, tmp_path / "lora", 3)
    flags = ("--model-id", "m", "--adapter", f"a={tmp_path / 'lora'}")
    ask = {**ASK, "model": "m:a", "max_tokens": 60}
    with (
        serving(tmp_path / "model", *flags, token="secret") as first,
        serving(tmp_path / "model", *flags, token="secret") as second,
    ):
        async with client(house) as openai:
            await house.publish({**at(second), "adapters": [{"name": "a"}]})
            whole = (await openai.completions.create(**ask)).choices[0].text
            plain = (await openai.completions.create(**{**ask, "model": "m"})).choices[0].text
            await house.publish({**at(first, second), "adapters": [{"name": "a"}]})
            pieces = []
            async for chunk in await openai.completions.create(**ask, stream=True):
                pieces.append(chunk.choices[0].text)
                if len(pieces) == 3:
                    first.process.kill()
    assert "".join(pieces) == whole != plain


async def test_a_stream_of_the_only_replica_goes_on_there_when_its_server_was_started_again(
    house: House, tmp_path: Path
) -> None:
    from tests.serving.models import save_deep_model

    save_deep_model(tmp_path / "deep")
    flags = ("--model-id", "m", "--deterministic", "--keep-weights", str(tmp_path / "kept"))
    ask = {**ASK, "max_tokens": 300}
    with serving(tmp_path / "deep", *flags, token="secret") as engine:
        await house.publish(at(engine))
        _, _, process = engine.processes
        async with client(house) as openai:
            whole = (await openai.completions.create(**ask)).choices[0].text
            pieces = []
            async for chunk in await openai.completions.create(**ask, stream=True):
                pieces.append(chunk.choices[0].text)
                if len(pieces) == 3:
                    os.kill(process, signal.SIGKILL)
        assert "".join(pieces) == whole
        assert house.gateway is not None
        assert house.gateway._metrics.totals.get_sample_value("busbar_gateway_streams_resumed_total") == 1
        assert engine.status()["restarted"]["count"] == 1
        assert engine.log().count("weights are mapped from") == 1
        await house.api.wait_for(2)
        requests, _, completion = house.api.total("id-a")
        assert (requests, completion) == (2, 600)


async def test_a_stream_that_no_other_engine_takes_ends_with_an_error_and_counts_what_came(
    house: House, tmp_path: Path
) -> None:
    from tests.serving.models import save_deep_model

    await house.stop_gateway()
    house.overrides["hold_timeout_s"] = 5.0
    await house.start_gateway()
    save_deep_model(tmp_path / "deep")
    with serving(tmp_path / "deep", "--model-id", "m", token="secret") as engine:
        await house.publish(at(engine))
        async with client(house) as openai:
            stream = await openai.completions.create(**{**ASK, "max_tokens": 400}, stream=True)
            pieces = 0

            async def read() -> None:
                nonlocal pieces
                async for chunk in stream:
                    pieces += bool(chunk.choices[0].text)
                    if pieces == 3:
                        engine.process.kill()

            with pytest.raises(APIError, match="no other replica"):
                await read()
        await house.api.wait_for(1)
        requests, _, completion = house.api.total("id-a")
        assert requests == 1
        assert pieces <= completion < 400


def _raw() -> dict[str, Any]:
    fields = {key: value for key, value in ASK.items() if key not in ("model", "extra_body")}
    return {**fields, **ASK["extra_body"]}
