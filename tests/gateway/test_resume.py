"""A replica that dies in mid-stream: another goes on, and the client sees one whole answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.gateway.parts import PATIENCE_S, Engine, House, route, text_of

from busbar.gateway.delivery import Call, Delivery
from busbar.gateway.errors import BadUpstream
from busbar.gateway.sse import Meter, Wish
from busbar.kube.contracts.request_size import REPLICA_REQUEST_BYTES, REQUEST_BYTES, RESUME_TOKENS
from busbar.kube.contracts.streams import TERMS_HEADER, StreamTerms

WORDS = ("a", "b", "c", "d")
GONE = {"pod": "gone", "url": "http://127.0.0.1:1", "ready": True, "draining": False}


async def numbered(house: House, *, dies_at: int | None = None, digest: str = "x") -> Engine:
    engine = await house.engine(*WORDS, digest=digest)
    engine.die_at = dies_at
    return engine


@pytest.fixture
async def house(house: House) -> House:
    """A replica that has failed gets no second request, however late its routes change or the next one is asked."""
    await restart(house, suspect_s=60.0, suspect_max_s=60.0)
    return house


async def restart(house: House, **settings: float) -> None:
    await house.stop_gateway()
    house.overrides.update(settings)
    await house.start_gateway()


async def total(house: House) -> tuple[int, int, int]:
    await house.api.wait_for(1)
    return house.api.total("id-a")


def resumed(house: House) -> float:
    assert house.gateway is not None
    found = house.gateway._metrics.totals.get_sample_value("busbar_gateway_streams_resumed_total")
    return found or 0.0


@pytest.mark.parametrize("dies_at", [1, 2, 3])
async def test_another_replica_resumes_a_stream_where_the_first_died(house: House, dies_at: int) -> None:
    dying, other = await numbered(house, dies_at=dies_at), await numbered(house)
    await house.publish(route("m", dying, other))
    stream = await house.stream()
    assert text_of(stream) == "abcd"
    assert stream[-1] == "[DONE]"
    assert await total(house) == (1, 7, 4)
    assert resumed(house) == 1
    (asked,) = other.bodies
    assert asked["choices"] == [{"tokens": list(range(100, 100 + dies_at)), "ended": False}]
    assert asked["request"]["prompt"] == "hi"
    assert dying.seen_headers[0][TERMS_HEADER] == other.seen_headers[0][TERMS_HEADER]


async def test_a_death_between_the_last_token_and_the_end_repeats_nothing(house: House) -> None:
    dying, other = await numbered(house, dies_at=4), await numbered(house)
    await house.publish(route("m", dying, other))
    stream = await house.stream(stream_options={"include_usage": True})
    assert text_of(stream) == "abcd"
    assert stream[-2]["usage"] == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    assert await total(house) == (1, 7, 4)
    assert other.bodies[0]["choices"][0]["ended"] is True


async def test_the_role_of_a_chat_comes_once(house: House) -> None:
    dying, other = await numbered(house, dies_at=2), await numbered(house)
    await house.publish(route("m", dying, other))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with house.post(body, path="/v1/chat/completions") as response:
        text = (await response.read()).decode()
    assert text.count('"assistant"') == 1
    assert [w for w in WORDS if f'"content":"{w}"' not in text] == []
    assert other.bodies[0]["path"] == "/v1/chat/completions"


async def test_side_lines_are_not_sent_to_the_client(house: House) -> None:
    await house.publish(route("m", await numbered(house)))
    async with house.post({"model": "m", "stream": True}) as response:
        assert b"busbar" not in await response.read()


async def test_a_stream_that_moves_goes_on_where_its_keys_and_values_are(house: House) -> None:
    """Also where others are less busy, and again and again: nobody has failed, and nobody is under suspicion."""
    engines = [await numbered(house) for _ in range(3)]
    for engine in engines:
        engine.leaves_at = 2
    engines[2].leaves_at = None
    engines[0].moves_to = engines[1].moves_to = engines[2].url
    await house.publish(route("m", *engines))
    for _ in range(5):
        assert text_of(await house.stream()) == "abcd"
    assert all("digest" not in body for engine in engines[:2] for body in engine.bodies)
    assert sum("digest" in body for body in engines[2].bodies) == len(engines[0].bodies + engines[1].bodies)
    assert len(engines[0].bodies + engines[1].bodies) > 1
    assert json.loads(engines[0].seen_headers[0][TERMS_HEADER])["moves"] is True


async def test_a_stream_that_moves_to_where_nobody_is_goes_on_elsewhere(house: House) -> None:
    first, other = await numbered(house), await numbered(house)
    first.leaves_at, first.moves_to = 1, "http://127.0.0.1:1"
    other.leaves_at, other.moves_to = 1, "http://127.0.0.1:1"
    await house.publish(route("m", first))
    asking = asyncio.create_task(house.stream())
    await first.arrived.wait()
    other.leaves_at = None
    await house.publish(route("m", other))
    assert text_of(await asking) == "abcd"


async def test_a_stream_on_which_two_replicas_failed_is_not_resumed_again(house: House) -> None:
    engines = [await numbered(house, dies_at=1), await numbered(house, dies_at=2), await numbered(house)]
    await house.publish(route("m", *engines))
    stream = await house.stream()
    assert text_of(stream) == "ab"
    assert "2 replicas" in stream[-1]["error"]["message"]
    assert engines[2].bodies == []
    assert await total(house) == (1, 7, 2)


async def test_a_death_before_the_first_text_counts_as_well(house: House) -> None:
    engines = [await numbered(house, dies_at=0), await numbered(house, dies_at=1), await numbered(house)]
    await house.publish(route("m", *engines))
    assert text_of(await house.stream()) == "a"
    assert engines[2].bodies == []


async def test_replicas_that_shut_down_or_refuse_do_not_count_as_failed_attempts(house: House) -> None:
    leaving = [await numbered(house) for _ in range(3)]
    for at, engine in enumerate(leaving, 1):
        engine.leaves_at = at
    full = await numbered(house)
    full.status = 503
    await house.publish(route("m", *leaving, full, GONE, await numbered(house)))
    assert text_of(await house.stream()) == "abcd"
    assert resumed(house) == 3


async def test_a_replica_of_another_model_ends_the_stream_with_an_error(house: House) -> None:
    await house.publish(route("m", await numbered(house, dies_at=2), await numbered(house, digest="y")))
    stream = await house.stream()
    assert text_of(stream) == "ab"
    assert "409" in stream[-1]["error"]["message"]
    assert await total(house) == (1, 7, 2)


async def test_a_broken_stream_of_a_model_server_without_token_ids_ends_with_an_error(house: House) -> None:
    dying, other = await house.engine(*WORDS), await house.engine(*WORDS)
    dying.die_at = 2
    await house.publish(route("m", dying, other))
    stream = await house.stream()
    assert text_of(stream) == "ab"
    assert "Ask again" in stream[-1]["error"]["message"]
    assert other.bodies == []


async def test_a_stream_longer_than_the_ids_that_are_kept_ends_with_an_error(house: House) -> None:
    await house.stop_gateway()
    house.overrides["resume_tokens"] = 2
    await house.start_gateway()
    await house.publish(route("m", await numbered(house, dies_at=3), await numbered(house)))
    stream = await house.stream()
    assert text_of(stream) == "abc"
    assert "Ask again" in stream[-1]["error"]["message"]


async def test_a_stream_waits_for_a_replica_to_go_on_at(house: House) -> None:
    dying = await numbered(house, dies_at=2)
    await house.publish(route("m", dying))
    asking = asyncio.create_task(house.stream())
    async with asyncio.timeout(PATIENCE_S):
        await dying.arrived.wait()
        await house.publish(route("m"))
        assert not (await asyncio.wait([asking], timeout=0.1))[0]
        await house.publish(route("m", await numbered(house)))
        assert text_of(await asking) == "abcd"


async def test_a_stream_for_which_no_replica_comes_ends_with_an_error(house: House) -> None:
    await restart(house, hold_timeout_s=0.2)
    dying = await numbered(house, dies_at=2)
    await house.publish(route("m", dying))
    asking = asyncio.create_task(house.stream())
    await dying.arrived.wait()
    await house.publish(route("m"))
    stream = await asking
    assert text_of(stream) == "ab"
    assert "no other replica" in stream[-1]["error"]["message"]


async def test_a_disconnect_while_a_stream_waits_charges_what_was_delivered(house: House) -> None:
    dying = await numbered(house, dies_at=2)
    await house.publish(route("m", dying))
    async with house.post({"model": "m", "stream": True}) as response:
        await response.content.readuntil(b'"b"')
        await house.publish(route("m"))
        response.close()
    assert await total(house) == (1, 7, 2)
    other = await numbered(house)
    await house.publish(route("m", other))
    assert text_of(await house.stream()) == "abcd"
    assert [body.get("path") for body in other.bodies] == [None]


async def test_an_answer_that_is_not_streamed_is_retried_with_the_same_seed(house: House) -> None:
    dying, other = await numbered(house, dies_at=0), await numbered(house)
    await house.publish(route("m", dying, other))
    assert (await house.ask())[0] == 200
    assert dying.seen_headers[0][TERMS_HEADER] == other.seen_headers[0][TERMS_HEADER]
    assert await total(house) == (1, 7, 4)


def test_each_call_has_a_seed_of_its_own_and_says_what_usage_is_for_the_client() -> None:
    def terms(document: dict[str, Any]) -> StreamTerms:
        return StreamTerms.model_validate_json(Call("/", "r", document, True, 0.0).terms())

    wants = {"include_usage": True}
    assert len({terms({}).seed for _ in range(3)}) == 3
    assert terms({}).usage == "none"
    assert terms({"stream_options": wants}).usage == "last"
    assert terms({"stream_options": {**wants, "continuous_usage_stats": True}}).usage == "each"


@pytest.mark.parametrize(
    ("document", "choices"),
    [
        ({"prompt": "hi"}, 1),
        ({"prompt": "hi", "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1], [2]]}, 2),
        ({"messages": [], "n": None}, 1),
    ],
)
def test_a_resume_names_every_choice_also_those_that_have_not_begun(
    document: dict[str, Any], choices: int
) -> None:
    delivery = Delivery(Call("/v1/completions", "r", document, True, 0.0), 100)
    delivery.meter.event(b"data: {}\n:busbar 0 1 7 2 5,6")
    asked = json.loads(delivery.resume_body("m"))
    assert asked["choices"] == [{"tokens": [5, 6], "ended": True}] + [{"tokens": [], "ended": False}] * (
        choices - 1
    )
    assert asked["cachedTokens"] == 2


def test_the_largest_request_fits_an_engine_also_when_its_stream_goes_on_elsewhere() -> None:
    document = {"model": "m", "stream": True, "prompt": "é" * (REQUEST_BYTES // 2)}
    call = Call("/v1/chat/completions", "r", document, True, 0.0)
    delivery = Delivery(call, RESUME_TOKENS)
    delivery.digest = "d" * 32
    tokens = b",".join([b"4294967295"] * RESUME_TOKENS)
    delivery.meter.event(b"data: {}\n:busbar 0 0 7 2 " + tokens)
    assert delivery.resumable
    model_id = "m" * 253
    assert len(delivery.resume_body(model_id)) <= REPLICA_REQUEST_BYTES
    assert len(call.upstream_body(model_id, continuous=True)) <= REPLICA_REQUEST_BYTES


@pytest.mark.parametrize(
    "side", [b"", b"0 0 7 0", b"0 0 7 0 x", b"0 0 -7 0 1", b"0 0 7 0 -1", b"0 0 7 0 4294967296", b"! why"]
)
def test_a_side_line_that_makes_no_sense_is_refused(side: bytes) -> None:
    with pytest.raises(BadUpstream):
        Meter(Wish(), 10).event(b"data: {}\n:busbar " + side)
    assert Meter(Wish(), 10).event(b"data: {}\n:busbar 0 0 7 0 1") == b"data: {}\n\n"
