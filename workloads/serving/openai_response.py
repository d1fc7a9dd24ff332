"""Builds OpenAI's answers: whole ones, stream chunks, errors.

A streamed choice carries one field of ours, `token_index`: how many completion tokens the stream has
reached with this chunk. Clients ignore it. A chunk may cover more than one token, because text that could
still change is held back.

For the gateway each chunk ends with a side line that carries its tokens (`busbar.kube.contracts.streams`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from busbar.kube.contracts.streams import SIDE_LINE, StreamEnd, UsageShown
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.errors import BadRequest, EngineLeaving, RequestError
from busbar.workloads.serving.prompt_logprobs import PromptLogprobs
from busbar.workloads.serving.sampling import TokenLogprob
from busbar.workloads.serving.toolreader import CallPiece, Pieces, ToolReader

DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """One choice as it grows: text, logprobs and tokens that are not out yet, and totals."""

    index: int
    prompt_tokens: int
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    completion_tokens: int = 0
    cached_tokens: int = 0
    counts_prompt: bool = True
    """False for a further answer to the same prompt."""
    finish: str | None = None
    resumed: bool = False
    """It began on another replica, which has said how much of its prompt was cached."""
    text_offset: int = 0
    """Characters of the tokens whose logprobs are out already."""
    reader: ToolReader | None = None
    """Of an answer that may call tools."""
    calls: list[CallPiece] = field(default_factory=list)
    """That are not out yet."""
    prompt_logprobs: PromptLogprobs | None = None
    """Where they were asked for; of several answers to a prompt the first has them."""

    def show(self, text: str) -> None:
        """Add a piece of the answer's text, or the calls that it says."""
        if self.reader is None:
            self.text += text
        else:
            self._read(self.reader.feed(text))

    def take(self, delta: Delta, text: str, finish: str | None) -> None:
        """A delta, the text that it makes certain, and how the answer ends with that."""
        self.show(text)
        self.logprobs += delta.logprobs
        self.tokens += delta.tokens
        self.completion_tokens = max(self.completion_tokens, delta.index)
        if self.counts_prompt and not self.resumed:
            self.cached_tokens = max(self.cached_tokens, delta.cached)
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish = finish
        if self.reader is not None and (self.reader.over or finish is not None):
            self._read(self.reader.end())
            if self.reader.over or (self.reader.calls and finish == "stop"):
                self.finish = "tool_calls"

    @property
    def has_news(self) -> bool:
        return bool(self.text) or bool(self.calls) or self.finish is not None

    def _read(self, pieces: Pieces) -> None:
        self.text += pieces.content
        for piece in pieces.calls:
            if self.calls and self.calls[-1].index == piece.index:
                self.calls[-1].arguments += piece.arguments
            else:
                self.calls.append(piece)


@dataclass(frozen=True)
class Answer:
    """One request's envelope."""

    id: str
    created: int
    model: str
    chat: bool
    token_text: Callable[[int], str]
    token_bytes: Callable[[int], bytes]
    wants_logprobs: bool = False
    usage_shown: UsageShown = UsageShown.NONE
    for_gateway: bool = False
    """Side lines are wanted."""

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": self._whole_choices(choices),
            "usage": usage(choices),
            **(self._prompt_logprobs(choices[0]) if self.chat else {}),
        }

    def catch_up(self, choice: Choice, text: str, events: int) -> None:
        """Go on behind what a choice has shown on another replica, where the stream had so many events."""
        choice.show(text)
        choice.text, choice.calls = "", []

    def opening(self, choices: list[Choice]) -> bytes:
        """What a stream begins with: of a chat the role of every choice that another replica has not begun."""
        if not self.chat:
            return b""
        role = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(c.index, role, None, None, 0) for c in choices if not c.resumed)

    def chunk(self, choice: Choice, choices: list[Choice]) -> bytes:
        """What `choice`, one of the request's `choices`, has gained since its last chunk."""
        text, logprobs, tokens, calls = choice.text, choice.logprobs, choice.tokens, choice.calls
        choice.text, choice.logprobs, choice.tokens, choice.calls = "", [], [], []
        body: dict[str, Any] = {"text": text}
        if self.chat:
            said: dict[str, Any] = {"content": text} if text else {}
            body = {"delta": {**said, "tool_calls": list(map(_call_piece, calls))} if calls else said}
        told = self._logprobs(logprobs, choice.text_offset)
        if told is not None and not self.chat:
            choice.text_offset += sum(map(len, told["tokens"]))
        so_far = usage(choices) if self.usage_shown is UsageShown.EACH else None
        side = side_line(choice, choices, tokens) if self.for_gateway else b""
        return self._chunk(choice.index, body, told, choice.finish, choice.completion_tokens, so_far, side)

    def ending(self, choices: list[Choice]) -> bytes:
        """What a stream ends with that has come to its end."""
        if self.usage_shown is UsageShown.NONE:
            return DONE
        return sse({**self._head(self._chunk_object), "choices": [], "usage": usage(choices)}) + DONE

    def failed(self, error: RequestError, choices: list[Choice]) -> bytes:
        """What a stream ends with in its middle."""
        return sse(error_body(error), self.end_line(error)) + DONE

    def end_line(self, error: RequestError) -> bytes:
        """Tells the gateway why a stream ends; where the request is to blame, no other replica is to try it."""
        if not self.for_gateway or isinstance(error, BadRequest):
            return b""
        if not isinstance(error, EngineLeaving):
            return SIDE_LINE + b"! " + StreamEnd.FAILED.encode()
        place = f" {error.moved_to}" if error.moved_to else ""
        return SIDE_LINE + b"! " + (StreamEnd.LEAVING + place).encode()

    # -- inside -------------------------------------------------------------------------------

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(
        self,
        index: int,
        body: dict[str, Any],
        logprobs: object,
        finish: str | None,
        reached: int,
        so_far: dict[str, Any] | None = None,
        side: bytes = b"",
    ) -> bytes:
        choice = {
            "index": index,
            **body,
            "logprobs": logprobs,
            "finish_reason": finish,
            "token_index": reached,
        }
        counted = {} if self.usage_shown is UsageShown.NONE else {"usage": so_far}
        return sse({**self._head(self._chunk_object), "choices": [choice], **counted}, side)

    def _whole_choices(self, choices: list[Choice]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        told: dict[str, Any] = {}
        for choice in choices:
            told = told if choice.prompt_logprobs is None else self._prompt_logprobs(choice)
            found.append({**self._whole_choice(choice), **({} if self.chat else told)})
        return found

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        told = choice.prompt_logprobs
        return {} if told is None else {"prompt_logprobs": told.document(self.token_text)}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {"text": choice.text}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": choice.text}
            if choice.calls:
                message["content"] = choice.text or None
                message["tool_calls"] = list(map(_call, choice.calls))
            body = {"message": message}
        logprobs = self._logprobs(choice.logprobs)
        return {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": choice.finish}

    def _logprobs(self, entries: list[TokenLogprob], offset: int = 0) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        if self.chat:
            return {
                "content": [
                    {
                        **self._named(entry.token, entry.logprob),
                        "top_logprobs": [self._named(t, value) for t, value in entry.top],
                    }
                    for entry in entries
                ]
            }
        return {
            "tokens": [self.token_text(e.token) for e in entries],
            "token_logprobs": [e.logprob for e in entries],
            "top_logprobs": [
                {self.token_text(t): v for t, v in reversed(e.top)} | {self.token_text(e.token): e.logprob}
                for e in entries
            ],
            "text_offset": _offsets((self.token_text(e.token) for e in entries), offset),
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.token_text(token), "logprob": logprob, "bytes": list(self.token_bytes(token))}


def _call(call: CallPiece) -> dict[str, Any]:
    """A call as a whole answer has it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_piece(piece: CallPiece) -> dict[str, Any]:
    """A new call, or more arguments of one, as a chunk has it."""
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {"index": piece.index, **_call(piece)}


def usage(choices: list[Choice]) -> dict[str, Any]:
    prompt = sum(c.prompt_tokens for c in choices)
    completion = sum(c.completion_tokens for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in choices)},
    }


def error_body(error: RequestError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "type": error.code,
            "param": error.param,
            "code": error.status,
        }
    }


def sse(content: object, side: bytes = b"") -> bytes:
    """One server-sent event."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + side + b"\n\n"


def side_line(choice: Choice, choices: list[Choice], tokens: list[int]) -> bytes:
    """What an event tells the gateway besides."""
    prompt, cached = sum(c.prompt_tokens for c in choices), sum(c.cached_tokens for c in choices)
    ids = b",".join(b"%d" % token for token in tokens)
    return SIDE_LINE + b"%d %d %d %d " % (choice.index, choice.finish is not None, prompt, cached) + ids


def _offsets(texts: Iterable[str], at: int) -> list[int]:
    offsets = []
    for text in texts:
        offsets.append(at)
        at += len(text)
    return offsets
