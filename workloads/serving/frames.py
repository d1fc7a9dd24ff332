"""What the front and the engine of a replica send each other through their socket. Pure Python; no pickles.

A frame is its length, its kind, a JSON document (that may be missing) and bytes. Everything that comes once for a request,
or more rarely, is a document. What comes with every token is columns of numbers: one `STEP` frame from the engine has the
tokens of all requests of a step, one `CONFIRM` frame from the front what their readers have taken since the last one.

    front → engine   CALL (answered by a REPLY), TELL, CONFIRM
    engine → front   REPLY, STATE, EVENT (what a delta has that is no column), STEP
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.prompt_logprobs import PromptLogprobs
from busbar.workloads.serving.sampling import TokenLogprob

_HEAD = struct.Struct("<IBI")
"""Bytes behind it, kind, bytes of the document."""
_STEP = struct.Struct("<IIII")
"""Deltas, those with log-probabilities, their likeliest tokens in all, requests that run."""
FINISHES: tuple[str | None, ...] = (None, "stop", "length", "abort")
_CODE = {name: code for code, name in enumerate(FINISHES)}


class Kind(IntEnum):
    CALL = 1
    TELL = 2
    CONFIRM = 3
    REPLY = 4
    STATE = 5
    EVENT = 6
    STEP = 7


@dataclass(frozen=True)
class Frame:
    kind: Kind
    document: Mapping[str, Any]
    tail: bytes


def frame(kind: Kind, document: Mapping[str, Any] | None = None, tail: bytes = b"") -> bytes:
    text = b"" if document is None else json.dumps(document, separators=(",", ":")).encode()
    return _HEAD.pack(len(text) + len(tail), kind, len(text)) + text + tail


class Frames:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._had = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete with these bytes."""
        had, at = self._had, 0
        had += data
        try:
            while len(had) - at >= _HEAD.size:
                size, kind, length = _HEAD.unpack_from(had, at)
                start = at + _HEAD.size
                if len(had) - start < size:
                    break
                at = start + size
                document = json.loads(had[start : start + length]) if length else {}
                yield Frame(Kind(kind), document, bytes(had[start + length : at]))
        finally:
            del had[:at]


# -- what readers confirm -------------------------------------------------------------------------


def confirm_frame(taken: Sequence[tuple[int, int, str | None]]) -> bytes:
    """Of (request, completion tokens that its reader has taken, how the answer ends with them)."""
    numbers = array(
        "I", [value for number, count, finish in taken for value in (number, count, _CODE[finish])]
    )
    return frame(Kind.CONFIRM, None, numbers.tobytes())


def confirmed(tail: bytes) -> list[tuple[int, int, str | None]]:
    numbers = array("I", tail)
    return [
        (number, count, FINISHES[code])
        for number, count, code in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    ]


# -- the tokens of a step -------------------------------------------------------------------------


def step_frames(deltas: Iterable[Delta], running: int) -> bytes:
    """The frames of a step's deltas, whose request ids are numbers; so many requests run behind it."""
    events: list[bytes] = []
    numbers, tokens, indexes, cached = array("I"), array("I"), array("I"), array("I")
    finishes, explains = bytearray(), bytearray()
    logprobs, counts, likely, likely_logprobs = array("d"), array("I"), array("I"), array("d")
    for delta in deltas:
        if delta.error is not None or len(delta.tokens) != 1:
            events.append(_event(delta))
            continue
        if delta.prompt_logprobs is not None:
            events.append(_prompt_event(delta.request_id, delta.prompt_logprobs))
        numbers.append(int(delta.request_id))
        tokens.append(delta.tokens[0])
        indexes.append(delta.index)
        cached.append(delta.cached)
        finishes.append(_CODE[delta.finish])
        explains.append(len(delta.logprobs))
        for each in delta.logprobs:
            logprobs.append(each.logprob)
            counts.append(len(each.top))
            likely.extend([token for token, _ in each.top])
            likely_logprobs.extend([value for _, value in each.top])
    head = _STEP.pack(len(numbers), len(counts), len(likely), running)
    columns = (numbers, tokens, indexes, cached, counts, likely, logprobs, likely_logprobs)
    body = b"".join((head, *(each.tobytes() for each in columns), finishes, explains))
    return b"".join((*events, frame(Kind.STEP, None, body)))


def step_of(tail: bytes) -> tuple[list[tuple[int, Delta]], int]:
    """(request, delta) of each, and how many requests run."""
    count, explained, most, running = _STEP.unpack_from(tail)
    at = _STEP.size

    def column(kind: str, length: int) -> array[Any]:
        nonlocal at
        found = array(kind)
        end = at + length * found.itemsize
        found.frombytes(tail[at:end])
        at = end
        return found

    numbers, tokens, indexes, cached = (column("I", count) for _ in range(4))
    counts, likely = column("I", explained), column("I", most)
    logprobs, likely_logprobs = column("d", explained), column("d", most)
    finishes, explains = tail[at : at + count], tail[at + count : at + 2 * count]
    found: list[tuple[int, Delta]] = []
    entry = first = 0
    for i, number in enumerate(numbers):
        told: tuple[TokenLogprob, ...] = ()
        if explains[i]:
            last = first + counts[entry]
            top = tuple(zip(likely[first:last], likely_logprobs[first:last], strict=True))
            told = (TokenLogprob(tokens[i], logprobs[entry], top),)
            entry, first = entry + 1, last
        finish = FINISHES[finishes[i]]
        delta = Delta(str(number), (tokens[i],), indexes[i], told, finish, cached=cached[i])
        found.append((number, delta))
    return found, running


# -- what is no column ----------------------------------------------------------------------------

_ENDS = ("index", "finish", "error", "leaving", "moved_to", "refused", "cached")


def _event(delta: Delta) -> bytes:
    """A delta without a token: an error, or a vector."""
    document = {"number": int(delta.request_id), **{name: getattr(delta, name) for name in _ENDS}}
    vector = b"" if delta.vector is None else array("d", delta.vector).tobytes()
    return frame(Kind.EVENT, document | {"vector": delta.vector is not None}, vector)


def _prompt_event(request_id: str, told: PromptLogprobs) -> bytes:
    parts = [each.tobytes() for each in told.arrays]
    sizes = {"number": int(request_id), "prompt": told.count, "sizes": list(map(len, parts))}
    return frame(Kind.EVENT, sizes, b"".join(parts))


def event_of(found: Frame) -> tuple[int, Delta | PromptLogprobs]:
    """(request, what there is of it): a delta, or what comes with its next delta."""
    document, number = found.document, int(found.document["number"])
    if "prompt" in document:
        told, at = PromptLogprobs(document["prompt"]), 0
        for each, size in zip(told.arrays, document["sizes"], strict=True):
            each.frombytes(found.tail[at : at + size])
            at += size
        return number, told
    vector = tuple(array("d", found.tail)) if document["vector"] else None
    return number, Delta(str(number), vector=vector, **{name: document[name] for name in _ENDS})
