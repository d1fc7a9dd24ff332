"""A request that goes on at another replica: wherever it was cut, the whole is what one replica would have said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serving.engines import Reader, Said, generate, load_engine, text_of, tokens_of
from tests.serving.models import EOS, save_model
from tests.serving.pair import text_model_of
from tests.serving.processes import Running, serving
from tests.serving.tool_models import save_tool_model

from busbar.kube.contracts.streams import DIGEST_HEADER, RESUME_PATH, SIDE_LINE, TERMS_HEADER
from busbar.workloads.serving.identity import model_identity
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.responses_request import PATH
from busbar.workloads.serving.sampling import SamplingParams

PROMPT = [70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87]
TERMS = {"seed": 11, "created": 1_700_000_000, "usage": "last"}


@pytest.fixture(scope="module")
def loaded(llama: tuple[Path, Any]) -> Loaded:
    return load_engine(llama[0], deterministic=True)


def go_on(loaded: Loaded, params: SamplingParams, tokens: list[int]) -> list[Said]:
    core = loaded.core
    history, reader = core.replay(PROMPT, params, tokens), Reader(core, params, tokens)
    assert not core.rules.is_over(history, params)
    core.submit("r", PROMPT, params, 0.0, history=history, confirms=True)
    while not core.idle:
        for delta in core.step():
            reader.take(delta)
    return reader.said


def a_stop(loaded: Loaded) -> str:
    """A text of several tokens that the sampled answer has in its middle."""
    text = text_of(generate(loaded, [PROMPT], ASKED["sampled"])[0])
    return text[len(text) // 2 : len(text) // 2 + 6]


ASKED = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=40, seed=5, ignore_eos=True),
    "nucleus": SamplingParams(max_tokens=24, seed=-3, temperature=0.7, top_p=0.8, top_k=30, min_p=0.01),
    "penalties": SamplingParams(
        max_tokens=24,
        temperature=0.0,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        ignore_eos=True,
    ),
    "logprobs": SamplingParams(max_tokens=24, seed=9, logprobs=3, ignore_eos=True),
    "least": SamplingParams(max_tokens=24, seed=9, min_tokens=20),
}


@pytest.mark.parametrize("name", ASKED)
def test_wherever_it_is_cut_tokens_text_and_logprobs_go_on_the_same(loaded: Loaded, name: str) -> None:
    check(loaded, ASKED[name])


def test_a_stop_string_across_the_cut_is_found(loaded: Loaded) -> None:
    stop = a_stop(loaded)
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True, stop=(stop,))
    whole = check(loaded, params)
    assert whole[-1].finish == "stop"
    assert stop not in text_of(whole)


def test_a_constraint_holds_across_the_cut(loaded: Loaded) -> None:
    for asked in (ASKED["greedy"], ASKED["sampled"], ASKED["logprobs"]):
        words = [
            loaded.core.tokenizer.decode(tokens_of(generate(loaded, [PROMPT], asked)[0])[4:6]),
            "a",
            "re",
        ]
        whole = check(loaded, loaded.core.rules.constrained(asked, range(10, 300), words))
        assert set(tokens_of(whole)) <= set(range(10, 300))


def test_characters_across_the_cut_stay_whole(loaded: Loaded) -> None:
    whole = check(loaded, ASKED["sampled"])
    assert any(not delta.text for delta in whole), "no token was half a character"


def check(loaded: Loaded, params: SamplingParams) -> list[Said]:
    """Cuts the answer behind each of its tokens; the whole answer."""
    (whole,) = generate(loaded, [PROMPT], params)
    for cut in range(len(whole)):
        before = whole[:cut]
        after = go_on(loaded, params, tokens_of(before))
        assert tokens_of(before + after) == tokens_of(whole)
        assert text_of(before + after) == text_of(whole)
        assert [d.index for d in after] == list(range(cut + 1, len(whole) + 1))
        assert after[-1].finish == whole[-1].finish
        assert [d.logprobs for d in before + after] == [d.logprobs for d in whole]
    return whole


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        (SamplingParams(max_tokens=3), [70, 71, 72]),
        (SamplingParams(max_tokens=9), [70, EOS]),
        (SamplingParams(max_tokens=9, stop_token_ids=frozenset({71}), ignore_eos=True), [71]),
    ],
)
def test_an_answer_that_is_over_is_known(loaded: Loaded, params: SamplingParams, tokens: list[int]) -> None:
    assert loaded.core.rules.is_over(loaded.core.replay(PROMPT, params, tokens), params)
    assert not loaded.core.rules.is_over(loaded.core.replay(PROMPT, params, []), params)


def test_a_stop_string_in_tokens_that_were_is_known(loaded: Loaded) -> None:
    for text, stops in (("ax", True), ("ab", False)):
        said = text_model_of(loaded).text_of(SamplingParams(max_tokens=9, stop=("x",)))
        said.add(loaded.core.tokenizer.encode(text).ids)
        assert said.has_stopped == stops


def test_going_on_is_charged_and_counted_to_nobody_twice(loaded: Loaded) -> None:
    core = loaded.core
    queries, prompts = core.scheduler.cache_queries, core.metrics.prompt_tokens._value.get()
    go_on(loaded, ASKED["greedy"], [70, 71])
    assert core.scheduler.cache_queries == queries
    assert core.metrics.prompt_tokens._value.get() == prompts


def test_a_folder_is_told_from_another_by_its_weights(llama: tuple[Path, Any], tmp_path: Path) -> None:
    save_model(tmp_path / "same")
    save_model(tmp_path / "other", seed=1)
    assert model_identity(llama[0]) == model_identity(tmp_path / "same")
    assert model_identity(llama[0]) != model_identity(tmp_path / "other")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = save_tool_model(tmp_path_factory.mktemp("tools"), "hermes")
    flags = ("--model-id", "m", "--block-tokens", "16", "--deterministic")
    with serving(folder, *flags, token="secret") as running:
        yield running


def events(data: bytes) -> list[tuple[bytes, dict[str, Any] | None, tuple[int, bool, list[int]] | None]]:
    """(what the client gets, parsed; of the side line: choice, ended, tokens)."""
    found = []
    for event in data.split(b"\n\n")[:-1]:
        shown, _, side = event.rpartition(SIDE_LINE) if SIDE_LINE in event else (event, b"", b"")
        parts = side.decode().split(" ")
        told = (int(parts[0]), parts[1] == "1", [int(t) for t in parts[4].split(",")]) if side else None
        text = shown.removeprefix(b"data: ")
        found.append((shown, None if text == b"[DONE]" else json.loads(text), told))
    return found


def post(server: Running, path: str, body: object, **headers: str) -> tuple[int, dict[str, str], bytes]:
    sent = {TERMS_HEADER: json.dumps(TERMS), "x-busbar-request-id": "req-1", **headers}
    return server.call("POST", path, json.dumps(body).encode(), headers=sent)


HI = [{"role": "user", "content": "hi"}]
NAME = {"type": "string", "maxLength": 6}
PARAMETERS = {"type": "object", "properties": {"a": NAME}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in "fg"]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "def add(", "logprobs": 2}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
    "constrained": (
        "/v1/completions",
        {"prompt": "def", "n": 2, "allowed_token_ids": list(range(20, 90)), "bad_words": ["a", "re", "zq"]},
    ),
    "schema": (
        "/v1/chat/completions",
        {"messages": HI, "n": 2, "max_tokens": 16, "response_format": {"type": "json_object"}},
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required", "seed": 2},
    ),
    "several": ("/v1/completions", {"prompt": ["def", "x"], "n": 2, "logit_bias": {str(EOS): 3}}),
}


@pytest.mark.parametrize("name", BODIES)
def test_over_http_the_rest_of_a_stream_is_byte_for_byte_the_rest(server: Running, name: str) -> None:
    path, more = BODIES[name]
    body = {"model": "m", "stream": True, "max_tokens": 12, **more}
    status, headers, data = post(server, path, body)
    assert status == 200
    whole = events(data)
    count = {"several": 4, "constrained": 2, "schema": 2}.get(name, 1)
    for cut in range(1, len(whole)):
        last, side = whole[cut - 1][1:]
        if side is None and last is not None and last["choices"]:
            continue  # a role: nothing has begun
        choices: list[dict[str, Any]] = [{"tokens": [], "ended": False} for _ in range(count)]
        for _, _, told in whole[:cut]:
            if told is not None:
                choices[told[0]]["tokens"] += told[2]
                choices[told[0]]["ended"] = told[1]
        asked = {"path": path, "request": body, "digest": headers[DIGEST_HEADER], "choices": choices}
        status, _, rest = post(server, RESUME_PATH, asked)
        assert status == 200, rest
        after, expected = events(rest), whole[cut:]
        if last is not None and not last["choices"]:
            expected = whole[cut - 1 :]  # after the usage the end comes with the usage again
        assert of_choices(after, count) == of_choices(expected, count)
        assert after[-1][1] is None
        assert after[-2][1] == next(e[1] for e in whole if e[1] is not None and not e[1]["choices"])


RESPONSES: dict[str, dict[str, Any]] = {
    "text": {},
    "schema": {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 20},
    "calls": {
        "tools": [{"type": "function", "name": name, "parameters": PARAMETERS} for name in "fg"],
        "tool_choice": "required",
        "max_output_tokens": 60,
    },
}


@pytest.mark.parametrize("name", RESPONSES)
def test_the_rest_of_a_response_is_byte_for_byte_the_rest(server: Running, name: str) -> None:
    """Its later events repeat what the earlier ones said, and are numbered."""
    body = {"model": "m", "stream": True, "input": "hi", "max_output_tokens": 12, **RESPONSES[name]}
    status, headers, data = post(server, PATH, body)
    assert status == 200
    whole = [event.partition(SIDE_LINE) for event in data.split(b"\n\n")[:-1]]
    tokens: list[int] = []
    cuts = 0
    for number, (_, _, side) in enumerate(whole, 1):
        parts = side.decode().split(" ")
        if not side or parts[1] == "1":
            continue  # the client gets these with others
        tokens += map(int, parts[4].split(","))
        choices = [{"tokens": tokens, "ended": False}]
        asked = {
            "path": PATH,
            "request": body,
            "digest": headers[DIGEST_HEADER],
            "choices": choices,
            "events": number,
            "cached_tokens": int(parts[3]),
        }
        status, _, rest = post(server, RESUME_PATH, asked)
        assert status == 200, rest
        shown = [event.partition(SIDE_LINE)[0] for event in rest.split(b"\n\n")[:-1]]
        assert shown == [event for event, _, _ in whole[number:]]
        cuts += 1
    assert cuts >= 5
    assert b"event: response.completed" in data or b"event: response.incomplete" in data


def of_choices(found: list[Any], count: int) -> list[list[bytes]]:
    """Each choice's events; between choices there is no order."""
    return [[shown for shown, _, told in found if told is not None and told[0] == i] for i in range(count)]


def test_without_terms_no_side_lines_and_no_digest(server: Running) -> None:
    body = {"model": "m", "stream": True, "prompt": "x", "max_tokens": 2}
    status, headers, data = server.call("POST", "/v1/completions", json.dumps(body).encode())
    assert (status, DIGEST_HEADER in headers, SIDE_LINE in data) == (200, False, False)


def test_what_must_not_be_resumed_is_refused(server: Running) -> None:
    body = {"model": "m", "stream": True, "prompt": "def add(", "max_tokens": 4, "temperature": 0}
    _, headers, _ = post(server, "/v1/completions", {**body, "seed": 3})
    good = {
        "path": "/v1/completions",
        "request": {**body, "seed": 3},
        "digest": headers[DIGEST_HEADER],
        "choices": [{"tokens": [70]}],
    }
    assert post(server, RESUME_PATH, good)[0] == 200
    refused: list[tuple[int, dict[str, Any]]] = [
        (409, {"digest": "other"}),
        (409, {"request": {**body, "seed": 4}}),
        (409, {"request": {**body, "seed": 3, "prompt": "def sub("}}),
        (409, {"request": {**body, "seed": 3, "max_tokens": 5}}),
        (409, {"choices": [{"tokens": [70]}, {"tokens": []}]}),
        (400, {"choices": [{"tokens": [10**6]}]}),
        (400, {"choices": [{"tokens": [-1]}]}),
        (400, {"choices": [{"tokens": [70, 71, 72, 73]}]}),
        (400, {"choices": [{"tokens": [EOS]}]}),
        (400, {"path": "/v1/models"}),
        (400, {"request": {**body, "seed": 3, "stream": False}}),
        (404, {"request": {**body, "seed": 3, "model": "other"}}),
    ]
    for status, change in refused:
        answer = post(server, RESUME_PATH, {**good, **change})
        assert answer[0] == status, (change, answer)
    assert post(server, RESUME_PATH, good, Authorization="Bearer other")[0] == 401
    assert post(server, "/v1/completions", body, **{TERMS_HEADER: "{}"})[0] == 400


def test_a_server_that_knows_no_bearer_believes_nobody(llama: tuple[Path, Any]) -> None:
    with serving(llama[0], "--model-id", "m") as open_to_all:
        body = {"model": "m", "stream": True, "prompt": "x", "max_tokens": 2}
        status, headers, data = post(open_to_all, "/v1/completions", body)
        assert (status, DIGEST_HEADER in headers, SIDE_LINE in data) == (200, False, False)
        assert post(open_to_all, RESUME_PATH, {})[0] == 401
