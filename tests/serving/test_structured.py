"""Answers with a form, asked for with the ordinary `openai` client: schemas, regular expressions, choices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from tests.serving.inside import TOKEN, serving_inside
from tests.serving.processes import Service

from busbar.workloads.serving.settings import EngineSettings

MODEL = "tiny"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "sky": {"enum": ["clear", "grey"]},
        "degrees": {"type": "integer", "minimum": -50, "maximum": 60},
    },
    "required": ["city", "sky", "degrees"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}


class Weather(BaseModel):
    """What the client's own parser makes a schema of."""

    sky: Literal["clear", "grey"]
    degrees: int = Field(ge=-50, le=60)


@pytest.fixture(scope="module")
def server(llama: tuple[Path, Any]) -> Iterator[Service]:
    engine = EngineSettings(llama[0], block_tokens=16, max_running=8, deterministic=True, threads=1)
    with serving_inside(engine, MODEL) as running:
        yield running


@pytest.fixture
def client(server: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as made:
        yield made


def check(text: str | None) -> None:
    jsonschema.validate(json.loads(text or ""), SCHEMA)


def test_a_schema_holds_whole_streamed_and_for_each_of_n_answers(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, response_format=FORMAT, n=4, seed=1)
    texts = [choice.message.content or "" for choice in whole.choices]
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content)
    assert len(set(texts)) > 1
    streamed = [""] * 4
    for chunk in client.chat.completions.create(**ASK, response_format=FORMAT, n=4, seed=1, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_the_clients_own_parser_reads_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**ASK, response_format=Weather, seed=2)
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_vllms_fields_work_on_both_routes(client: openai.OpenAI) -> None:
    rows: list[tuple[dict[str, Any], Any]] = [
        ({"guided_json": json.dumps(SCHEMA)}, check),
        ({"guided_regex": "[0-9]{3}"}, lambda text: int(text) * 0 + len(text) == 3),
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"].index),
        ({"guided_grammar": 'start: "a"+ "b"'}, lambda text: text.strip("a").index("b")),
    ]
    for body, accept in rows:
        chat = client.chat.completions.create(**ASK, seed=3, extra_body=body)
        accept(chat.choices[0].message.content)
        text = client.completions.create(model=MODEL, prompt="x", max_tokens=200, seed=4, extra_body=body)
        accept(text.choices[0].text)


def test_a_bad_schema_is_a_400_with_its_field_and_costs_a_stream_beside_it_nothing(
    client: openai.OpenAI,
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 60, "temperature": 0}
    alone = client.completions.create(**asked).choices[0].text
    stream = client.completions.create(**asked, stream=True)
    bad: list[Any] = [{"$ref": "#"}, {"type": "string", "pattern": "("}, {"not": {}}]
    for schema in bad:
        wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ASK, response_format=wrong)
        assert caught.value.param == "response_format.json_schema.schema"
    assert "".join(chunk.choices[0].text for chunk in stream) == alone


def test_a_grammar_that_grows_too_complex_is_the_requests_fault_whole_and_streamed(
    client: openai.OpenAI,
) -> None:
    body = {"guided_grammar": 'start: e\ne: e e | e e e | "a" | "b"'}
    asked: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 400, "extra_body": body}
    with pytest.raises(openai.BadRequestError, match="too complex"):
        client.completions.create(**asked, logit_bias={"0": -100})
    with pytest.raises(openai.APIError, match="too complex"):
        list(client.completions.create(**asked, stream=True, logit_bias={"0": -100}))
