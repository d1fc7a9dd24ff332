"""Server-sent events of an OpenAI stream: cutting, reading the usage, hiding what was not asked for.

Pure code: bytes in, bytes out. The gateway asks every engine for its usage, so the stream it receives has
more in it than the client wanted; `Meter` counts and takes out the surplus. Our engine sends what the client wants and
puts its tokens in a side line behind it (`busbar.kube.contracts.streams`).
"""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import dataclass
from typing import Any

from busbar.gateway.errors import BadUpstream
from busbar.kube.contracts.streams import SIDE_LINE, StreamEnd

DONE = b"[DONE]"
_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_USAGE = b',"usage":'
"""Before usage as a member of an event's object. Inside a JSON text its quotes would be escaped; so where what follows, up
to the object's own brace, is one JSON object, it is that member, and the last."""
_COUNTS = re.compile(
    rb'\{"prompt_tokens":(\d{1,15}),(?:"total_tokens":\d+,)?"completion_tokens":(\d{1,15})(?:,"total_tokens":\d+)?\}'
)
"""Usage as most engines write it on each event; any other is parsed."""
_NOT_PLAIN = (b"\n", b"\r", b'"error":', b'"choices":[]')
"""What events contain that are looked at closely: several lines, errors, the final usage."""


class Cutter:
    """Cuts a byte stream into events. An event is given without its closing blank line.

    A large event is looked through once, however many reads it takes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._rest: list[bytes] = []
        """The reads of an event that is not whole."""
        self._length = 0
        """Of these together."""
        self._seam = b""
        """Their end, in which a blank line may have begun."""

    def feed(self, data: bytes) -> list[bytes]:
        """Complete events after `data`; raises BadUpstream when one grows over the limit."""
        if (
            not self._rest
            and len(data) > 2
            and data.endswith(b"\n\n")
            and b"\r" not in data
            and data.find(b"\n\n", 0, -1) < 0
        ):
            return [data[:-2]]  # by far the most frequent: one event, whole
        seam = self._seam + data
        if _BLANK_LINE.search(seam) is None:
            self._keep(data, seam)
            return []
        *events, rest = _BLANK_LINE.split(b"".join([*self._rest, data]))
        self._rest, self._length = [], 0
        self._keep(rest, rest)
        return [event for event in events if event]

    def _keep(self, data: bytes, seam: bytes) -> None:
        if data:
            self._rest.append(data)
        self._length += len(data)
        self._seam = seam[-3:]
        if self._length > self._limit:
            raise BadUpstream("The model server sent an event that is too large.")


def read(cutter: Cutter, meter: Meter, data: bytes) -> tuple[bytes, str | None]:
    """(what of `data` the client gets, what is wrong with the rest)."""
    shown = []
    try:
        for event in cutter.feed(data):
            part = meter.event(event)
            if part is not None:
                shown.append(part)
            if meter.done or meter.failed or meter.cut is not None:
                break
    except BadUpstream as error:
        return b"".join(shown), error.message
    return b"".join(shown), None


def payload(event: bytes) -> bytes | None:
    """The data of an event, None when it has none (a comment, a bare field)."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def encode(document: object) -> bytes:
    """One event with a JSON document."""
    return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


@dataclass(frozen=True)
class Wish:
    """What the client itself asked for about usage in its stream."""

    total: bool = False
    continuous: bool = False

    @classmethod
    def of(cls, request: dict[str, Any]) -> Wish:
        options = request.get("stream_options")
        if not isinstance(options, dict):
            return cls()
        total = options.get("include_usage") is True
        return cls(total=total, continuous=total and options.get("continuous_usage_stats") is True)


class Meter:
    """Counts the tokens of one stream and gives the client only what it asked for.

    Counting: the tokens of the side lines, where there are some (our engine). Else usage on every chunk where the engine has it (`continuous_usage_stats`), so that a broken
    stream counts exactly what was delivered; else by `token_index`, where a choice has it (our engine), else
    one token per piece of text, until the final usage says better. Prompt tokens that an engine never told
    stay 0: nothing is charged on a guess.

    `begun` says that the answer has really begun. The first chunk of a chat only tells the role, often long
    before the model has computed anything.
    """

    def __init__(self, wish: Wish, tokens_limit: int = 0) -> None:
        """`tokens_limit`: ids kept of one stream; one with more is no longer `traced`."""
        self._wish = wish
        self._tokens_limit = tokens_limit
        self.traces: dict[int, array[int]] = {}
        """The ids of each choice's tokens."""
        self.traced = True
        """All that was passed on stands in `traces`."""
        self.ended: set[int] = set()
        """Choices whose finish reason was passed on; kept for traced streams."""
        self.events = 0
        """Passed on, where they are numbered."""
        self.holds = False
        """Whether events wait for the side line behind them."""
        self.cached_tokens = 0
        self.cut: StreamEnd | None = None
        """The engine itself has ended the stream before the answer was whole."""
        self.moved_to = ""
        """With `cut`: the address of the replica that has the stream's keys and values."""
        self._told = False
        self._pieces = 0
        self._reached: dict[int, int] = {}
        self.begun = False
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.done = False
        self.failed = False

    def event(self, event: bytes) -> bytes | None:
        """The event as the client gets it (with its blank line), None when it is not for the client."""
        text, mark, side = event.rpartition(SIDE_LINE)
        if mark:
            return self._sided(text, side)
        if self.begun:
            shown = self._at_a_glance(event)
            if shown is not None:
                return shown
        data = payload(event)
        if data is None:
            return event + b"\n\n"
        if data.strip() == DONE:
            self.done = self.begun = True
            return b"data: [DONE]\n\n"
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadUpstream("The model server sent an event that is not JSON.") from error
        if not isinstance(chunk, dict):
            raise BadUpstream("The model server sent an event that is not a JSON object.")
        if chunk.get("error") is not None:
            self.failed = self.begun = True
            return event + b"\n\n"
        self._count(chunk)
        return self._shown(chunk, event)

    def go_on(self) -> None:
        """Another replica goes on behind what was passed on."""

    def broken(self, document: dict[str, dict[str, str | None]]) -> bytes:
        """The event that ends the stream where no replica goes on with it; `document` is the error as JSON."""
        return encode(document)

    def _sided(self, shown: bytes, side: bytes) -> bytes | None:
        """An event of our engine: what is for the client stands before the side line, all else in it."""
        try:
            if side.startswith(b"! "):
                cause, _, self.moved_to = side[2:].decode().partition(" ")
                self.cut = StreamEnd(cause)
                return None
            if b"-" in side:
                raise ValueError("negative")
            choice, ended, prompt, cached, ids = side.split(b" ")
            index, found = int(choice), array("I", map(int, ids.split(b","))) if ids else array("I")
            self.prompt_tokens, self.cached_tokens = int(prompt), int(cached)
        except (ValueError, OverflowError) as error:
            raise BadUpstream("The model server sent a side line that cannot be read.") from error
        self._told = self.begun = True
        self.completion_tokens += len(found)
        if self.completion_tokens > self._tokens_limit:
            self.traced = False
            self.traces.clear()
        elif self.traced:
            self.traces.setdefault(index, array("I")).extend(found)
            if ended == b"1":
                self.ended.add(index)
        return shown + b"\n\n"

    def _at_a_glance(self, event: bytes) -> bytes | None:
        """A further piece of the answer that ends with its usage: counted and passed on without parsing it."""
        at = event.rfind(_USAGE)
        if at < 0 or not event.startswith(b"data: {") or not event.endswith(b"}}"):
            return None
        for mark in _NOT_PLAIN:
            if mark in event:
                return None
        usage = _counted(event[at + len(_USAGE) : -1])
        if usage is None:
            return None
        self._told = True
        self.traced = False
        self.prompt_tokens, self.completion_tokens, self.cached_tokens = usage
        if self._wish.continuous:
            return event + b"\n\n"
        return event[:at] + (b',"usage":null}\n\n' if self._wish.total else b"}\n\n")

    def _count(self, chunk: dict[str, Any]) -> None:
        self._count_usage(chunk.get("usage"))
        for choice in _choices(chunk):
            self._count_choice(choice)
        if not self._told:
            self.completion_tokens = self._pieces + sum(self._reached.values())

    def _count_usage(self, usage: object) -> None:
        counted = tokens(usage)
        if counted is None:
            return
        self.prompt_tokens, output, self.cached_tokens = counted
        if tells_output(usage):
            self._told, self.completion_tokens = True, output

    def _count_choice(self, choice: dict[str, Any]) -> None:
        text = _has_text(choice)
        if text or choice.get("finish_reason") is not None:
            self.begun, self.traced = True, False
        reached, index = choice.get("token_index"), choice.get("index")
        if isinstance(reached, int) and isinstance(index, int):
            self._reached[index] = max(reached, self._reached.get(index, 0))
        elif text:
            self._pieces += 1

    def _shown(self, chunk: dict[str, Any], event: bytes) -> bytes | None:
        if "usage" not in chunk:
            return event + b"\n\n"
        final = not _choices(chunk)
        if final:
            return event + b"\n\n" if self._wish.total else None
        if self._wish.continuous:
            return event + b"\n\n"
        if self._wish.total:
            chunk["usage"] = None
        else:
            del chunk["usage"]
        return encode(chunk)


def _counted(text: bytes) -> tuple[int, int, int] | None:
    """The tokens of a `usage` object as JSON, None when it is not one, or does not tell those of the answer."""
    plain = _COUNTS.fullmatch(text)
    if plain is not None:
        return int(plain[1]), int(plain[2]), 0
    try:
        usage = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return tokens(usage) if tells_output(usage) else None


def tokens(usage: object) -> tuple[int, int, int] | None:
    """(prompt, completion, of the prompt cached) tokens of a `usage` object, None when it is not one. /v1/responses has
    names of its own."""
    if not isinstance(usage, dict):
        return None
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    completion = usage.get("completion_tokens", usage.get("output_tokens", 0))
    if not isinstance(prompt, int) or not isinstance(completion, int) or min(prompt, completion) < 0:
        return None
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return prompt, completion, cached if isinstance(cached, int) and 0 <= cached <= prompt else 0


def tells_output(usage: object) -> bool:
    """Whether a `usage` has the tokens of the answer. One without them says nothing about a stream that had some."""
    return isinstance(usage, dict) and ("completion_tokens" in usage or "output_tokens" in usage)


def _choices(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    choices = chunk.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return bool(choice.get("text"))
