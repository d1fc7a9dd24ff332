"""/v1/embeddings: vectors against transformers' hidden states, and the route with the ordinary `openai` client."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.inside import TOKEN, serving_inside
from tests.serving.models import VOCAB, make_tokenizer
from tests.serving.processes import Service

from busbar.workloads.serving.embeddings import EmbeddingBody, answer, parse_embeddings
from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.sequence import Pooling
from busbar.workloads.serving.settings import EngineSettings

RANDOM = random.Random(5)
TEXTS = [[RANDOM.randrange(1, VOCAB) for _ in range(length)] for length in (1, 2, 15, 16, 17, 70, 150)]


def expected(model: Any, tokens: list[int], pooling: Pooling) -> torch.Tensor:
    with torch.no_grad():
        states: torch.Tensor = model.model(torch.tensor([tokens])).last_hidden_state[0]
    return states[-1] if pooling is Pooling.LAST else states.mean(0)


def embed(loaded: Loaded, texts: list[list[int]], pooling: Pooling) -> list[torch.Tensor]:
    core = loaded.core
    for index, tokens in enumerate(texts):
        core.embed(str(index), tokens, pooling, 0.0)
    found: dict[int, torch.Tensor] = {}
    while not core.idle:
        for delta in core.step():
            assert (delta.finish, delta.tokens) == ("stop", ())
            found[int(delta.request_id)] = torch.tensor(delta.vector)
    return [found[i] for i in range(len(texts))]


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize(
    "changes",
    [
        {"deterministic": True},
        {"deterministic": False},
        {"deterministic": True, "max_batched_tokens": 24},
        {"deterministic": True, "kv_bytes": 13 * 16 * 2 * 2 * 2 * 16 * 4, "max_model_len": 160},
    ],
    ids=["fixed", "in-place", "in-pieces", "little-memory"],
)
def test_vectors_are_transformers_hidden_states(
    llama: tuple[Path, Any], pooling: Pooling, changes: dict[str, Any]
) -> None:
    loaded = load_engine(llama[0], **changes)
    for _ in range(2):  # the second time with a prefix cache
        found = embed(loaded, TEXTS, pooling)
        for tokens, vector in zip(TEXTS, found, strict=True):
            torch.testing.assert_close(vector, expected(llama[1], tokens, pooling), rtol=2e-4, atol=2e-4)
    assert loaded.core.scheduler.pool.used == 0
    assert loaded.core.live == 0


def test_answers_beside_them_stay_the_same(llama: tuple[Path, Any]) -> None:
    loaded = load_engine(llama[0], deterministic=True)
    alone = generate(loaded, [TEXTS[3]], greedy_params(20))[0]
    for index, pooling in enumerate(Pooling):
        loaded.core.embed(f"e{index}", TEXTS[5], pooling, 0.0)
    loaded.core.submit("x", TEXTS[3], greedy_params(20), 0.0)
    deltas = []
    while not loaded.core.idle:
        deltas += [delta for delta in loaded.core.step() if delta.request_id == "x"]
    assert tokens_of(deltas) == tokens_of(alone)


def test_a_cancelled_text_leaves_nothing(llama: tuple[Path, Any]) -> None:
    loaded = load_engine(llama[0], max_batched_tokens=24)
    loaded.core.embed("e", TEXTS[6], Pooling.MEAN, 0.0)
    assert loaded.core.step() == []
    assert loaded.core.cancel("e")
    assert loaded.core.idle
    assert loaded.core.scheduler.pool.used == 0


def test_a_vector_of_zeros_stays_one() -> None:
    body = EmbeddingBody("m", ("a",), False, 2, Pooling.LAST, "")
    assert answer(body, [[1]], [(0.0, 0.0, 3.0)])["data"][0]["embedding"] == [0.0, 0.0]


# field, refused, accepted
ROWS: list[tuple[str, list[Any], list[Any]]] = [
    ("model", [None, "", 3], ["m"]),
    (
        "input",
        [None, [], 3, [1, "a"], [-1], [True], [["a"]], ["x"] * 2049],
        ["", "a", [1], ["a", "b"], [[1], [2]], ["x"] * 2048],
    ),
    ("encoding_format", ["hex", 1], ["float", "base64", None]),
    ("dimensions", [0, -1, 1.5, True, "8"], [1, 64, None]),
    ("pooling", ["max", 1, ["last"]], ["last", "mean", None]),
    ("cache_salt", [1, "x" * 257], ["x" * 256]),
    ("user", [], ["somebody"]),
    ("stream", [True], [None]),
    ("no_such_field", [1], [None]),
]


@pytest.mark.parametrize(("field", "bad", "good"), ROWS, ids=[row[0] for row in ROWS])
def test_a_bad_field_is_refused_by_name_and_its_neighbour_is_taken(
    field: str, bad: list[Any], good: list[Any]
) -> None:
    for value in bad:
        with pytest.raises(BadRequest) as caught:
            parse_embeddings({"model": "m", "input": "a", field: value})
        assert caught.value.param == field
        assert len(str(caught.value)) < 300
    for value in good:
        parse_embeddings({"model": "m", "input": "a", field: value})


# -- the route ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(llama: tuple[Path, Any]) -> Iterator[Service]:
    engine = EngineSettings(llama[0], block_tokens=16, max_running=4, threads=1)
    with serving_inside(engine, "m", max_waiting=20) as running:
        yield running


@pytest.fixture
def client(server: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as made:
        yield made


def test_the_route_gives_vectors_of_length_one_in_order(
    client: openai.OpenAI, llama: tuple[Path, Any]
) -> None:
    texts = ["def add(a, b):", "import os", "def add(a, b):"]
    found = client.embeddings.create(model="m", input=texts)  # the client asks for base64 and decodes it
    plain = client.embeddings.create(model="m", input=texts, encoding_format="float")
    ids = [make_tokenizer().encode(text).ids for text in texts]
    assert [each.index for each in found.data] == [0, 1, 2]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    for one, other, tokens in zip(found.data, plain.data, ids, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-5)
        wanted = torch.nn.functional.normalize(expected(llama[1], tokens, Pooling.LAST), dim=0)
        assert one.embedding == pytest.approx(wanted.tolist(), abs=1e-4)


def test_dimensions_pooling_and_tokens_are_read(client: openai.OpenAI, llama: tuple[Path, Any]) -> None:
    ids = make_tokenizer().encode("for index in range(3):").ids
    whole = client.embeddings.create(model="m", input=[ids], extra_body={"pooling": "mean"}).data[0].embedding
    wanted = torch.nn.functional.normalize(expected(llama[1], ids, Pooling.MEAN), dim=0)
    assert whole == pytest.approx(wanted.tolist(), abs=1e-4)
    short = client.embeddings.create(model="m", input=ids, dimensions=8, extra_body={"pooling": "mean"})
    length = math.hypot(*whole[:8])
    assert short.data[0].embedding == pytest.approx([number / length for number in whole[:8]], abs=1e-5)


def test_a_long_list_does_not_fill_the_queue(client: openai.OpenAI, server: Service) -> None:
    found = client.embeddings.create(model="m", input=[f"text {i}" for i in range(200)])
    assert [each.index for each in found.data] == list(range(200))
    assert server.status()["kvBlocksFree"] == server.status()["kvBlocksTotal"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [5] * 513}, "input"),
        ({"input": [VOCAB]}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": [[5] * 500] * 601}, "input"),
        ({"input": "a", "model": "other"}, "model"),
    ],
    ids=["none", "empty", "one-empty", "long", "token", "surrogate", "dimensions", "sum", "model"],
)
def test_what_cannot_be_a_vector_is_refused_by_its_place(
    server: Service, body: dict[str, Any], param: str
) -> None:
    status, _, answer = server.post("/v1/embeddings", {"model": "m", **body})
    assert status == (404 if param == "model" else 400)
    assert answer["error"]["param"] == param
    assert server.post("/v1/embeddings", {"model": "m", "input": [5] * 512, "dimensions": 64})[0] == 200
