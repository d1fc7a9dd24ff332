"""A real server process, driven by the ordinary `openai` client and by raw HTTP."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from tests.serving.models import EOS, greedy, make_tokenizer
from tests.serving.processes import OpenStream, Running, serving

from busbar.kube.contracts.request_size import REPLICA_REQUEST_BYTES
from busbar.workloads.serving.vocabulary import Vocabulary

MODEL = "tiny"
PROMPT = "def add(a, b):\n"
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def server(llama: tuple[Path, Any]) -> Iterator[Running]:
    flags = ("--model-id", MODEL, "--block-tokens", "16", "--max-running", "4", "--max-waiting", "8")
    with serving(llama[0], *flags, "--deterministic", token="secret") as running:
        yield running


@pytest.fixture(scope="module")
def slow_server(deep: Path) -> Iterator[Running]:
    """A server whose long streams do not end while a test observes them."""
    flags = ("--model-id", MODEL, "--block-tokens", "16", "--max-running", "4", "--max-waiting", "8")
    with serving(deep, *flags, token="secret") as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def expected_text(llama: tuple[Path, Any], prompt: str, count: int) -> str:
    tokens = greedy(llama[1], TOKENIZER.encode(prompt).ids, count)
    text: str = TOKENIZER.decode([t for t in tokens if t != EOS], skip_special_tokens=True)
    return text


def test_a_completion_is_transformers_greedy_text(client: openai.OpenAI, llama: tuple[Path, Any]) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == expected_text(llama, PROMPT, 12)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(PROMPT).ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_joins_to_the_same_text_and_numbers_its_tokens(
    client: openai.OpenAI, llama: tuple[Path, Any]
) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [c.choices[0].text for c in chunks if c.choices]
    assert "".join(texts) == expected_text(llama, PROMPT, 20)
    assert len(texts) > 3
    indices = [c.choices[0].model_dump()["token_index"] for c in chunks if c.choices]
    assert indices == sorted(indices)
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == indices[-1]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("length", "stop")


def test_usage_so_far_stands_on_every_chunk_for_who_asks(client: openai.OpenAI) -> None:
    body = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=[PROMPT, "x"], max_tokens=6, temperature=0, stream=True, extra_body=body
        )
    )
    counted = [c.usage.completion_tokens for c in chunks if c.usage]
    assert len(counted) == len(chunks)
    assert counted == sorted(counted)
    assert counted[-1] == sum(
        max(c.choices[0].model_dump()["token_index"] for c in chunks if c.choices and c.choices[0].index == i)
        for i in (0, 1)
    )


def test_many_prompts_at_once_each_get_their_own_answer(
    client: openai.OpenAI, llama: tuple[Path, Any]
) -> None:
    prompts = [PROMPT, "import os\n", "for index in range(3):\n    ", "class X"]
    whole = client.completions.create(model=MODEL, prompt=prompts, max_tokens=10, temperature=0)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    assert [c.text for c in whole.choices] == [expected_text(llama, p, 10) for p in prompts]
    texts = [""] * 4
    for chunk in client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=10, temperature=0, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in whole.choices]


def test_tokens_are_accepted_as_a_prompt(client: openai.OpenAI, llama: tuple[Path, Any]) -> None:
    tokens = TOKENIZER.encode(PROMPT).ids
    answer = client.completions.create(model=MODEL, prompt=tokens, max_tokens=6, temperature=0)
    assert answer.choices[0].text == expected_text(llama, PROMPT, 6)


def test_chat_streams_a_role_then_text_then_a_reason(client: openai.OpenAI, llama: tuple[Path, Any]) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    whole = client.chat.completions.create(**asked, max_completion_tokens=8, temperature=0)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == expected_text(llama, "user: hi\nassistant:", 8)
    chunks = list(
        client.chat.completions.create(**asked, max_completion_tokens=8, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_an_answer_goes_on_with_the_last_message(
    client: openai.OpenAI, server: Running, llama: tuple[Path, Any]
) -> None:
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "def add(a"}]
    prompt = "user: hi\nassistant: def add(a"
    more = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=8, temperature=0, extra_body=more
    )
    assert answer.choices[0].message.content == expected_text(llama, prompt, 8)
    status, _, found = server.post("/tokenize", {"messages": messages, **more})
    assert (status, found["tokens"]) == (200, TOKENIZER.encode(prompt).ids)


def test_a_template_without_effort_refuses_it_and_takes_any_other_name(server: Running) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path in ("/v1/chat/completions", "/tokenize"):
        body = asked if path != "/tokenize" else {"messages": asked["messages"]}
        assert server.post(path, {**body, "chat_template_kwargs": {"self": 1}})[0] == 200
        status, _, answer = server.post(path, {**body, "reasoning_effort": "low"})
        assert (status, answer["error"]["param"]) == (400, "reasoning_effort")


def test_logprobs_name_the_chosen_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for entry in logprobs.content:
        assert entry.logprob == max(t.logprob for t in entry.top_logprobs)
        assert len(entry.top_logprobs) == 2


def test_the_bytes_of_logprobs_are_exact_also_for_parts_of_a_character(client: openai.OpenAI) -> None:
    """In this tokenizer each byte of a character is a token."""
    face = "🙂"
    tokens = TOKENIZER.encode(face).ids
    assert len(tokens) > 1
    for wanted in tokens:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            max_tokens=1,
            logit_bias={str(wanted): 100},
            temperature=0,
            logprobs=True,
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        (entry,) = logprobs.content
        assert bytes(entry.bytes or []) == Vocabulary(TOKENIZER).bytes_of(wanted)
    assert b"".join(map(Vocabulary(TOKENIZER).bytes_of, tokens)) == face.encode()


def test_offsets_of_streamed_logprobs_go_on_where_the_last_chunk_ended(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    streamed = [c.choices[0].logprobs for c in client.completions.create(**asked, stream=True) if c.choices]
    assert len(streamed) > 2
    assert [at for part in streamed if part for at in part.text_offset or []] == whole.text_offset


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, server: Running) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 300}
    asked |= {"extra_body": {"ignore_eos": True}}
    free = client.completions.create(**asked).choices[0].text
    stop = free[8:11]
    names = ("vllm:generation_tokens_total", "vllm:request_generation_tokens_sum")
    before = [server.metric(name) for name in names]
    whole = client.completions.create(**asked, stop=stop)
    cut = whole.choices[0]
    assert (cut.text, cut.finish_reason) == (free[: free.index(stop)], "stop")
    chunks = list(
        client.completions.create(**asked, stop=stop, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == cut.text
    assert whole.usage is not None
    assert whole.usage == chunks[-1].usage
    server.wait_for(lambda: server.status()["running"] == 0)
    counted = [server.metric(name) - had for name, had in zip(names, before, strict=True)]
    assert counted == [2 * whole.usage.completion_tokens] * 2, "no token behind the stop string counts"


def test_a_seed_repeats_in_company(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, seed=seed, top_p=0.9)
        return answer.choices[0].text

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(ask, [0, 1, 2, 3] * 2))
    assert crowd == alone * 2
    assert len(set(alone)) > 1


@pytest.mark.parametrize(
    ("change", "error", "part"),
    [
        ({"model": "other"}, openai.NotFoundError, "serves 'tiny'"),
        ({"n": 17}, openai.BadRequestError, "n must be"),
        ({"n": 16, "prompt": ["a"] * 5}, openai.BadRequestError, "at most 64"),
        ({"best_of": 2}, openai.BadRequestError, "best_of=2"),
        ({"max_tokens": 600}, openai.BadRequestError, "maximum context length is 512"),
        ({"prompt": ""}, openai.BadRequestError, "prompt is empty"),
        ({"prompt": [999_999]}, openai.BadRequestError, "not in the model's vocabulary"),
        ({"prompt": "x" * 40_000}, openai.BadRequestError, "too long"),
        ({"logit_bias": {"999999": 1}}, openai.BadRequestError, "not in the model's vocabulary"),
    ],
)
def test_the_client_understands_our_refusals(
    client: openai.OpenAI, change: dict[str, Any], error: type[openai.APIStatusError], part: str
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 2} | change
    with pytest.raises(error, match=part) as caught:
        client.post("/completions", body=asked, cast_to=object)
    body: Any = caught.value.body
    assert body["code"] == caught.value.status_code
    assert body["type"]


def test_the_model_list_names_the_one_model(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL
    assert card.model_dump()["max_model_len"] == 512
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_only_probes_are_open_without_the_bearer(server: Running) -> None:
    paths = ["/v1/models", "/v1/models/tiny", "/status", "/metrics", "/version", "/nowhere"]
    for token in ("wrong", "secre", "secret2"):
        assert [server.get(path, token)[0] for path in paths] == [401] * len(paths)
        for path in ("/v1/completions", "/v1/chat/completions", "/drain"):
            assert server.call("POST", path, b"{}", token)[0] == 401
    assert [server.get(path, "wrong")[0] for path in ("/health", "/ready")] == [200, 200]
    assert server.get("/version")[0] == 200


def test_a_body_that_is_too_large_or_no_json_is_refused(server: Running) -> None:
    too_large = b"{" + b" " * REPLICA_REQUEST_BYTES
    status, _, body = server.call("POST", "/v1/completions", too_large)
    error = json.loads(body)["error"]
    assert (status, error["type"]) == (413, "RequestTooLarge")
    assert (
        error["message"] == f"the body has {len(too_large)} bytes; at most {REPLICA_REQUEST_BYTES} are read"
    )
    status, _, body = server.call("POST", "/v1/completions", too_large[:REPLICA_REQUEST_BYTES])
    assert (status, "not JSON" in json.loads(body)["error"]["message"]) == (400, True)
    status, _, body = server.call("POST", "/v1/completions", b"{")
    assert status == 400
    assert "not JSON" in json.loads(body)["error"]["message"]
    status, _, body = server.call("POST", "/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}')
    assert status == 400
    assert "not valid Unicode" in json.loads(body)["error"]["message"]
    status, _, body = server.call("GET", "/v1/completions", None)
    assert (status, json.loads(body)["error"]["type"]) == (405, "MethodNotAllowedError")
    packed = {"Content-Encoding": "gzip"}
    status, _, body = server.call("POST", "/v1/completions", b"{}", headers=packed)
    assert status == 400
    assert "Content-Encoding" in json.loads(body)["error"]["message"]
    twice = b'{"model": "tiny", "prompt": "a", "logit_bias": {"7": 1, "7": 2}}'
    status, _, body = server.call("POST", "/v1/completions", twice)
    assert status == 400
    assert "'7' is there twice" in json.loads(body)["error"]["message"]
    status, _, body = server.call("POST", "/v1/completions", b'{"model": "tiny", "prompt": "a", "x": 1e400}')
    assert status == 400
    assert "1e400 is no number of JSON" in json.loads(body)["error"]["message"]


def said(server: Running, *sent: bytes) -> bytes:
    """All that the server says on a connection until it closes it; between the parts it has time to read."""
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port), timeout=20) as connection:
        for part in sent:
            connection.sendall(part)
            time.sleep(0.1)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    return answer


def test_what_is_not_http_is_answered_at_once_and_its_bearer_is_in_no_log(server: Running) -> None:
    bearer = b"Bearer secret"
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nAuthorization: "
    for status, sent in (
        (400, [b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization : " + bearer + b"\r\n\r\n"]),
        (400, [chunked + bearer + b'\r\n\r\n5\r\n{"mod\r\n', b"zz " + bearer + b"\r\n"]),
        (417, [b"GET /v1/models HTTP/1.1\r\nHost: x\r\nExpect: foo\r\n\r\n"]),
    ):
        head, _, body = said(server, *sent).partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        assert json.loads(body)["error"]["type"] == "BadRequestError"
    assert "secret" not in server.log()
    assert "Traceback" not in server.log()


def test_metrics_of_a_request_over_http(server: Running) -> None:
    names = ["vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"]
    names += ["vllm:e2e_request_latency_seconds_count"]
    before = [server.metric(name) for name in names]
    body = {"model": MODEL, "prompt": [1, 2, 3, 4, 5], "max_tokens": 7, "ignore_eos": True}
    assert server.post("/v1/completions", body)[0] == 200
    after = [server.metric(name) for name in names]
    assert [a - b for a, b in zip(after, before, strict=True)] == [5, 7, 1, 1]


def open_stream(server: Running, tokens: int, headers: dict[str, str] | None = None) -> OpenStream:
    """A started stream of exactly `tokens` tokens."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return OpenStream(server, body, headers)


def test_the_gateways_request_id_comes_back(server: Running) -> None:
    with open_stream(server, 2, {"x-busbar-request-id": "abc-1"}) as answer:
        assert answer.headers["x-busbar-request-id"] == "abc-1"
        assert b'"id":"cmpl-abc-1"' in answer.rest()
    with open_stream(server, 2, {"x-request-id": "from-elsewhere"}) as answer:
        assert b'"id":"cmpl-from-elsewhere"' in answer.rest()
    with open_stream(server, 2, {"x-busbar-request-id": "no spaces"}) as answer:
        assert answer.status == 400


def test_a_client_that_leaves_frees_its_blocks(slow_server: Running) -> None:
    server = slow_server
    server.wait_for(lambda: server.status()["running"] == 0)
    answer = open_stream(server, 490)
    answer.line()
    assert server.status()["kvBlocksFree"] < server.status()["kvBlocksTotal"]
    answer.close()
    server.wait_for(lambda: server.status()["running"] == 0)
    status = server.status()
    assert status["kvBlocksFree"] == status["kvBlocksTotal"]
    assert status["tokensTotal"] > 0


def test_requests_beyond_the_queue_are_refused_with_retry_after(slow_server: Running) -> None:
    """Four requests run and eight may wait: of sixteen long ones some are refused at once, and none hangs."""
    server = slow_server
    answers = [open_stream(server, 400) for _ in range(4)]
    for answer in answers:
        answer.line()  # it runs and is no longer queued
    answers += [open_stream(server, 400) for _ in range(12)]
    refused = [a for a in answers if a.status == 503]
    assert 1 <= len(refused) <= 4
    assert all(a.headers["Retry-After"] for a in refused)
    assert server.get("/health")[0] == 200
    assert server.status()["waiting"] <= 8
    for answer in answers:
        answer.close()
    server.wait_for(lambda: server.status()["running"] + server.status()["waiting"] == 0)
    assert server.metric("vllm:admission_rejections_total") >= len(refused)
    assert server.status()["kvBlocksFree"] == server.status()["kvBlocksTotal"]


def test_status_is_what_the_operator_reads(server: Running) -> None:
    status = server.status()
    assert status["kind"] == "serving"
    assert status["ready"] is True
    assert status["draining"] is False
    assert status["modelId"] == MODEL
    assert status["report"]["attention"] == "tiled-product"
    assert status["report"]["batchInvariant"] is True
    assert len(json.dumps(status)) < 4096


def test_shares_of_the_cache_change_while_it_serves(server: Running) -> None:
    told = server.status
    total = told()["kvBlocksTotal"]
    assert (told()["kvShares"], told()["kvSharesRefused"], told()["kvTenants"]) == ([], "", [])
    asked = [{"tenant": "guest", "guaranteed": 0.5, "most": 1.0}, {"tenant": "sales", "most": 0.25}]
    assert server.post("/kv_shares", {"tenants": asked})[::2] == (200, {"refused": ""})
    assert {row["tenant"]: (row["guaranteed"], row["most"]) for row in told()["kvTenants"]} == {
        "guest": (total // 2, total),
        "sales": (0, total // 4),
    }
    refused = server.post("/kv_shares", {"tenants": [{"tenant": "sales", "most": 1e-9}]})[2]["refused"]
    assert "less than one block" in refused
    assert told()["kvSharesRefused"] == refused
    assert told()["kvShares"] == [{"tenant": "sales", "guaranteed": 0.0, "most": 1e-9}]
    assert len(told()["kvTenants"]) == 2  # as before
    for body, said in (
        ({"tenants": [{"tenant": "a"}, {"tenant": "a"}]}, "'a' is named twice"),
        ({"tenants": [{"tenant": "a", "most": 2}]}, "tenants.0.most"),
        ([], "the body"),
    ):
        status, _, answer = server.post("/kv_shares", body)
        assert (status, said in answer["error"]["message"]) == (400, True)
    generated = server.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 2})
    assert generated[0] == 200
    assert b'tenant="guest"' in server.get("/metrics")[2]
    assert server.post("/kv_shares", {"tenants": []})[2] == {"refused": ""}
    assert told()["kvTenants"] == told()["kvShares"] == []
    assert b'tenant="guest"' not in server.get("/metrics")[2]


def test_a_tenant_is_believed_with_the_bearer_and_shares_only_its_own_cache(server: Running) -> None:
    def cached(tenant: str, salt: str = "") -> int:
        body = {"model": MODEL, "prompt": "def shared(a, b):\n" * 8, "max_tokens": 1, "cache_salt": salt}
        status, _, data = server.call(
            "POST", "/v1/completions", json.dumps(body).encode(), headers={"x-busbar-tenant": tenant}
        )
        assert status == 200
        return int(json.loads(data)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("a") == 0
    shared = cached("a")
    assert shared > 0
    assert cached("b") == 0
    assert cached("a", "salt") == 0
    assert cached("a") == shared
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
    for weight, expected in (("0", 400), ("-1", 400), ("nan", 400), ("x", 400), ("2.5", 200)):
        headers = {"x-busbar-weight": weight}
        assert server.call("POST", "/v1/completions", body, headers=headers)[0] == expected


def test_tokens_and_text_are_turned_into_each_other_as_a_request_would(server: Running) -> None:
    def ask(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, _, data = server.call("POST", path, json.dumps(body).encode())
        return status, json.loads(data)

    ids = TOKENIZER.encode(PROMPT).ids
    status, answer = ask("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert status == 200
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 512)
    assert answer["token_strs"] == [TOKENIZER.id_to_token(token) for token in ids]
    assert ask("/detokenize", {"model": MODEL, "tokens": ids}) == (200, {"prompt": PROMPT})
    messages = [{"role": "user", "content": "hi"}]
    assert (
        ask("/tokenize", {"messages": messages})[1]["tokens"] == TOKENIZER.encode("user: hi\nassistant:").ids
    )
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": messages}),
        ("/tokenize", {"prompt": ["a"]}),
        ("/tokenize", {"prompt": "a", "other": 1}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [999_999]}),
    ):
        assert ask(path, body)[0] == 400
    assert ask("/tokenize", {"model": "other", "prompt": "a"})[0] == 404
    assert json.loads(server.get("/load")[2]) == {"server_load": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_only_allowed_tokens_and_no_bad_words_come_in_both_routes(
    client: openai.OpenAI, stream: bool
) -> None:
    letters = TOKENIZER.encode("abcdefgh", add_special_tokens=False).ids
    allowed = sorted({*letters, *TOKENIZER.encode("xyz", add_special_tokens=False).ids})
    rules = {"allowed_token_ids": allowed, "bad_words": ["x", "zy"]}
    asked: dict[str, Any] = {"max_tokens": 60, "seed": 1, "temperature": 2, "stream": stream}
    completion: Any = client.completions.create(model=MODEL, prompt="a", extra_body=rules, **asked)
    message: Any = [{"role": "user", "content": "x"}]
    chat: Any = client.chat.completions.create(model=MODEL, messages=message, extra_body=rules, **asked)
    if stream:
        texts = ["".join(c.choices[0].text for c in completion)]
        texts.append("".join(c.choices[0].delta.content or "" for c in chat))
    else:
        texts = [completion.choices[0].text, chat.choices[0].message.content]
    may_come = set("".join(TOKENIZER.decode([token]) for token in allowed)) - {"x"}
    for text in texts:
        assert len(text) >= 60
        assert set(text) <= may_come
        assert "zy" not in text
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("change", "param", "part"),
    [
        (
            {"allowed_token_ids": [5, 384]},
            "allowed_token_ids",
            "has 384; this model's token ids are 0 to 383",
        ),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids", "leaves no token to begin with"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "not \\[\\]"),
        ({"bad_words": ["a", 7]}, "bad_words", "bad_words\\[1\\] is 7"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused_by_name(
    client: openai.OpenAI, change: dict[str, Any], param: str, part: str
) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **change}
    with pytest.raises(openai.BadRequestError, match=part) as caught:
        client.post("/chat/completions", body=asked, cast_to=object)
    assert caught.value.param == param


def test_n_answers_to_a_prompt_differ_repeat_and_count_the_prompt_once(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=12, n=3, **more
        )

    first, again = ask(seed=5), ask(seed=5)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.prompt_tokens == len(TOKENIZER.encode("user: x\nassistant:").ids)
    assert len({choice.message.content for choice in ask(temperature=0).choices}) == 1
    streamed = ["", "", ""]
    for chunk in ask(seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
