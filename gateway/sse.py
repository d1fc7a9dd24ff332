"""Server-sent events of an OpenAI stream: cutting, reading the usage, hiding what was not asked for.

Pure code: bytes in, bytes out. The gateway asks every engine for its usage, so the stream it receives has
more in it than the client wanted; `Meter` counts and takes out the surplus.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from busbar.gateway.errors import BadUpstream

DONE = b"[DONE]"
_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class Cutter:
    """Cuts a byte stream into events. An event is given without its closing blank line."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Complete events after `data`; raises BadUpstream when one grows over the limit."""
        *events, self._rest = _BLANK_LINE.split(self._rest + data)
        if len(self._rest) > self._limit:
            raise BadUpstream("The model server sent an event that is too large.")
        return [event for event in events if event]


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

    Counting: usage on every chunk where the engine has it (`continuous_usage_stats`), so that a broken
    stream counts exactly what was delivered; else by `token_index`, where a choice has it (our engine), else
    one token per piece of text, until the final usage says better. Prompt tokens that an engine never told
    stay 0: nothing is charged on a guess.

    `begun` says that the answer has really begun. The first chunk of a chat only tells the role, often long
    before the model has computed anything.
    """

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
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
        if "error" in chunk:
            self.failed = self.begun = True
            return event + b"\n\n"
        self._count(chunk)
        return self._shown(chunk, event)

    def _count(self, chunk: dict[str, Any]) -> None:
        usage = tokens(chunk.get("usage"))
        if usage is not None:
            self._told = True
            self.prompt_tokens, self.completion_tokens = usage
        for choice in _choices(chunk):
            self._count_choice(choice)
        if not self._told:
            self.completion_tokens = self._pieces + sum(self._reached.values())

    def _count_choice(self, choice: dict[str, Any]) -> None:
        text = _has_text(choice)
        self.begun = self.begun or text or choice.get("finish_reason") is not None
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


def tokens(usage: object) -> tuple[int, int] | None:
    """(prompt, completion) tokens of a `usage` object, None when it is not one."""
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens", 0)
    if not isinstance(prompt, int) or not isinstance(completion, int) or min(prompt, completion) < 0:
        return None
    return prompt, completion


def _choices(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    choices = chunk.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return bool(choice.get("text"))
