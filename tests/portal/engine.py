"""A scripted engine for the portal's tests: an OpenAI server that streams words."""

from __future__ import annotations

import asyncio
import json

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


def app() -> web.Application:
    """Answers `/v1/completions` with `max_tokens` words, with a short delay between them."""

    async def complete(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        count = int(asked.get("max_tokens", 16))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(body: object) -> None:
            await response.write(f"data: {json.dumps(body)}\n\n".encode())

        base = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": asked["model"]}
        for index in range(count):
            usage = {"prompt_tokens": 2, "completion_tokens": index + 1, "total_tokens": index + 3}
            word = WORDS[index % len(WORDS)] + " "
            last = "length" if index == count - 1 else None
            await send(
                {**base, "choices": [{"index": 0, "text": word, "finish_reason": last}], "usage": usage}
            )
            await asyncio.sleep(0.01)
        await send(
            {
                **base,
                "choices": [],
                "usage": {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": count + 2},
            }
        )
        await response.write(b"data: [DONE]\n\n")
        return response

    async def ok(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    made = web.Application()
    made.router.add_post("/v1/completions", complete)
    made.router.add_get("/ready", ok)
    return made
