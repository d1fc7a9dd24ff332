"""A scripted engine for the portal's tests: an OpenAI server that streams words, chats, and calls the first tool it is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from aiohttp import web

WORDS = [
    "def",
    "main",
    "(",
    "argv",
    ")",
    ":",
    "return",
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "\n",
]
REFUSED = "refuse"
"""A message that is a 400."""
Pieces = list[tuple[dict[str, Any], str | None]]
"""The parts of a choice, each with its finish reason."""


def _completed(asked: dict[str, Any]) -> Pieces:
    count = int(asked.get("max_tokens", 16))
    words = [WORDS[index % len(WORDS)] + " " for index in range(count)]
    return [({"text": word}, "length" if index == count - 1 else None) for index, word in enumerate(words)]


def _chatted(asked: dict[str, Any]) -> Pieces:
    """What was said with how many turns and by which model; a schema's first property; or a call of the first tool."""
    messages, tools = asked["messages"], asked.get("tools") or []
    last = messages[-1]
    if asked.get("response_format"):
        schema = asked["response_format"]["json_schema"]["schema"]
        return _said(json.dumps({next(iter(schema["properties"])): "Ada"}))
    if last["role"] == "tool":
        return _said(f"{last['tool_call_id']} says {last['content']}.")
    if tools and asked["tool_choice"] != "none":
        name = tools[0]["function"]["name"]
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
        pieces = [
            call,
            *({"index": 0, "function": {"arguments": part}} for part in ('{"city": ', '"Paris"}')),
        ]
        return [
            ({"delta": {"tool_calls": [piece]}}, "tool_calls" if piece is pieces[-1] else None)
            for piece in pieces
        ]
    system = next((m["content"] + ": " for m in messages if m["role"] == "system"), "")
    return _said(f"{system}{asked['model']} heard {last['content']} as message {len(messages)}.")


def _said(text: str) -> Pieces:
    words = text.split(" ")
    return [
        (
            {"delta": {"content": word + " " * (index < len(words) - 1)}},
            "stop" if index == len(words) - 1 else None,
        )
        for index, word in enumerate(words)
    ]


def _chunks(asked: dict[str, Any], pieces: Pieces) -> Iterator[dict[str, Any]]:
    base = {"id": "cmpl-1", "created": 1, "model": asked["model"]}
    usage = {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
    for count, (piece, finish) in enumerate(pieces, 1):
        usage = {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": count + 2}
        yield {**base, "choices": [{"index": 0, **piece, "finish_reason": finish}], "usage": usage}
    yield {**base, "choices": [], "usage": usage}


async def answered(request: web.Request) -> web.StreamResponse:
    """Streams what was asked for, with a short delay between its pieces."""
    asked = await request.json()
    chat = request.path == "/v1/chat/completions"
    if chat and asked["messages"][-1]["content"] == REFUSED:
        error = {"message": "messages[0].content is refused by this engine", "type": "invalid_request_error"}
        return web.json_response({"error": error}, status=400)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in _chunks(asked, _chatted(asked) if chat else _completed(asked)):
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await asyncio.sleep(0.01)
    await response.write(b"data: [DONE]\n\n")
    return response


def app() -> web.Application:
    """Answers `/v1/completions` with `max_tokens` words, and `/v1/chat/completions`."""

    async def ok(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    made = web.Application()
    made.router.add_post("/v1/completions", answered)
    made.router.add_post("/v1/chat/completions", answered)
    made.router.add_get("/ready", ok)
    return made
