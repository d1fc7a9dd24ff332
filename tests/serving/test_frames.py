"""What front and engine send each other arrives as it was, however the bytes are cut."""

from __future__ import annotations

import asyncio
import random
import socket
from array import array
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.workloads.serving.constraint import Constraint
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.frames import (
    Frame,
    Frames,
    Kind,
    confirm_frame,
    confirmed,
    event_of,
    frame,
    step_frames,
    step_of,
)
from busbar.workloads.serving.openai_format import GrammarKind, GrammarSpec
from busbar.workloads.serving.params_wire import from_document, to_document
from busbar.workloads.serving.prompt_logprobs import PromptLogprobs
from busbar.workloads.serving.sampling import SamplingParams, TokenLogprob
from busbar.workloads.serving.sender import Sender

NUMBER = st.integers(0, 2**32 - 1)
VALUE = st.floats(-1e9, 0)


def cut(data: bytes, seed: int) -> list[Frame]:
    """The frames of bytes that come in pieces."""
    rng, frames, found, at = random.Random(seed), Frames(), list[Frame](), 0
    while at < len(data):
        size = rng.randrange(1, 40)
        found += frames.feed(data[at : at + size])
        at += size
    return found


LOGPROB = st.builds(
    TokenLogprob,
    st.just(0),
    VALUE,
    st.lists(st.tuples(NUMBER, VALUE), max_size=3).map(tuple),
)


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    token = draw(NUMBER)
    told = [TokenLogprob(token, e.logprob, e.top) for e in draw(st.lists(LOGPROB, max_size=1))]
    finish = draw(st.sampled_from([None, "stop", "length"]))
    return Delta(str(draw(NUMBER)), (token,), draw(NUMBER), tuple(told), finish, cached=draw(NUMBER))


@settings(max_examples=60, deadline=None)
@given(st.lists(deltas(), max_size=6), NUMBER, st.integers(0, 99))
def test_the_tokens_of_a_step_arrive(sent: list[Delta], running: int, seed: int) -> None:
    (found,) = cut(step_frames(sent, running), seed)
    assert found.kind is Kind.STEP
    assert step_of(found.tail) == ([(int(each.request_id), each) for each in sent], running)


def test_what_is_no_token_arrives_before_the_step() -> None:
    told = PromptLogprobs(2)
    for each, values in zip(
        told.arrays, ([5, 6], [-0.5, -1.0], [1, 2], [5, 1, 6, 2], [-0.5] * 4), strict=True
    ):
        each.extend(values)  # type: ignore[arg-type]
    failed = Delta("3", finish="error", error="it broke", leaving=True, moved_to="http://b")
    vector = Delta("4", finish="stop", vector=(1.5, -2.25), cached=3)
    first = Delta("5", (7,), 1, prompt_logprobs=told)
    *events, step = cut(step_frames([failed, vector, first], 1), 0)
    numbers, found = zip(*map(event_of, events), strict=True)
    assert numbers == (3, 4, 5)
    assert found[:2] == (failed, vector)
    assert isinstance(found[2], PromptLogprobs)
    assert (found[2].count, found[2].arrays) == (2, told.arrays)
    assert step_of(step.tail) == ([(5, Delta("5", (7,), 1))], 1)


@given(st.lists(st.tuples(NUMBER, NUMBER, st.sampled_from([None, "stop", "length", "abort"])), max_size=5))
def test_what_readers_confirm_arrives(taken: list[tuple[int, int, str | None]]) -> None:
    (found,) = cut(confirm_frame(taken), 1)
    assert (found.kind, confirmed(found.tail)) == (Kind.CONFIRM, taken)


def test_documents_and_bytes_arrive_together() -> None:
    sent: list[tuple[dict[str, Any], bytes]] = [
        ({"name": "open", "text": "ä"}, b"\0\1"),
        ({}, b""),
        ({"a": None}, bytes(70_000)),
    ]
    data = b"".join(frame(Kind.CALL, *each) for each in sent)
    assert [(each.document, each.tail) for each in cut(data, 2)] == sent


ALL: dict[str, Any] = {
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 1e-30,
    "top_p": 0.1 + 0.2,
    "top_k": 10**9,
    "seed": -(2**63),
    "stop": ("a", "ü\n"),
    "stop_token_ids": frozenset({3, 1}),
    "ignore_eos": True,
    "skip_special_tokens": False,
    "visible": frozenset({9}),
    "include_stop_text": True,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_p": 0.05,
    "logit_bias": ((1, -100.0), (2, 0.5)),
    "logprobs": 0,
    "prompt_logprobs": 3,
    "grammar": GrammarSpec(GrammarKind.REGEX, "a+", "guided_regex"),
}


def test_every_sampling_parameter_arrives() -> None:
    assert set(ALL) | {"constraint"} == {each.name for each in fields(SamplingParams)}
    sent = SamplingParams(**ALL)
    (found,) = cut(frame(Kind.CALL, {"params": to_document(sent)}), 3)
    assert from_document(found.document["params"]) == sent
    assert to_document(SamplingParams()) == {}


@pytest.mark.parametrize("allowed", [None, frozenset({4, 5, 6})])
def test_a_constraint_arrives(allowed: frozenset[int] | None) -> None:
    sent = Constraint(300, allowed, frozenset({9}), {7: (([6, 7], 8),)})
    document = to_document(SamplingParams(constraint=sent))
    (frame_,) = cut(frame(Kind.CALL, document), 4)
    found = from_document(frame_.document).constraint
    assert found is not None
    assert (found.width, found.allowed, found.banned) == (300, allowed, frozenset({9}))
    assert found.ids.tolist() == sent.ids.tolist()
    for tokens in ([6, 7], [1, 7]):
        assert found.banned_after([0, *tokens], 1) == sent.banned_after([0, *tokens], 1)


async def test_what_a_full_socket_does_not_take_is_sent_when_it_does_in_order() -> None:
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    sender = Sender(ours, loop, lost.set)
    numbers = array("I", range(200_000))
    for first in range(0, len(numbers), 1000):
        await asyncio.to_thread(sender.send, numbers[first : first + 1000].tobytes())
    got = b""
    while len(got) < 4 * len(numbers):
        got += await loop.sock_recv(theirs, 2**20)
    assert array("I", got) == numbers
    theirs.close()
    sender.send(b"x")
    sender.send(b"y")
    await lost.wait()
    sender.close()
    ours.close()
