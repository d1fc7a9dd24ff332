"""Builds the answers of /v1/responses: one object, or the named events in which it grows.

An answer is a list of items: messages and calls, one after the other. Both forms are made by the same steps; a whole
answer takes them all at once. Each event has a `sequence_number`, which counts from 0 without a gap.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from busbar.workloads.serving.errors import BadRequest, RequestError
from busbar.workloads.serving.openai_response import Answer, Choice, side_line, usage
from busbar.workloads.serving.responses_request import ResponsesBody

NOTHING = b":\n\n"
"""A comment, where tokens are told of which no event says anything yet."""
COMPLETED, INCOMPLETE, FAILED, RUNNING = "completed", "incomplete", "failed", "in_progress"


@dataclass
class Growth:
    """How far an answer has come."""

    events: int = 0
    items: list[dict[str, Any]] = field(default_factory=list)
    open: bool = False
    """The last item is still written."""


@dataclass(frozen=True, kw_only=True)
class ResponsesAnswer(Answer):
    """One request's answer in this route's form."""

    asked: ResponsesBody
    growth: Growth = field(default_factory=Growth)

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        (choice,) = choices
        self._grow(choice)
        return self._response(_status(choice), choices)

    def catch_up(self, choice: Choice, text: str, events: int) -> None:
        """Grow as the stream did on another replica: later events repeat what earlier ones said. Of calls one character at a
        time, so that they and what stands between them come in their order."""
        for piece in [text] if choice.reader is None else text:
            choice.show(piece)
            self._grow(choice)
            choice.text, choice.calls = "", []
        self.growth.events = events

    def opening(self, choices: list[Choice]) -> bytes:
        if any(choice.resumed for choice in choices):
            return b""
        response = self._response(RUNNING, None)
        return b"".join(self._event(f"response.{kind}", response=response) for kind in ("created", RUNNING))

    def chunk(self, choice: Choice, choices: list[Choice]) -> bytes:
        """The last event tells the gateway the tokens of all, so that the client gets all or none of them."""
        events = self._grow(choice) or [NOTHING]
        side = side_line(choice, choices, choice.tokens) if self.for_gateway else b""
        choice.text, choice.calls, choice.tokens = "", [], []
        if not side and events == [NOTHING]:
            return b""
        *others, last = events
        return b"".join([*others, last.removesuffix(b"\n\n"), side, b"\n\n"])

    def ending(self, choices: list[Choice]) -> bytes:
        status = _status(choices[0])
        return self._event(f"response.{status}", response=self._response(status, choices))

    def failed(self, error: RequestError, choices: list[Choice]) -> bytes:
        code = "invalid_prompt" if isinstance(error, BadRequest) else "server_error"
        if self.growth.open:
            self.growth.items[-1]["status"] = INCOMPLETE
        response = self._response(FAILED, choices, {"code": code, "message": str(error)})
        event = self._event("response.failed", response=response)
        return event.removesuffix(b"\n\n") + self.end_line(error) + b"\n\n"

    # -- inside -------------------------------------------------------------------------------

    def _grow(self, choice: Choice) -> list[bytes]:
        """The events of what the choice has gained since the last call.

        More arguments of the call that is open come first: text ends it.
        """
        events = []
        for call in choice.calls:
            if call.name is None:
                events += self._write_arguments(call.arguments)
        if choice.text:
            events += self._begin_message()
            self.growth.items[-1]["content"][0]["text"] += choice.text
            events.append(self._of_part("response.output_text.delta", delta=choice.text, logprobs=[]))
        for call in choice.calls:
            if call.name is not None:
                events += self._begin_call(str(call.id), call.name)
                events += self._write_arguments(call.arguments)
        if choice.finish is not None:
            if not self.growth.items:
                events += self._begin_message()
            events += self._end_item(_status(choice))
        return events

    def _write_arguments(self, text: str) -> list[bytes]:
        if not text:
            return []
        self.growth.items[-1]["arguments"] += text
        return [self._of_item("response.function_call_arguments.delta", delta=text)]

    def _begin_message(self) -> list[bytes]:
        if self.growth.open and self.growth.items[-1]["type"] == "message":
            return []
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        begun = self._begin({"type": "message", "role": "assistant", "content": []}, "msg")
        begun.append(self._of_part("response.content_part.added", part=part))
        self.growth.items[-1]["content"].append(part)
        return begun

    def _begin_call(self, call_id: str, name: str) -> list[bytes]:
        return self._begin({"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}, "fc")

    def _begin(self, item: dict[str, Any], prefix: str) -> list[bytes]:
        """Ends the item before it."""
        ended, growth = self._end_item(COMPLETED), self.growth
        growth.items.append({"id": f"{prefix}-{self.id}-{len(growth.items)}", "status": RUNNING, **item})
        growth.open = True
        return [*ended, self._placed("response.output_item.added", item=growth.items[-1])]

    def _end_item(self, status: str) -> list[bytes]:
        if not self.growth.open:
            return []
        self.growth.open = False
        item = self.growth.items[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            text, whole = {"text": part["text"], "logprobs": []}, {"part": part}
            events = [
                self._of_part("response.output_text.done", **text),
                self._of_part("response.content_part.done", **whole),
            ]
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._of_item("response.function_call_arguments.done", **told)]
        return [*events, self._placed("response.output_item.done", item=item)]

    def _of_part(self, kind: str, **fields: object) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: object) -> bytes:
        return self._placed(kind, item_id=self.growth.items[-1]["id"], **fields)

    def _placed(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, output_index=len(self.growth.items) - 1, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        document = {"type": kind, "sequence_number": self.growth.events, **fields}
        self.growth.events += 1
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        # Half a surrogate pair, which a client can write and UTF-8 lacks, goes back as its escape.
        return f"event: {kind}\ndata: {text}\n\n".encode(errors="backslashreplace")

    def _response(
        self, status: str, choices: list[Choice] | None, error: dict[str, str] | None = None
    ) -> dict[str, Any]:
        echo, params = self.asked.echo, self.asked.wanted.params
        short = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": error,
            "incomplete_details": short,
            "model": self.model,
            "output": self.growth.items,
            "usage": None if choices is None else _usage(choices),
            "metadata": echo.metadata,
            "max_output_tokens": echo.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": echo.form},
            "tools": echo.tools,
            "tool_choice": echo.tool_choice,
            "parallel_tool_calls": echo.parallel,
            "reasoning": {"effort": echo.effort, "summary": None},
            "instructions": echo.instructions,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
        }


def _status(choice: Choice) -> str:
    return INCOMPLETE if choice.finish == "length" else COMPLETED


def _usage(choices: list[Choice]) -> dict[str, Any]:
    counted = usage(choices)
    return {
        "input_tokens": counted["prompt_tokens"],
        # Nothing is charged for writing to the prefix cache; the client's type wants the number all the same.
        "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["total_tokens"],
    }
