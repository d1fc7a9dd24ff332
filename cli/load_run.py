"""Carries out a load against an OpenAI endpoint: one connection a request, streamed answers, the time of each piece.

endpoint = Endpoint(url, key, model, chat=True)
texts = asyncio.run(endpoint.texts(shared_tokens=0, seed=0))
answered: list[Answered] = []
asyncio.run(run(load, endpoint, texts, answered.append))
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx2

from busbar.cli.batches import error_of
from busbar.cli.client import trust_of
from busbar.cli.errors import BusbarError, Unreachable
from busbar.cli.lines import Lines
from busbar.cli.load import PROBES, Load, Request, Texts, words

TOLD_CHARS = 300
"""So much of a server's own words is repeated."""


@dataclass
class Answered:
    """What became of one request. Times are seconds since the load's begin."""

    request: Request
    sent_s: float
    late_s: float = 0.0
    """So much later than it should be was it sent, because this program had no time."""
    pieces_s: array[float] = field(default_factory=lambda: array("d"))
    """When each piece of the answer came."""
    ended_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int | None = None
    problem: str = ""
    """Why there is no whole answer; "": there is."""


@dataclass
class Endpoint:
    """Where requests go."""

    url: str
    """Ends with /v1."""
    key: str | None
    model: str
    chat: bool = True
    ca_file: str | None = None
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request."""

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx2.AsyncClient]:
        verify, trust_env = trust_of(self.url, self.ca_file)
        async with httpx2.AsyncClient(
            headers={} if self.key is None else {"Authorization": f"Bearer {self.key}"},
            timeout=httpx2.Timeout(self.timeout_s, connect=10.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=1000),
            verify=verify,
            trust_env=trust_env,
        ) as client:
            yield client

    @property
    def path(self) -> str:
        return f"{self.url}/{'chat/completions' if self.chat else 'completions'}"

    def body(self, text: str, output_tokens: int) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        return {"model": self.model, **asked, "max_tokens": output_tokens, **self.extra}

    async def texts(self, shared_tokens: int, seed: int) -> Texts:
        """Asks how many tokens words have here. Raises BusbarError when the endpoint does not answer as it should."""
        counted: list[int] = []
        async with self.client() as client:
            for count in PROBES:
                text = " ".join(words(count, Random(f"{seed} probe {count}")))
                answer = await _asked(client, self.path, self.body(text, 1))
                counted.append(int((answer.get("usage") or {}).get("prompt_tokens") or 0))
        return Texts.measured(counted, shared_tokens, seed)


async def models_at(endpoint: Endpoint) -> list[str]:
    """The models that it serves to this caller. Raises BusbarError."""
    async with endpoint.client() as client:
        answer = await _asked(client, f"{endpoint.url}/models")
    return [str(one["id"]) for one in answer.get("data") or () if isinstance(one, dict) and "id" in one]


async def _asked(client: httpx2.AsyncClient, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One answer as JSON. Raises BusbarError."""
    try:
        response = await (client.get(url) if body is None else client.post(url, json=body))
    except httpx2.HTTPError as error:
        raise Unreachable(f"{url} does not answer: {error or type(error).__name__}") from error
    if response.status_code >= 300:
        await response.aread()
        raise error_of(url, response)
    try:
        found = response.json()
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BusbarError(f"{url} does not answer in JSON; is it the address of the OpenAI API?")
    return found


async def run(
    load: Load,
    endpoint: Endpoint,
    texts: Texts,
    told: Callable[[Answered], object],
    *,
    until_s: float | None = None,
) -> float:
    """Carry out a load; returns its seconds. `told` hears of each request when it has ended.

    Args:
        until_s: nothing is sent later than so many seconds after the begin.
    """
    begin = time.monotonic()

    def now() -> float:
        return time.monotonic() - begin

    async with endpoint.client() as client:

        async def one(request: Request, due_s: float | None) -> None:
            answered = Answered(request, now())
            answered.late_s = 0.0 if due_s is None else max(0.0, answered.sent_s - due_s)
            try:
                await _stream(client, endpoint, texts, answered, now)
            except httpx2.HTTPError as error:
                answered.problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            answered.ended_s = now()
            told(answered)

        due = iter(load.requests)
        if load.concurrency is None:
            await _at_their_times(due, one, now, until_s)
        else:
            await _so_many_at_once(load.concurrency, due, one, now, until_s)
    return now()


One = Callable[[Request, float | None], Any]


async def _at_their_times(due: Any, one: One, now: Callable[[], float], until_s: float | None) -> None:
    async with asyncio.TaskGroup() as group:
        for request in due:
            if until_s is not None and request.at_s > until_s:
                return
            await asyncio.sleep(max(0.0, request.at_s - now()))
            group.create_task(one(request, request.at_s))


async def _so_many_at_once(
    count: int, due: Any, one: One, now: Callable[[], float], until_s: float | None
) -> None:
    async def in_turn() -> None:
        for request in due:
            if until_s is not None and now() > until_s:
                return
            await one(request, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(in_turn())


async def _stream(
    client: httpx2.AsyncClient, endpoint: Endpoint, texts: Texts, answered: Answered, now: Callable[[], float]
) -> None:
    request = answered.request
    body = endpoint.body(texts.of(request), request.output_tokens)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", endpoint.path, json=body) as response:
        if response.status_code != 200:
            answered.problem = f"{response.status_code}: {_words_of(await response.aread())}"
            return
        whole, lines = False, Lines()
        async for piece in response.aiter_bytes():
            for line in lines.of(piece):
                if line.startswith("data:"):
                    whole = _take(line[5:].strip(), answered, now()) or whole
        if not whole and not answered.problem:
            answered.problem = "the answer ended before its end"


def _take(data: str, answered: Answered, at_s: float) -> bool:
    """One event of the stream; returns whether it is the last one."""
    if data == "[DONE]":
        return True
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        answered.problem = f"an event is no JSON object: {data[:TOLD_CHARS]}"
        return False
    if event.get("error"):
        answered.problem = _message(event["error"])
        return False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(
            delta.get(name) for name in ("content", "reasoning_content", "tool_calls")
        ):
            answered.pieces_s.append(at_s)
    usage = event.get("usage")
    if usage:
        answered.prompt_tokens, answered.output_tokens = (
            usage.get("prompt_tokens"),
            usage.get("completion_tokens"),
        )
        answered.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return False


def _words_of(content: bytes) -> str:
    """What a server says of a request that it did not carry out."""
    text = content.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        return " ".join(text.split())[:TOLD_CHARS]
    return _message(found.get("error", found) if isinstance(found, dict) else found)


def _message(error: Any) -> str:
    said = error.get("message") if isinstance(error, dict) else error
    return str(said)[:TOLD_CHARS]
