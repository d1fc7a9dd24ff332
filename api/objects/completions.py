"""The try-it box: a completion streamed through the gateway, on behalf of the person at the browser.

The server makes a key that is valid for ten minutes, uses it, and never sends it to the browser. The request
goes through the gateway like everybody's, so it is queued, limited and metered in the same way.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from busbar.api.access.identity import Caller
from busbar.api.access.keys import Keys
from busbar.api.errors import Invalid

if TYPE_CHECKING:
    import aiohttp

MAX_PROMPT_CHARS = 8_000
MAX_TOKENS = 1_024
TIMEOUT_S = 330.0
"""Longer than the gateway holds a request while a service wakes from zero."""


class Completions:
    """Streams completions from the gateway."""

    def __init__(self, gateway_url: str, keys: Keys) -> None:
        self._url = gateway_url.rstrip("/")
        self._keys = keys
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def stream(
        self, caller: Caller, namespace: str, service: str, prompt: str, max_tokens: int, temperature: float
    ) -> AsyncIterator[bytes]:
        """The completion as server-sent events: `token` with a piece of text, then `done` or `failed`.

        Raises:
            Invalid: the prompt is empty or too long.
            Forbidden: the caller may not spend for the namespace's tenant.
        """
        if not prompt.strip() or len(prompt) > MAX_PROMPT_CHARS:
            raise Invalid(f"the prompt needs 1 to {MAX_PROMPT_CHARS} characters", field="prompt")
        if not 1 <= max_tokens <= MAX_TOKENS:
            raise Invalid(f"max tokens must be 1 to {MAX_TOKENS}", field="max_tokens")
        if not 0 <= temperature <= 2:
            raise Invalid("temperature must be 0 to 2", field="temperature")
        key = await self._keys.try_it(caller, namespace)
        body = {
            "model": f"{namespace}/{service}",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return self._events(key, body)

    async def _events(self, key: str, body: object) -> AsyncIterator[bytes]:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=False)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=5)
        try:
            async with self._session.post(
                f"{self._url}/v1/completions",
                json=body,
                headers={"Authorization": f"Bearer {key}"},
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    yield _event("failed", {"message": _refusal(response.status, await response.text())})
                    return
                tokens = 0
                async for line in response.content:
                    data = line.strip()
                    if not data.startswith(b"data:"):
                        continue
                    payload = data[5:].strip()
                    if payload == b"[DONE]":
                        yield _event("done", {"tokens": tokens})
                        return
                    chunk = json.loads(payload)
                    if "error" in chunk:
                        yield _event(
                            "failed", {"message": str(chunk["error"].get("message", "the engine failed"))}
                        )
                        return
                    text = "".join(str(choice.get("text") or "") for choice in chunk.get("choices") or [])
                    if usage := chunk.get("usage"):
                        tokens = int(usage.get("completion_tokens") or tokens)
                    if text:
                        yield _event("token", {"text": text})
                yield _event("failed", {"message": "the stream ended early; try again"})
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            yield _event("failed", {"message": "the gateway does not answer; try again in a moment"})


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def _refusal(status: int, text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered {status}"
