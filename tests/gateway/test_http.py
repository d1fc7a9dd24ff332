"""The public port as a client sees it: keys, models, errors."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.gateway.parts import KEY_A, KEY_B, PATIENCE_S, House, key, route, text_of


async def test_a_completion_is_answered_by_the_service_of_the_model(house: House) -> None:
    engine = await house.engine("hello", " world")
    await house.publish(route("m", engine))
    status, answer = await house.ask("m")
    assert status == 200
    assert answer["choices"][0]["text"] == "hello world"
    assert answer["usage"]["completion_tokens"] == 2


async def test_a_stream_is_passed_on_word_by_word_without_waiting_for_the_next(house: House) -> None:
    engine = await house.engine("hello", " world")
    engine.pause_at = 1
    await house.publish(route("m", engine))
    async with house.post({"model": "m", "stream": True}) as response:
        first = await response.content.readuntil(b"\n\n")
        assert b"hello" in first
        assert engine.running == 1
        engine.go.set()
        assert b" world" in await response.content.read()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["Server"] == "busbar"  # and no versions


async def test_of_several_keys_none_counts(house: House) -> None:
    """Something in front of the gateway may have checked the other one."""
    await house.publish(route("m", await house.engine()))
    session = house.session
    assert session is not None
    both = [("Authorization", f"Bearer {key}") for key in (KEY_A, KEY_B)]
    for headers, status in ((both, 400), (both[:1], 200)):
        async with session.get(f"{house.public}/v1/models", headers=headers) as response:
            assert response.status == status, await response.text()


async def test_namespace_and_name_always_mean_the_service(house: House) -> None:
    engine = await house.engine()
    await house.publish(route("m", engine, modelId="org/other"))
    assert (await house.ask("team-a/m"))[0] == 200
    assert (await house.ask("org/other"))[0] == 200
    assert [body["model"] for body in engine.bodies] == ["org/other", "org/other"]


async def test_two_own_services_with_one_model_id_must_be_named_in_full(house: House) -> None:
    engine = await house.engine()
    await house.publish(route("x", engine, modelId="m"), route("y", engine, modelId="m"))
    status, answer = await house.ask("m")
    assert status == 400
    assert "team-a/x, team-a/y" in answer["error"]["message"]
    assert (await house.ask("team-a/y"))[0] == 200


async def test_a_body_that_is_nested_too_deeply_is_refused_whoever_notices_it(house: House) -> None:
    engine = await house.engine()
    await house.publish(route("m", engine))
    session = house.session
    assert session is not None
    for depth in (100, *range(900, 1001, 10), *range(980, 1000)):
        nested = "[" * depth + "]" * depth
        text = f'{{"model": "m", "prompt": "a", "messages": {nested}}}'
        headers = {"Authorization": f"Bearer {KEY_A}"}
        async with session.post(f"{house.public}/v1/completions", data=text, headers=headers) as response:
            assert response.status in ((200,) if depth == 100 else (200, 400)), depth
    assert response.status == 400


async def test_a_body_that_is_nested_too_deeply_holds_no_place_among_the_requests_in_hand(
    house: House,
) -> None:
    await house.stop_gateway()
    house.overrides["max_requests"] = 1
    await house.start_gateway()
    await house.publish(route("m", await house.engine()))
    session = house.session
    assert session is not None
    for depth in range(940, 1000):
        tools = '{"a":' * depth + "1" + "}" * depth
        text = f'{{"model": "m", "messages": [], "tools": {tools}}}'
        headers = {"Authorization": f"Bearer {KEY_A}"}
        url = f"{house.public}/v1/chat/completions"
        async with session.post(url, data=text, headers=headers) as response:
            assert response.status in (200, 400, 503), depth
    async with asyncio.timeout(PATIENCE_S):
        while (await house.ask())[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"ü": {"enum": [1, 1.5, None]}}},
    },
}
UNTOUCHED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [], "tools": [TOOL], "tool_choice": "required", "n": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "tool", "tool_call_id": "1", "content": "é"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        },
    ),
    ("/v1/completions", {"prompt": "x", "guided_regex": "a\\.b", "structured_outputs": {"choice": ["a"]}}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8, "truncate": -1}),
    ("/tokenize", {"prompt": "a b"}),
    ("/detokenize", {"tokens": [1, 2]}),
]


@pytest.mark.parametrize(("path", "body"), UNTOUCHED, ids=[f"{i}{row[0]}" for i, row in enumerate(UNTOUCHED)])
async def test_what_the_gateway_does_not_read_reaches_any_model_server_untouched(
    house: House, path: str, body: dict[str, Any]
) -> None:
    engine = await house.engine()
    await house.publish(route("m", engine, modelId="org/m"))
    assert (await house.ask_at(path, "team-a/m", **body))[0] == 200
    assert engine.bodies == [{"model": "org/m", **body}]
    if path.endswith("completions"):
        async with house.post({"model": "org/m", "stream": True, **body}, path=path) as response:
            assert response.status == 200
            await response.read()
        sent = engine.bodies[-1]
        del sent["stream_options"]
        assert sent == {"model": "org/m", "stream": True, **body}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize", "/detokenize"])
async def test_every_route_to_a_model_wants_a_key_and_a_model(house: House, path: str) -> None:
    engine = await house.engine()
    await house.publish(route("m", engine))
    async with house.post({"model": "m"}, api_key="bb_wrong", path=path) as response:
        assert response.status == 401
    assert (await house.ask_at(path, model="other"))[0] == 404
    async with house.post({}, path=path) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "model")
    assert not engine.bodies


async def models(house: House, api_key: str) -> list[str]:
    assert house.session is not None
    headers = {"Authorization": f"Bearer {api_key}"}
    async with house.session.get(house.public + "/v1/models", headers=headers) as response:
        assert response.status == 200
        return [card["id"] for card in (await response.json())["data"]]


async def test_a_model_tells_its_context_length_as_far_as_it_is_known(house: House) -> None:
    await house.publish(route("m", maxModelLen=4096), route("n"))
    assert house.session is not None
    headers = {"Authorization": f"Bearer {KEY_A}"}
    async with house.session.get(house.public + "/v1/models", headers=headers) as response:
        cards = (await response.json())["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("m", 4096), ("n", None)]
    async with house.session.get(house.public + "/v1/models/m", headers=headers) as response:
        assert await response.json() == cards[0]


async def test_a_key_sees_the_models_of_its_tenant_and_no_others(house: House) -> None:
    await house.publish(
        route("m"),
        route("secret", tenant="tenant-b", namespace="team-b"),
        route("other", namespace="team-a2"),
    )
    assert await models(house, KEY_A) == ["m"]
    assert await models(house, KEY_B) == ["secret"]


@pytest.mark.parametrize("model", ["secret", "team-b/secret"])
async def test_a_foreign_model_and_an_unknown_one_give_the_same_answer(house: House, model: str) -> None:
    engine = await house.engine()
    await house.publish(route("m", engine), route("secret", engine, tenant="tenant-b", namespace="team-b"))
    foreign = await house.ask(model)
    unknown = await house.ask("x" * len(model))
    assert foreign[0] == unknown[0] == 404
    assert str(foreign[1]).replace(model, "?") == str(unknown[1]).replace("x" * len(model), "?")
    assert not engine.bodies


async def test_a_service_without_a_tenant_belongs_to_nobody(house: House) -> None:
    house.api.know(key("n"), "", "team-a")
    await house.publish(route("m", await house.engine(), tenant=""))
    assert await models(house, key("n")) == []
    assert (await house.ask(api_key=key("n")))[0] == 404


async def test_a_model_card_of_a_foreign_model_is_not_found(house: House) -> None:
    await house.publish(route("m"), route("secret", tenant="tenant-b", namespace="team-b"))
    assert house.session is not None
    for name, status in (("m", 200), ("team-a/m", 200), ("secret", 404), ("team-b/secret", 404)):
        headers = {"Authorization": f"Bearer {KEY_A}"}
        async with house.session.get(f"{house.public}/v1/models/{name}", headers=headers) as response:
            assert response.status == status, name


@pytest.mark.parametrize(
    ("api_key", "status", "code"),
    [(None, 401, "invalid_api_key"), ("sk-123", 401, "invalid_api_key"), (key("x"), 401, "invalid_api_key")],
)
async def test_without_a_valid_key_there_is_no_answer(
    house: House, api_key: str | None, status: int, code: str
) -> None:
    await house.publish(route("m", await house.engine()))
    got, answer = await house.ask(api_key=api_key)
    assert (got, answer["error"]["code"]) == (status, code)


async def test_a_key_without_the_inference_scope_is_forbidden(house: House) -> None:
    house.api.know(key("r"), "tenant-a", "team-a", scopes=["rest"])
    await house.publish(route("m", await house.engine()))
    status, answer = await house.ask(api_key=key("r"))
    assert (status, answer["error"]["type"]) == (403, "permission_error")


async def test_an_expired_key_is_refused_though_the_api_still_lists_it(house: House) -> None:
    house.api.know(key("e"), "tenant-a", "team-a", expires_at=datetime.now(UTC) - timedelta(seconds=1))
    await house.publish(route("m", await house.engine()))
    assert (await house.ask(api_key=key("e")))[0] == 401


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({}, "model"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"model": "m", "stream": "yes"}, "stream"),
    ],
)
async def test_a_request_that_makes_no_sense_is_a_400_that_names_the_field(
    house: House, body: Any, param: str | None
) -> None:
    await house.publish(route("m", await house.engine()))
    async with house.post(body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_what_the_engine_says_is_wrong_reaches_the_client(house: House) -> None:
    engine = await house.engine()
    engine.status = 400
    await house.publish(route("m", engine))
    assert await house.ask() == (400, {"error": {"message": "no"}})
    assert len(engine.bodies) == 1


async def test_unknown_paths_and_methods_are_openai_errors(house: House) -> None:
    assert house.session is not None
    async with house.session.get(house.public + "/v1/nothing") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "unknown_route"
    async with house.session.get(house.public + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_a_name_that_stands_twice_in_an_object_is_refused_before_one_is_lost(house: House) -> None:
    await house.publish(route("m", await house.engine()))
    twice = b'{"model": "m", "logit_bias": {"7": 1, "7": 2}}'
    headers = {"Authorization": f"Bearer {KEY_A}"}
    assert house.session is not None
    async with house.session.post(house.public + "/v1/completions", data=twice, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "7"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/batches"])
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
async def test_a_number_that_json_does_not_have_reaches_no_replica(
    house: House, path: str, number: str
) -> None:
    engine = await house.engine()
    await house.publish(route("m", engine))
    text = f'{{"model": "m", "prompt": "a", "user": [{number}]}}'
    headers = {"Authorization": f"Bearer {KEY_A}"}
    assert house.session is not None
    async with house.session.post(house.public + path, data=text, headers=headers) as response:
        assert response.status == 400
        assert f"{number} is no number of JSON" in (await response.json())["error"]["message"]
    assert not engine.bodies


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/batches"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_what_its_encoding_says_is_a_400(
    house: House, caplog: pytest.LogCaptureFixture, path: str, encoding: str
) -> None:
    await house.publish(route("m", await house.engine()))
    headers = {"Authorization": f"Bearer {KEY_A}", "Content-Encoding": encoding}
    plain = b'{"model": "m", "prompt": "hi"}'
    assert house.session is not None
    async with house.session.post(house.public + path, data=plain, headers=headers) as response:
        assert response.status == 400
        assert "Content-Encoding" in (await response.json())["error"]["message"]
    headers["Content-Encoding"] = "gzip"
    url = house.public + "/v1/completions"
    async with house.session.post(url, data=gzip.compress(plain), headers=headers) as response:
        assert response.status == 200
    assert not [line for line in caplog.records if line.exc_info]


async def said(house: House, sent: bytes) -> bytes:
    """All that the gateway says on a connection until it closes it."""
    assert house.gateway is not None
    reader, writer = await asyncio.open_connection(*house.gateway.public)
    writer.write(sent)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("end", [b" : Bearer %s\r\n\r\n", b": Bearer %s\0\r\n\r\n", b": Bearer %s\n\n"])
async def test_what_is_not_http_is_an_openai_error_and_its_key_is_in_no_log(
    house: House, caplog: pytest.LogCaptureFixture, end: bytes
) -> None:
    caplog.set_level("DEBUG")
    sent = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization" + end % KEY_A.encode()
    head, _, answer = (await said(house, sent)).partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    assert b"aiohttp" not in head
    assert json.loads(answer)["error"]["code"] == "bad_request"
    assert KEY_A not in caplog.text
    assert KEY_A.encode() not in answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/batches"])
async def test_a_chunk_of_a_wrong_size_is_a_400_at_once(
    house: House, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    await house.publish(route("m", await house.engine()))
    assert house.gateway is not None
    caplog.set_level("DEBUG")
    reader, writer = await asyncio.open_connection(*house.gateway.public)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY_A}\r\n"
    writer.write(head.encode() + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"mod\r\n')
    await asyncio.sleep(0.05)  # the handler waits for the next chunk by now
    writer.write(f"zz {KEY_A}\r\n".encode())
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert "chunks" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert not [line for line in caplog.records if line.exc_info]
    assert KEY_A not in caplog.text


async def test_an_unknown_expectation_is_an_openai_error(house: House) -> None:
    for path in (b"/v1/models", b"/v1/nothing"):
        answer = await said(house, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nExpect: foo\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 417 ")
        assert b"aiohttp" not in head
        error = json.loads(body)["error"]
        assert (error["code"], "100-continue" in error["message"]) == ("bad_request", True)


async def test_a_wrong_name_does_not_fill_the_answer(house: House) -> None:
    await house.publish(route("m", await house.engine()))
    status, answer = await house.ask("x" * 10_000)
    assert status == 404
    assert "x" * 80 + "'…" in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 250
    assert house.session is not None
    async with house.session.get(house.public + "/" + "x" * 5000) as response:
        assert len(await response.text()) < 300


async def test_a_large_body_goes_through_and_one_over_the_limit_is_refused(house: House) -> None:
    await house.stop_gateway()
    house.overrides["request_body_mib"] = 2
    await house.start_gateway()
    engine = await house.engine()
    await house.publish(route("m", engine))
    for size, status in (((2 << 20) - 200, 200), (2 << 20, 413)):
        body = io.BytesIO(json.dumps({"model": "m", "prompt": "x" * size}).encode())
        assert house.session is not None
        headers = {"Authorization": f"Bearer {KEY_A}"}
        async with house.session.post(
            house.public + "/v1/completions", data=body, headers=headers
        ) as response:
            assert response.status == status
            if status == 413:
                sent = len(body.getvalue())
                error = (await response.json())["error"]
                assert error["message"].startswith(
                    f"The request's body has {sent:,} bytes; at most 2,097,152 (2 MiB) are taken."
                )
                assert error["code"] == "request_too_large"
    assert [len(body["prompt"]) for body in engine.bodies] == [(2 << 20) - 200]


async def test_a_body_whose_size_is_not_told_is_cut_off_at_the_limit(house: House) -> None:
    await house.stop_gateway()
    house.overrides["request_body_mib"] = 1
    await house.start_gateway()
    await house.publish(route("m", await house.engine()))

    async def pieces(count: int) -> AsyncIterator[bytes]:
        yield b'{"model": "m", "prompt": "'
        for _ in range(count):
            yield b"x" * (1 << 16)
        yield b'"}'

    assert house.session is not None
    headers = {"Authorization": f"Bearer {KEY_A}"}
    for count, status in ((15, 200), (16, 413)):
        async with house.session.post(
            house.public + "/v1/completions", data=pieces(count), headers=headers
        ) as response:
            assert response.status == status
            if status == 413:
                message = (await response.json())["error"]["message"]
                assert "more than 1,048,576 bytes; at most 1,048,576 (1 MiB)" in message


async def test_a_request_does_not_grow_by_its_characters_on_its_way(house: House) -> None:
    engine = await house.engine()
    await house.publish(route("m", engine))
    for prompt in ("é世🙂" * 1000, "\ud800 is half a character", '"\\\n\x00'):
        sent = json.dumps({"model": "m", "prompt": prompt}, ensure_ascii=False).encode(
            errors="backslashreplace"
        )
        headers = {"Authorization": f"Bearer {KEY_A}"}
        assert house.session is not None
        async with house.session.post(
            house.public + "/v1/completions", data=sent, headers=headers
        ) as response:
            assert response.status == 200
        assert engine.bodies[-1]["prompt"] == prompt
        assert int(engine.seen_headers[-1]["Content-Length"]) <= len(sent)


async def test_the_replica_sees_our_bearer_and_nothing_of_the_clients_headers(house: House) -> None:
    engine = await house.engine()
    await house.publish(route("m", engine))
    sent = {"Cookie": "a=b", "X-Forwarded-For": "1.2.3.4", "X-Secret": "s"}
    async with house.post({"model": "m"}, headers=sent) as response:
        request_id = response.headers["X-Request-Id"]
    seen = engine.seen_headers[0]
    assert seen["Authorization"] == "Bearer up"
    assert seen["X-Request-Id"] == request_id
    assert not {name.lower() for name in sent} & {name.lower() for name in seen}
    assert KEY_A not in str(seen)


async def test_the_replica_learns_for_whom_it_works_from_the_key_and_not_from_the_client(
    house: House,
) -> None:
    engine = await house.engine()
    await house.publish(route("m", engine))
    claimed = {"x-busbar-tenant": "somebody-else", "x-busbar-key": "another", "x-busbar-weight": "1000"}
    async with house.post({"model": "m"}, headers=claimed) as response:
        assert response.status == 200
    seen = engine.seen_headers[0]
    assert seen.getall("x-busbar-tenant") == ["tenant-a"]
    assert seen.getall("x-busbar-key") == ["id-a"]
    assert seen.getall("x-busbar-weight") == ["1"]


async def test_a_redirect_is_never_followed(house: House) -> None:
    target, engine = await house.engine(), await house.engine()
    engine.status = 307
    engine.headers = {"Location": target.url + "/v1/completions"}
    await house.publish(route("m", engine))
    assert (await house.ask())[0] == 502
    assert not target.bodies


async def test_ready_means_that_routes_are_known(house: House) -> None:
    assert house.session is not None
    async with house.session.get(house.public + "/health") as response:
        assert response.status == 200
    await house.publish(route("m"))
    async with house.session.get(house.public + "/ready") as response:
        assert response.status == 200


async def test_chat_completions_go_to_the_chat_route(house: House) -> None:
    engine = await house.engine("hello")
    await house.publish(route("m", engine))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with house.post(body, path="/v1/chat/completions") as response:
        assert (await response.json())["choices"][0]["message"]["content"] == "hello"


async def test_the_stream_of_a_chat_has_all_words(house: House) -> None:
    await house.publish(route("m", await house.engine("a", "b", "c")))
    stream = await house.stream()
    assert text_of(stream) == "abc"
    assert stream[-1] == "[DONE]"
