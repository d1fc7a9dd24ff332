"""Replicas that fail, before and after the first byte; clients that disconnect; usage that the client did not
request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import APIError, AsyncOpenAI
from tests.gateway.parts import KEY_A, PATIENCE_S, Engine, House, events, route, text_of

from busbar.gateway.api_client import ApiClient
from busbar.gateway.proxy import Proxy
from busbar.gateway.settings import Settings
from busbar.kube.contracts.keys import PATH, KeyIdentity
from busbar.kube.token_file import TokenFile

GONE = {"pod": "gone", "url": "http://127.0.0.1:1", "ready": True, "draining": False}


async def finished(house: House, requests: int) -> None:
    await house.api.wait_for(requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_to_an_unreachable_replica_is_retried_on_another(house: House, stream: bool) -> None:
    engine = await house.engine("a", "b")
    await house.publish(route("m", GONE, engine))
    for _ in range(6):
        if stream:
            assert text_of(await house.stream()) == "ab"
        else:
            assert (await house.ask())[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_replica_dies_before_its_first_byte_is_retried(
    house: House, stream: bool
) -> None:
    dying, engine = await house.engine(), await house.engine("a", "b")
    dying.die_at = 0
    await house.publish(route("m", dying, engine))
    for _ in range(6):
        if stream:
            assert text_of(await house.stream()) == "ab"
        else:
            assert (await house.ask())[0] == 200
    assert dying.bodies


async def test_a_stream_whose_replica_dies_between_role_and_first_text_is_retried(
    house: House,
) -> None:
    dying, engine = await house.engine(), await house.engine("a", "b")
    dying.die_at = 0
    await house.publish(route("m", dying, engine))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    for _ in range(6):
        async with house.post(body, path="/v1/chat/completions") as response:
            stream = events(await response.read())
        assert [event["choices"][0]["delta"].get("content") for event in stream[:-1]] == ["", "a", "b"]
        assert stream[-1] == "[DONE]"
    assert dying.bodies


async def test_a_503_of_a_draining_replica_is_retried_on_another(house: House) -> None:
    draining, engine = await house.engine(), await house.engine("a")
    draining.status = 503
    await house.publish(route("m", draining, engine))
    for _ in range(4):
        assert (await house.ask())[0] == 200
    assert draining.bodies


async def test_a_replica_marked_draining_gets_no_new_request(house: House) -> None:
    old, new = await house.engine(), await house.engine()
    await house.publish(
        route("m", {"pod": "old", "url": old.url, "ready": True, "draining": True}, new),
    )
    for _ in range(4):
        assert (await house.ask())[0] == 200
    assert not old.bodies


async def test_a_request_on_which_two_replicas_failed_is_not_retried_again(house: House) -> None:
    engines = [await house.engine() for _ in range(5)]
    for engine in engines:
        engine.die_at = 0
    await house.publish(route("m", *engines))
    status, answer = await house.ask()
    assert (status, answer["error"]["code"]) == (502, "bad_upstream")
    assert sum(len(engine.bodies) for engine in engines) == 2


async def test_a_death_in_mid_stream_ends_it_with_an_error_event(house: House) -> None:
    engine = await house.engine("a", "b", "c")
    engine.die_at = 2
    await house.publish(route("m", engine))
    stream = await house.stream()
    assert text_of(stream) == "ab"
    assert stream[-1]["error"]["code"] == "bad_upstream"
    assert "Ask again" in stream[-1]["error"]["message"]


async def test_a_broken_stream_counts_what_was_delivered(house: House) -> None:
    engine = await house.engine("a", "b", "c")
    engine.die_at = 2
    await house.publish(route("m", engine))
    await house.stream()
    await finished(house, 1)
    assert house.api.total("id-a") == (1, 7, 2)


async def test_without_usage_each_piece_of_text_counts_as_one_token(house: House) -> None:
    engine = await house.engine("a", "b", "c")
    engine.tells_usage = False
    await house.publish(route("m", engine))
    await house.stream()
    await finished(house, 1)
    assert house.api.total("id-a") == (1, 0, 3)


async def test_an_engine_without_continuous_usage_is_asked_without_it_from_then_on(house: House) -> None:
    engine = await house.engine("a", "b")
    engine.knows_continuous = False
    await house.publish(route("m", engine))
    for _ in range(2):
        assert text_of(await house.stream()) == "ab"
    assert ["continuous_usage_stats" in body["stream_options"] for body in engine.bodies] == [
        True,
        False,
        False,
    ]
    await finished(house, 2)
    assert house.api.total("id-a") == (2, 14, 4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "said"), [(400, b"max_tokens is too large"), (404, b""), (422, b"[]")])
async def test_a_refusal_that_is_not_json_is_an_error_and_leaves_the_replica_in_use(
    house: House, stream: bool, status: int, said: bytes
) -> None:
    engine = await house.engine()
    await house.publish(route("m", engine))
    engine.status, engine.refusal = status, said
    got, answer = await house.ask(stream=stream)
    assert got == status
    assert said.decode() in answer["error"]["message"]
    assert len(engine.bodies) == 1
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("said", [b"<html>", b"[]", b"null"])
async def test_an_answer_that_is_not_an_object_is_asked_of_another_replica(house: House, said: bytes) -> None:
    odd, engine = await house.engine(), await house.engine("a")
    await house.publish(route("m", odd, engine))
    odd.refusal = said
    status, answer = await house.ask()
    assert (status, answer["choices"][0]["text"]) == (200, "a")
    assert len(odd.bodies) == 1


async def test_a_wait_that_is_not_a_number_of_seconds_is_not_read(house: House) -> None:
    engine, other = await house.engine(), await house.engine()
    await house.publish(route("m", engine, other))
    engine.status, engine.headers = 503, {"Retry-After": "\u00b2"}
    assert (await house.ask())[0] == 200
    assert len(engine.bodies) == 1


async def test_a_400_about_something_else_is_passed_on_at_once(house: House) -> None:
    engine = await house.engine("a")
    engine.status = 400
    await house.publish(route("m", engine))
    async with house.post({"model": "m", "stream": True}) as response:
        assert response.status == 400
        assert await response.json() == {"error": {"message": "no"}}
    assert len(engine.bodies) == 1


async def test_a_request_that_used_all_its_time_is_not_retried(house: House) -> None:
    await house.stop_gateway()
    house.overrides["first_byte_timeout_s"] = 0.5
    await house.start_gateway()
    engines = [await house.engine("a"), await house.engine("a")]
    for engine in engines:
        engine.pause_at = 0
    await house.publish(route("m", *engines))
    status, answer = await house.ask()
    assert (status, answer["error"]["code"]) == (502, "bad_upstream")
    assert sum(len(engine.bodies) for engine in engines) == 1


@pytest.mark.parametrize("health", [503, 0])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_to_a_hanging_replica_is_retried_long_before_its_time_limit(
    house: House, stream: bool, health: int
) -> None:
    await house.stop_gateway()
    house.overrides.update(probe_after_s=0.05, probe_timeout_s=0.05)
    await house.start_gateway()
    hung, well = await house.engine("a"), await house.engine("b")
    hung.pause_at, hung.health = 0, health
    await house.publish(route("m", hung, well))
    if stream:
        assert [e["choices"][0]["text"] for e in (await house.stream())[:-1]] == ["b"]
    else:
        assert (await house.ask())[1]["choices"][0]["text"] == "b"
    assert len(hung.bodies) == 1


async def test_a_stream_whose_replica_hangs_ends_with_an_error_before_its_time_limit(house: House) -> None:
    await house.stop_gateway()
    house.overrides.update(probe_after_s=0.05, probe_timeout_s=0.05)
    await house.start_gateway()
    engine = await house.engine("a", "b")
    engine.pause_at, engine.health = 1, 503
    await house.publish(route("m", engine))
    assert "it hangs" in (await house.stream())[-1]["error"]["message"]


async def test_a_slow_replica_with_a_good_health_check_is_waited_for(house: House) -> None:
    await house.stop_gateway()
    house.overrides["probe_after_s"] = 0.02
    await house.start_gateway()
    engine = await house.engine("a")
    engine.pause_at = 0
    await house.publish(route("m", engine))
    asking = asyncio.create_task(house.ask())
    assert not (await asyncio.wait([asking], timeout=0.3))[0]
    engine.go.set()
    assert (await asking)[1]["choices"][0]["text"] == "a"


async def test_a_disconnect_cancels_the_request_and_charges_what_was_delivered(house: House) -> None:
    engine = await house.engine("a", "b", "c")
    engine.pause_at = 1
    await house.publish(route("m", engine))
    async with house.post({"model": "m", "stream": True}) as response:
        assert b"a" in await response.content.readuntil(b"\n\n")
        response.close()
    async with asyncio.timeout(PATIENCE_S):
        await engine.cancelled.wait()
    await finished(house, 1)
    assert house.api.total("id-a") == (1, 7, 1)


async def test_a_disconnect_before_an_answer_cancels_the_request_and_charges_nothing(house: House) -> None:
    engine = await house.engine("a")
    engine.pause_at = 0
    await house.publish(route("m", engine))
    asking = asyncio.create_task(house.ask())
    async with asyncio.timeout(PATIENCE_S):
        await engine.arrived.wait()
        asking.cancel()
        await engine.cancelled.wait()
    engine.pause_at = None
    await house.ask()
    await finished(house, 1)
    assert house.api.total("id-a") == (1, 7, 1)


async def test_usage_is_hidden_from_a_client_that_did_not_ask_for_it(house: House) -> None:
    engine = await house.engine("a", "b")
    await house.publish(route("m", engine))
    stream = await house.stream()
    assert [sorted(event) for event in stream[:-1]] == [["choices", "id"]] * 2
    assert engine.bodies[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


async def test_usage_is_shown_at_the_end_to_a_client_that_asked(house: House) -> None:
    await house.publish(route("m", await house.engine("a", "b")))
    stream = await house.stream(stream_options={"include_usage": True})
    assert [event["usage"] for event in stream[:2]] == [None, None]
    assert stream[2]["usage"]["completion_tokens"] == 2
    assert stream[3] == "[DONE]"


async def test_usage_is_shown_on_every_event_to_a_client_that_asked_for_that(house: House) -> None:
    await house.publish(route("m", await house.engine("a", "b")))
    stream = await house.stream(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in stream[:3]] == [1, 2, 2]


async def test_a_request_whose_replica_refuses_the_bearer_is_retried_on_another(house: House) -> None:
    stranger, engine = Engine(bearer="other"), await house.engine("a")
    house.engines.append(stranger)
    await stranger.start()
    await house.publish(route("m", stranger, engine))
    for _ in range(4):
        assert (await house.ask())[0] == 200
    assert stranger.bodies


async def test_a_replica_with_a_bearer_of_its_own_is_called_with_that_one(house: House) -> None:
    former = Engine("a", bearer="its-own")
    house.engines.append(former)
    await former.start()
    endpoint = {"pod": "m-1-0", "url": former.url, "ready": True, "bearer": "its-own"}
    await house.publish(route("m", endpoint))
    assert (await house.ask())[0] == 200


async def test_the_openai_client_streams_through_the_gateway(house: House) -> None:
    await house.publish(route("m", await house.engine("hello", " world")))
    async with AsyncOpenAI(base_url=house.public + "/v1", api_key=KEY_A, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        words = [chunk.choices[0].delta.content async for chunk in stream]
    assert words == ["", "hello", " world"]


async def test_the_openai_client_raises_on_a_broken_stream(house: House) -> None:
    engine = await house.engine("hello", " world")
    engine.die_at = 1
    await house.publish(route("m", engine))
    async with AsyncOpenAI(base_url=house.public + "/v1", api_key=KEY_A, max_retries=0) as client:
        stream = await client.completions.create(model="m", prompt="hi", stream=True)
        with pytest.raises(APIError, match="replica failed"):
            [chunk async for chunk in stream]


async def test_a_client_that_reads_nothing_is_cut_off(house: House) -> None:
    await house.stop_gateway()
    house.overrides["client_stall_s"] = 0.2
    await house.start_gateway()
    engine = await house.engine(*["x" * 65536] * 400)
    await house.publish(route("m", engine))
    async with house.post({"model": "m", "stream": True}, read_bufsize=1024) as response:
        async with asyncio.timeout(PATIENCE_S):
            await engine.cancelled.wait()
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_a_client_that_stops_reading_at_the_end_counts_as_disconnected() -> None:
    aborted: list[bool] = []
    left = asyncio.Event()

    def abort() -> None:
        aborted.append(True)
        left.set()

    request = cast(web.Request, SimpleNamespace(transport=SimpleNamespace(abort=abort)))
    nothing = cast(Any, None)
    proxy = Proxy(Settings(client_stall_s=0.0), nothing, nothing, nothing, nothing, None, nothing)

    async def write() -> None:
        with proxy._client(request) as client:
            client.heard()
            await left.wait()
            raise ConnectionResetError("Cannot write to closing transport")

    with pytest.raises(ConnectionResetError, match="stopped reading"):
        await write()
    assert aborted == [True]
    await proxy.stop()


async def test_an_answer_of_the_api_is_read_to_its_end_however_it_arrives(tmp_path: Path) -> None:
    identity = KeyIdentity(key_id="k", subject="ann", tenant="t", namespaces=[f"n{i}" for i in range(3000)])
    first_half_read = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        text = identity.model_dump_json(by_alias=True).encode()
        await response.write(text[:1000])
        await first_half_read.wait()
        await response.write(text[1000:])
        return response

    app = web.Application()
    app.router.add_post(PATH, answer)
    (tmp_path / "token").write_text("t")
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        api = ApiClient(session, str(server.make_url("")), TokenFile(tmp_path / "token"))
        asking = asyncio.create_task(api.lookup("0" * 64, "g"))
        await asyncio.wait([asking], timeout=0.2)
        first_half_read.set()
        assert await asking == identity
