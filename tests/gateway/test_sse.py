"""Event streams: parsed the same however the network splits them, counted, and shown as the client requested."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busbar.gateway.errors import BadUpstream
from busbar.gateway.sse import Cutter, Meter, Wish, encode, payload, tokens

STREAM = (
    b": comment\n\n"
    b'data: {"choices":[{"text":"a"}]}\n\n'
    b"event: x\r\ndata: one\r\ndata: two\r\n\r\n"
    b'data: {"choices":[{"text":"\xc3\xa9\xe4\xbd\xa0"}]}\n\n\n\n'
    b"data: [DONE]\n\n"
)
EVENTS = [
    b": comment",
    b'data: {"choices":[{"text":"a"}]}',
    b"event: x\r\ndata: one\r\ndata: two",
    b'data: {"choices":[{"text":"\xc3\xa9\xe4\xbd\xa0"}]}',
    b"data: [DONE]",
]


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_are_the_same_wherever_the_network_cuts(cuts: list[int]) -> None:
    cutter = Cutter(10_000)
    places = [0, *sorted(cuts), len(STREAM)]
    found = [event for a, b in itertools.pairwise(places) for event in cutter.feed(STREAM[a:b])]
    assert found == EVENTS


def test_an_event_over_the_limit_is_refused() -> None:
    cutter = Cutter(10)
    assert cutter.feed(b"data: 1\n\ndata: 12") == [b"data: 1"]
    with pytest.raises(BadUpstream):
        cutter.feed(b"3456789")


def test_the_payload_of_an_event_is_its_data_lines() -> None:
    assert [payload(event) for event in EVENTS[:3]] == [None, b'{"choices":[{"text":"a"}]}', b"one\ntwo"]


def chunk(text: str | None = None, usage: tuple[int, int] | None = None, **more: Any) -> bytes:
    document: dict[str, Any] = {"choices": [] if text is None else [{"index": 0, "delta": {"content": text}}]}
    if usage:
        document["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return b"data: " + json.dumps({**document, **more}).encode()


def shown(meter: Meter, *events: bytes) -> list[Any]:
    out = [meter.event(event) for event in events]
    return [json.loads(data.removeprefix(b"data: ")) for data in out if data is not None]


def test_the_final_usage_wins_over_counting() -> None:
    meter = Meter(Wish())
    shown(meter, chunk("two tokens"), chunk("x"), chunk(usage=(5, 3)))
    assert (meter.prompt_tokens, meter.completion_tokens) == (5, 3)


@pytest.mark.parametrize("text", ["", "x"])
def test_a_usage_without_the_tokens_of_the_answer_leaves_their_count(text: str) -> None:
    meter = Meter(Wish())
    prompt_only = json.dumps(
        {"choices": [{"text": text, "index": 0}] if text else [], "usage": {"prompt_tokens": 5}}
    )
    shown(
        meter,
        chunk("two tokens"),
        chunk("x"),
        b"data: " + prompt_only.replace(", ", ",").replace(": ", ":").encode(),
    )
    assert (meter.prompt_tokens, meter.completion_tokens) == (5, 2 + bool(text))


def test_pieces_without_text_are_not_counted() -> None:
    meter = Meter(Wish())
    shown(meter, chunk(""), chunk("a"), b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}')
    assert meter.completion_tokens == 1


def test_an_engine_that_numbers_its_tokens_is_counted_by_the_numbers() -> None:
    meter = Meter(Wish())
    for index, reached in ((0, 2), (1, 1), (0, 5), (1, 1)):
        choice = {"index": index, "text": "several tokens", "token_index": reached}
        meter.event(b"data: " + json.dumps({"choices": [choice]}).encode())
    assert meter.completion_tokens == 6


def test_an_answer_begins_with_its_first_text_or_its_end() -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
    for event in (chunk("a"), b"data: [DONE]", b'data: {"choices":[{"finish_reason":"stop","text":""}]}'):
        meter = Meter(Wish())
        shown(meter, role)
        assert not meter.begun
        meter.event(event)
        assert meter.begun


def test_reasoning_and_tool_calls_are_counted() -> None:
    meter = Meter(Wish())
    for delta in ({"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}):
        meter.event(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode())
    assert meter.completion_tokens == 2


@pytest.mark.parametrize(
    ("wish", "usages"),
    [
        (Wish(), ["absent", "absent"]),
        (Wish(total=True), [None, None, 2]),
        (Wish(total=True, continuous=True), [1, 2, 2]),
    ],
)
def test_usage_is_shown_as_asked(wish: Wish, usages: list[object]) -> None:
    documents = shown(Meter(wish), chunk("a", (5, 1)), chunk("b", (5, 2)), chunk(usage=(5, 2)))
    seen = [
        d["usage"]["completion_tokens"] if d.get("usage") else d.get("usage", "absent") for d in documents
    ]
    assert seen == usages


def test_what_needs_no_change_is_passed_on_byte_by_byte() -> None:
    odd = b'id: 7\ndata:  {"choices" : [{"text":"\\u00e9"}]}'
    assert Meter(Wish()).event(odd) == odd + b"\n\n"


@pytest.mark.parametrize(
    ("options", "wish"),
    [
        ({"include_usage": True}, Wish(total=True)),
        ({"include_usage": True, "continuous_usage_stats": True}, Wish(total=True, continuous=True)),
        ({"continuous_usage_stats": True}, Wish()),
        ({"include_usage": "yes"}, Wish()),
        ("nonsense", Wish()),
        (None, Wish()),
    ],
)
def test_the_usage_that_a_client_wants_is_read_from_its_request(options: object, wish: Wish) -> None:
    assert Wish.of({"stream_options": options}) == wish


def test_an_error_that_is_null_is_none() -> None:
    meter = Meter(Wish())
    assert meter.event(b'data: {"choices":[{"index":0,"text":"a"}],"error":null}') is not None
    assert not meter.failed
    assert meter.completion_tokens == 1


def test_an_error_event_is_passed_on_and_ends_the_stream() -> None:
    meter = Meter(Wish())
    event = b'data: {"error":{"message":"no"}}'
    assert meter.event(event) == event + b"\n\n"
    assert meter.failed


@pytest.mark.parametrize("event", [b"data: {", b"data: 3", b'data: ["a"]', b"data: " + b"[" * 100_000])
def test_what_is_not_a_chunk_is_refused(event: bytes) -> None:
    with pytest.raises(BadUpstream):
        Meter(Wish()).event(event)


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2}, (5, 2, 0)),
        ({"prompt_tokens": 5}, (5, 0, 0)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}, (5, 0, 4)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}}, (5, 0, 0)),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, (5, 0, 0)),
        ({"completion_tokens": 2}, None),
        ({"prompt_tokens": -1, "completion_tokens": 2}, None),
        ({"prompt_tokens": "5", "completion_tokens": 2}, None),
        (None, None),
        ([], None),
    ],
)
def test_only_valid_usage_is_counted(usage: object, counted: tuple[int, int, int] | None) -> None:
    assert tokens(usage) == counted


def test_an_encoded_event_is_read_back() -> None:
    (event,) = Cutter(1000).feed(encode({"a": "é\n\n"}))
    data = payload(event)
    assert data is not None
    assert json.loads(data) == {"a": "é\n\n"}


TRAPS = st.sampled_from(
    [
        "plain",
        'a","usage":{"prompt_tokens":9,"completion_tokens":9}}',
        ',"usage":{"prompt_tokens":9,"completion_tokens":9}}',
        '"error":',
        '"choices":[]',
        "line\nbreak\r",
        "[DONE]",
        "é你{}}",
    ]
)
USAGES = st.one_of(
    st.none(),
    st.builds(
        lambda p, c, d: {"prompt_tokens": p, "completion_tokens": c, "total_tokens": p + c, **d},
        st.integers(0, 9),
        st.integers(0, 9),
        st.sampled_from(
            [{}, {"prompt_tokens_details": {"cached_tokens": 1}}, {"prompt_tokens_details": None}]
        ),
    ),
    st.sampled_from(
        [{"prompt_tokens": 3}, {"prompt_tokens": "x"}, {"prompt_tokens": -1}, {"a": {"b": {"c": 1}}}, {}]
    ),
)


@given(
    st.lists(st.tuples(TRAPS, USAGES, st.booleans(), st.booleans(), st.booleans()), max_size=6),
    st.sampled_from([Wish(), Wish(total=True), Wish(total=True, continuous=True)]),
)
def test_what_is_passed_on_unparsed_is_counted_and_shown_as_if_parsed(
    parts: list[tuple[str, Any, bool, bool, bool]], wish: Wish
) -> None:
    events = [chunk("x")]
    for text, usage, compact, last, final in parts:
        choices: list[Any] = [] if final else [{"index": 0, "delta": {"content": text}, "token_index": 3}]
        document = {"choices": choices, "id": text}
        told = {} if usage is None else {"usage": usage}
        document = {**document, **told} if last else {**told, **document}
        separators = (",", ":") if compact else None
        events.append(b"data: " + json.dumps(document, separators=separators, ensure_ascii=False).encode())
    quick, careful = Meter(wish), Meter(wish)
    careful._at_a_glance = lambda event: None  # type: ignore[method-assign]
    for event in events:
        assert shown(quick, event) == shown(careful, event)
        assert quick.prompt_tokens == careful.prompt_tokens
        assert quick.completion_tokens == careful.completion_tokens
        assert (quick.done, quick.failed, quick.begun) == (careful.done, careful.failed, careful.begun)
