"""/v1/responses through the gateway: events passed on, tokens counted, replicas that fail before and after the text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from openai import AsyncOpenAI
from tests.gateway.parts import KEY_A, Engine, House, route

from busbar.gateway.errors import BadUpstream
from busbar.gateway.responses import PATH, ResponsesMeter
from busbar.gateway.sse import tokens
from busbar.kube.contracts.streams import DIGEST_HEADER, SIDE_LINE, StreamEnd

USAGE = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
ASK: dict[str, Any] = {"model": "m", "input": "hi"}


class Responder(Engine):
    """A replica of this route: as vLLM writes it or, with `sided`, as our engine does. `die_at` counts words; -1 is
    behind the two events that open the stream."""

    def __init__(self, *words: str, sided: bool = False) -> None:
        super().__init__(*words)
        self.sided = sided
        self.end = "completed"
        """What the last event says; empty: there is none."""

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post(PATH, self._complete)
        return app

    def written(self) -> list[bytes]:
        """The events, each with its blank line."""
        made: list[bytes] = []

        def add(kind: str, side: bytes = b"", **fields: object) -> None:
            document = {"type": f"response.{kind}", "sequence_number": len(made), **fields}
            data = json.dumps(document).encode()
            made.append(f"event: response.{kind}\ndata: ".encode() + data + side + b"\n\n")

        for kind in ("created", "in_progress"):
            add(kind, response=self._document({"model": "m"}) | {"usage": None})
        for count, word in enumerate(self.words):
            last = count + 1 == len(self.words)
            side = SIDE_LINE + b"0 %d 7 2 %d" % (last, 100 + count) if self.sided else b""
            add("output_text.delta", side, delta=word)
        if self.end:
            add(self.end, response=self._document({"model": "m"}))
        return made

    def _document(self, body: dict[str, Any]) -> dict[str, Any]:
        part = {"type": "output_text", "text": "".join(self.words), "annotations": []}
        message = {
            "type": "message",
            "id": "1",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
        usage = USAGE if self.tells_usage else None
        return {"id": "x", "object": "response", "model": body["model"], "output": [message], "usage": usage}

    async def _stream(self, request: web.Request, body: dict[str, Any], begin: int = 0) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if self.digest is not None:
            response.headers[DIGEST_HEADER] = self.digest
        await response.prepare(request)
        for place, event in enumerate(self.written(), -2):
            if begin and place < begin:
                continue
            if self.leaves_at == place:
                await response.write(b'event: response.failed\ndata: {"type":"response.failed"}')
                await response.write(SIDE_LINE + b"! leaving\n\n")
                return response
            if self.die_at is not None and place == self.die_at:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(event)
        if not self.end:
            await response.write(b"data: [DONE]\n\n")
        return response


async def started(house: House, engine: Responder) -> Responder:
    await engine.start()
    house.engines.append(engine)
    return engine


async def read(house: House, **fields: object) -> bytes:
    async with house.post({**ASK, "stream": True, **fields}, path=PATH) as response:
        assert response.status == 200, await response.text()
        return await response.read()


def parsed(data: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for event in data.decode().split("\n\n")[:-1]:
        name, text = event.split("\n")
        found.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize("sided", [False, True])
async def test_events_are_passed_on_as_they_are_and_their_tokens_are_counted(
    house: House, sided: bool
) -> None:
    engine = await started(house, Responder("a", "b", "c", sided=sided))
    await house.publish(route("m", engine, modelId="org/other"))
    shown = await read(house, model="team-a/m", metadata={"a": "b"})
    engine.sided = False
    assert shown == b"".join(engine.written())
    assert engine.bodies == [{**ASK, "stream": True, "model": "org/other", "metadata": {"a": "b"}}]
    await house.api.wait_for(1)
    assert house.api.total("id-a") == (1, 7, 3)


async def test_a_whole_answer_is_counted_by_this_routes_names(house: House) -> None:
    engine = await started(house, Responder("a", "b", "c"))
    await house.publish(route("m", engine, adapters=[{"name": "lora"}]))
    status, found = await house.ask_at(PATH, "m:lora", input="hi")
    assert (status, found["model"], found["usage"]) == (200, "m:lora", USAGE)
    await house.api.wait_for(1)
    assert house.api.total("id-a") == (1, 7, 3)


async def test_a_key_is_needed_and_a_foreign_model_is_unknown(house: House) -> None:
    engine = await started(house, Responder("a"))
    await house.publish(route("m", engine, tenant="tenant-b"))
    async with house.post(ASK, path=PATH, api_key=None) as response:
        assert response.status == 401
    assert (await house.ask_at(PATH, input="hi"))[0] == 404
    assert not engine.bodies


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("store", [True, "yes"], [False, None]),
        ("background", [True], [False, None]),
        ("previous_response_id", ["resp_1"], [None]),
        ("conversation", ["conv_1", {"id": "conv_1"}], [None]),
    ],
)
async def test_what_needs_a_store_reaches_no_replica_of_any_engine(
    house: House, name: str, bad: list[object], good: list[object]
) -> None:
    engine = await started(house, Responder("a"))
    await house.publish(route("m", engine))
    for value in bad:
        asked: dict[str, Any] = {"input": "hi", name: value}
        status, found = await house.ask_at(PATH, **asked)
        assert (status, found["error"]["param"]) == (400, name)
        assert "nothing is stored here" in found["error"]["message"]
    assert not engine.bodies
    for value in good:
        asked = {"input": "hi", name: value}
        assert (await house.ask_at(PATH, **asked))[0] == 200
    assert [body.get(name) for body in engine.bodies] == good


@pytest.mark.parametrize("die_at", [-2, -1, 0])
@pytest.mark.parametrize("sided", [False, True])
async def test_a_replica_that_dies_before_the_first_text_is_replaced_unseen(
    house: House, die_at: int, sided: bool
) -> None:
    dying = await started(house, Responder("x", "y", sided=sided))
    engine = await started(house, Responder("a", "b", sided=sided))
    dying.die_at = die_at
    await house.publish(route("m", dying, engine))
    found = parsed(await read(house))
    assert dying.bodies
    assert [event["sequence_number"] for event in found] == list(range(5))
    assert [event["delta"] for event in found if "delta" in event] == ["a", "b"]


@pytest.mark.parametrize("sided", [False, True])
async def test_a_stream_that_breaks_ends_with_this_routes_error_and_counts_what_was_delivered(
    house: House, sided: bool
) -> None:
    dying = await started(house, Responder("a", "b", "c", sided=sided))
    other = await started(house, Responder("a", "b", "c", sided=sided))
    dying.die_at = 2
    await house.publish(route("m", dying, other))
    found = parsed(await read(house))
    assert [event["sequence_number"] for event in found] == list(range(5))
    error = found[-1]
    assert (error["type"], error["code"], error["param"]) == ("error", "bad_upstream", None)
    assert "Ask again" in error["message"]
    assert not other.bodies, "it does not say that anybody else could go on"
    await house.api.wait_for(1)
    assert house.api.total("id-a") == (1, 7 if sided else 0, 2)


@pytest.mark.parametrize("dies_at", [1, 2, 3])
async def test_another_replica_of_our_engine_goes_on_with_a_stream(house: House, dies_at: int) -> None:
    """At 3 it dies between the last text and the last event, so that the last text is said once more, by the other one."""
    dying, other = [Responder("a", "b", "c", sided=True) for _ in range(2)]
    for engine in (dying, other):
        engine.digest = "x"
        await started(house, engine)
    dying.die_at = dies_at
    await house.publish(route("m", dying, other))
    found = parsed(await read(house))
    assert [event["sequence_number"] for event in found] == list(range(6))
    assert [event["delta"] for event in found if "delta" in event] == ["a", "b", "c"]
    assert found[-1]["type"] == "response.completed"
    (asked,) = other.bodies
    known = min(dies_at, 2)
    assert (asked["path"], asked["events"]) == (PATH, 2 + known)
    assert asked["choices"] == [{"tokens": list(range(100, 100 + known)), "ended": False}]
    await house.api.wait_for(1)
    assert house.api.total("id-a") == (1, 7, 3)


def in_groups(*events: bytes) -> tuple[ResponsesMeter, list[bytes | None]]:
    meter = ResponsesMeter(100)
    meter.holds = True
    return meter, [meter.event(event) for event in events]


def of(kind: str, side: str = "") -> bytes:
    event = f'event: response.{kind}\ndata: {{"type": "response.{kind}"}}'.encode()
    return event + (SIDE_LINE + side.encode() if side else b"")


def test_events_wait_for_the_side_line_behind_them() -> None:
    meter, shown = in_groups(of("created"), of("output_item.added"), of("output_text.delta", "0 0 3 0 5,6"))
    both = of("output_item.added") + b"\n\n" + of("output_text.delta") + b"\n\n"
    assert shown == [of("created") + b"\n\n", None, both]
    assert (meter.events, meter.completion_tokens, list(meter.traces[0])) == (3, 2, [5, 6])
    assert meter.event(b":" + SIDE_LINE + b"0 0 3 0 7") is None, "no event says anything of it yet"
    assert (meter.events, list(meter.traces[0])) == (3, [5, 6, 7])


def test_events_that_finish_an_answer_wait_for_the_last_one() -> None:
    meter, shown = in_groups(of("output_text.done"), of("output_item.done", "0 1 3 0 5"))
    assert (shown, meter.events, meter.completion_tokens, meter.traces) == ([None, None], 0, 0, {})
    whole = meter.event(of("completed"))
    assert whole is not None
    assert whole.count(b"\n\n") == 3
    assert (meter.done, meter.events, meter.completion_tokens, list(meter.traces[0])) == (True, 3, 1, [5])


def test_what_was_held_back_of_a_replica_that_ended_is_forgotten() -> None:
    meter, shown = in_groups(of("output_item.added"), of("failed", "! leaving http://10.0.0.1:9400"))
    assert (shown, meter.cut, meter.moved_to) == ([None, None], StreamEnd.LEAVING, "http://10.0.0.1:9400")
    meter.go_on()
    meter.cut = None
    assert meter.event(of("output_text.delta", "0 0 3 0 5")) == of("output_text.delta") + b"\n\n"
    assert meter.events == 1


async def test_the_openai_client_gets_the_error_of_a_broken_stream_as_an_event(house: House) -> None:
    engine = await started(house, Responder("a", "b", sided=True))
    engine.leaves_at = 1
    await house.publish(route("m", engine))
    async with AsyncOpenAI(base_url=house.public + "/v1", api_key=KEY_A, max_retries=0) as client:
        events = [event async for event in await client.responses.create(**ASK, stream=True)]
    assert [event.type for event in events[-2:]] == ["response.output_text.delta", "error"]
    assert events[-1].type == "error"
    assert "shuts down" in events[-1].message


async def test_an_answer_that_failed_or_was_cut_short_is_passed_on_and_counted(house: House) -> None:
    for count, end in enumerate(("failed", "incomplete"), 1):
        engine = await started(house, Responder("a", "b"))
        engine.end = end
        await house.publish(route("m", engine))
        assert parsed(await read(house))[-1]["type"] == f"response.{end}"
        await house.api.wait_for(count)
        assert house.api.total("id-a") == (count, 7 * count, 3 * count)


async def test_a_stream_without_its_last_event_is_a_broken_one(house: House) -> None:
    engine = await started(house, Responder("a", "b"))
    engine.end = ""
    await house.publish(route("m", engine))
    data = await read(house)
    assert b"[DONE]" not in data
    assert [event["type"] for event in parsed(data)[-2:]] == ["response.output_text.delta", "error"]


async def test_an_event_with_the_whole_answer_may_be_as_large_as_one(house: House) -> None:
    await house.stop_gateway()
    house.overrides |= {"event_kib": 1, "response_body_mib": 1}
    await house.start_gateway()
    engine = await started(house, Responder("a" * 500_000))
    await house.publish(route("m", engine))
    assert parsed(await read(house))[-1]["type"] == "response.completed"
    engine.words = ("a" * 1_100_000,)
    async with house.post({**ASK, "stream": True}, path=PATH) as response:
        assert response.status == 502
        assert "too large" in await response.text()


# -- the count ------------------------------------------------------------------------------------


def told(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode()


def test_deltas_count_until_side_lines_or_the_last_event_say_better() -> None:
    meter = ResponsesMeter()
    for kind in ("created", "in_progress", "output_item.added", "content_part.added"):
        meter.event(told(type=f"response.{kind}", response={"usage": None}))
    assert (meter.begun, meter.completion_tokens) == (False, 0)
    for kind in ("output_text", "function_call_arguments", "reasoning_text"):
        meter.event(told(type=f"response.{kind}.delta", delta="x"))
    assert (meter.begun, meter.completion_tokens) == (True, 3)
    meter.event(told(type="response.completed", response={"usage": USAGE | {"output_tokens": 9}}))
    assert (meter.prompt_tokens, meter.completion_tokens, meter.done) == (7, 9, True)
    ours = ResponsesMeter()
    ours.event(told(type="response.output_item.added") + SIDE_LINE + b"0 0 7 2 5,6")
    ours.event(told(type="response.output_text.delta", delta="x"))
    assert (ours.prompt_tokens, ours.completion_tokens, ours.traced) == (7, 2, False)


@pytest.mark.parametrize(
    "response",
    [None, 3, {}, {"usage": None}, {"usage": {"output_tokens": 5}}, {"usage": {"input_tokens": 0}}],
)
def test_a_last_event_without_usage_leaves_the_count(response: object) -> None:
    meter = ResponsesMeter()
    meter.event(told(type="response.output_text.delta", delta="x"))
    meter.event(told(type="response.completed", response=response))
    assert (meter.prompt_tokens, meter.completion_tokens, meter.done) == (0, 1, True)


def test_an_error_in_any_form_ends_the_stream() -> None:
    for event in (
        told(type="error", message="no"),
        told(error={"message": "no"}),
        told(type="response.failed"),
    ):
        meter = ResponsesMeter()
        assert meter.event(event) == event + b"\n\n"
        assert meter.failed
    kept = ResponsesMeter()
    kept.event(told(type="response.in_progress", response={"error": None}))
    assert not kept.failed


def test_comments_are_passed_on_and_not_numbered() -> None:
    meter = ResponsesMeter()
    assert meter.event(b": still here") == b": still here\n\n"
    meter.event(told(type="response.created"))
    broken = meter.broken({"error": {"message": "é", "type": "api_error", "param": None, "code": "x"}})
    assert parsed(broken) == [
        {"type": "error", "sequence_number": 1, "code": "x", "message": "é", "param": None}
    ]


@pytest.mark.parametrize("event", [b"data: {", b"data: 3", b'data: ["a"]'])
def test_what_is_not_an_event_is_refused(event: bytes) -> None:
    with pytest.raises(BadUpstream):
        ResponsesMeter().event(event)


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        (USAGE, (7, 3, 0)),
        ({**USAGE, "input_tokens_details": {"cached_tokens": 2}}, (7, 3, 2)),
        ({"input_tokens": 7}, (7, 0, 0)),
        ({"output_tokens": 3}, None),
        ({"input_tokens": -1}, None),
    ],
)
def test_usage_in_this_routes_names_is_counted_where_it_is_valid(
    usage: object, counted: tuple[int, int, int] | None
) -> None:
    assert tokens(usage) == counted
