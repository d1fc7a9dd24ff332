"""What the gateway does not have to change reaches the client byte by byte, however it was framed and cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.parts import Engine, House, route

from busbar.gateway.sse import Cutter, Meter, Wish, read

TEXT = 'data: {"choices":[{"index":0,"text":"é你🙂"}]}'.encode()
ODD = [
    TEXT,
    b'data:{"choices" : [ {"index":0,"text":"\\u00e9"} ] }',
    b": a comment",
    b'id: 7\nevent: x\nretry: 5\ndata: {"choices":\ndata: [{"index":0,"text":"b"}]}',
    b": before the data\n" + TEXT,
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}],"more":{"a":[1,2.50]}}',
]


def whole(pieces: list[bytes], *, tokens_limit: int = 0) -> tuple[bytes, Meter]:
    """What the client gets of these reads, and the count."""
    cutter, meter = Cutter(100_000), Meter(Wish(), tokens_limit)
    shown = []
    for piece in pieces:
        part, problem = read(cutter, meter, piece)
        assert problem is None
        shown.append(part)
    return b"".join(shown), meter


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@settings(max_examples=60, derandomize=True)
@given(st.lists(st.sampled_from(ODD), max_size=6), st.lists(st.integers(0, 600), max_size=8))
def test_events_that_need_no_change_are_passed_on_byte_by_byte(events: list[bytes], cuts: list[int]) -> None:
    data = b"".join(event + b"\n\n" for event in [*events, b"data: [DONE]"])
    shown, meter = whole(cut(data, cuts))
    assert shown == data
    assert meter.done


@pytest.mark.parametrize("event", ODD)
def test_an_event_that_comes_byte_by_byte_is_passed_on_and_counted_as_one_that_comes_whole(
    event: bytes,
) -> None:
    data = event + b"\n\n"
    at_once, one = whole([data])
    by_bytes, other = whole([data[i : i + 1] for i in range(len(data))])
    assert at_once == by_bytes == data
    assert one.completion_tokens == other.completion_tokens


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_other_line_ends_stay_inside_an_event_and_only_its_blank_line_changes(end: bytes) -> None:
    lines = [b": c", b'data: {"choices":', b'data: [{"index":0,"text":"b"}]}']
    data = end.join([*lines, b"", b""])
    for place in range(len(data) + 1):
        shown, meter = whole([data[:place], data[place:], end.join([b"data: [DONE]", b"", b""])])
        assert shown == end.join(lines) + b"\n\ndata: [DONE]\n\n"
        assert meter.completion_tokens == 1


@pytest.mark.parametrize("blank", [b"\n\n", b"\n\n\n", b"\n\n\n\n\n"])
def test_blank_lines_alone_are_no_events(blank: bytes) -> None:
    assert whole([blank])[0] == b""
    assert whole([TEXT + blank])[0] == TEXT + b"\n\n"


def sided(number: int) -> bytes:
    return TEXT + b"\n:busbar 0 %d 7 2 %d\n\n" % (number == 63, 100 + number)


@settings(max_examples=40, derandomize=True)
@given(st.lists(st.integers(0, 64 * len(sided(0))), max_size=8))
def test_64_events_in_any_number_of_reads_lose_their_side_lines_and_are_counted(cuts: list[int]) -> None:
    data = b"".join(map(sided, range(64)))
    shown, meter = whole(cut(data, cuts), tokens_limit=64)
    assert shown == (TEXT + b"\n\n") * 64
    assert (meter.prompt_tokens, meter.completion_tokens, meter.cached_tokens) == (7, 64, 2)
    assert list(meter.traces[0]) == list(range(100, 164))
    assert meter.ended == {0}


def test_what_is_passed_on_before_an_event_that_cannot_be_read_is_counted() -> None:
    meter = Meter(Wish(), 10)
    shown, problem = read(Cutter(1000), meter, sided(0) + b"data: {\n\n" + sided(1))
    assert shown == TEXT + b"\n\n"
    assert problem is not None
    assert meter.completion_tokens == 1


class Pieces(Engine):
    """Writes these bytes, each as a write of its own, instead of words."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__()
        self._pieces = pieces

    async def _stream(self, request: web.Request, body: dict[str, Any], begin: int = 0) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in self._pieces:
            await response.write(piece)
        return response


@pytest.mark.parametrize("size", [1, 7, 10**6])
async def test_a_client_gets_the_bytes_of_a_replica(house: House, size: int) -> None:
    data = b"".join(event + b"\n\n" for event in [*ODD, *[TEXT] * 64, b"data: [DONE]"])
    engine = Pieces([data[i : i + size] for i in range(0, len(data), size)])
    await engine.start()
    house.engines.append(engine)
    await house.publish(route("m", engine))
    async with house.post({"model": "m", "prompt": "hi", "stream": True}) as response:
        assert await response.read() == data
    await house.api.wait_for(1)
    assert house.api.total("id-a") == (1, 0, 64 + 4)


async def test_64_tokens_in_one_read_are_passed_on_without_their_side_lines(house: House) -> None:
    engine = Pieces([b"".join(map(sided, range(64))) + b"data: [DONE]\n\n"])
    await engine.start()
    house.engines.append(engine)
    await house.publish(route("m", engine))
    async with house.post({"model": "m", "prompt": "hi", "stream": True}) as response:
        assert await response.read() == (TEXT + b"\n\n") * 64 + b"data: [DONE]\n\n"
    await house.api.wait_for(1)
    assert house.api.total("id-a") == (1, 7, 64)
