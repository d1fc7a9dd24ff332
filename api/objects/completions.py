"""The try-it box: an answer streamed through the gateway, on behalf of the person at the browser.

The server makes a key that is valid for ten minutes, uses it, and never sends it to the browser. The request
goes through the gateway like everybody's, so it is queued, limited and metered in the same way.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from busbar.api.access.identity import Caller
from busbar.api.access.keys import Keys
from busbar.api.objects.conversation import Question

if TYPE_CHECKING:
    import aiohttp

TIMEOUT_S = 330.0
"""Longer than the gateway holds a request while a service wakes from zero."""


class Completions:
    """Streams answers from the gateway."""

    def __init__(self, gateway_url: str, keys: Keys) -> None:
        self._url = gateway_url.rstrip("/")
        self._keys = keys
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def stream(self, caller: Caller, namespace: str, question: Question) -> AsyncIterator[bytes]:
        """The answer as server-sent events: `token` with a piece of text and `call` with a piece of a tool call, then
        `done` or `failed`.

        Raises:
            Forbidden: the caller may not spend for the namespace's tenant.
        """
        key = await self._keys.try_it(caller, namespace)
        return self._events(key, question)

    async def _events(self, key: str, question: Question) -> AsyncIterator[bytes]:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=False)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=5)
        try:
            async with self._session.post(
                f"{self._url}{question.path}",
                json=question.body,
                headers={"Authorization": f"Bearer {key}"},
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    yield _event("failed", {"message": _refusal(response.status, await response.text())})
                    return
                answer = _Answer()
                async for line in response.content:
                    for event in answer.told(line.strip()):
                        yield event
                    if answer.over:
                        return
                yield _event("failed", {"message": "the stream ended early; try again"})
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            yield _event("failed", {"message": "the gateway does not answer; try again in a moment"})


@dataclass
class _Answer:
    """An answer as it comes."""

    tokens: int = 0
    finish: str = ""
    over: bool = False

    def told(self, line: bytes) -> Iterator[bytes]:
        """What a line of the gateway's stream says to the page. Raises ValueError for one that is not JSON."""
        if not line.startswith(b"data:"):
            return
        payload = line[5:].strip()
        if payload == b"[DONE]":
            self.over = True
            yield _event("done", {"tokens": self.tokens, "finish": self.finish})
            return
        chunk = json.loads(payload)
        if "error" in chunk:
            self.over = True
            yield _event("failed", {"message": _message(chunk, "the engine failed")})
            return
        for choice in chunk.get("choices") or []:
            self.finish = str(choice.get("finish_reason") or self.finish)
            delta = choice.get("delta") or {}
            if text := choice.get("text") or delta.get("content"):
                yield _event("token", {"text": str(text)})
            for piece in delta.get("tool_calls") or []:
                yield _event("call", _call_piece(piece))
        if usage := chunk.get("usage"):
            self.tokens = int(usage.get("completion_tokens") or self.tokens)


def _call_piece(piece: dict[str, Any]) -> dict[str, Any]:
    """A new tool call, or more arguments of one: its number, and id and name where the piece begins it."""
    function = piece.get("function") or {}
    return {
        "index": int(piece.get("index") or 0),
        "id": str(piece.get("id") or ""),
        "name": str(function.get("name") or ""),
        "arguments": str(function.get("arguments") or ""),
    }


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def _refusal(status: int, text: str) -> str:
    instead = f"the gateway answered {status}"
    try:
        return _message(json.loads(text), instead)
    except ValueError:
        return instead


def _message(document: object, instead: str) -> str:
    """The sentence of an OpenAI error."""
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else instead
