"""The servers that the gateway calls, for tests; each is a real aiohttp server on loopback.

`Engine` streams OpenAI answers word by word and can be set to fail; `Api` knows keys and accepts each usage record
exactly once; `Operator` streams routes. `House` starts them with a gateway in the same process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from busbar.gateway.server import Gateway
from busbar.gateway.settings import Settings
from busbar.kube.contracts import budget_leases
from busbar.kube.contracts.auth import Reviewer
from busbar.kube.contracts.keys import KeyIdentity, digest_of
from busbar.kube.contracts.request_size import REPLICA_REQUEST_BYTES
from busbar.kube.contracts.streams import DIGEST_HEADER, RESUME_PATH, SIDE_LINE, ResumeRequest
from busbar.kube.contracts.usage import UsageBatch

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

T = TypeVar("T")
PATIENCE_S = 60.0
"""Longest wait for an event that must happen; it only ends a test that would hang."""
OPERATOR = "system:serviceaccount:busbar-system:busbar-operator"


def key(letter: str) -> str:
    """A well-formed API key."""
    return "bb_" + letter * 43


KEY_A = key("a")
KEY_A2 = key("z")
KEY_B = key("b")


class FirstOfEquals(random.Random):
    """Of equally busy replicas the first in the list is chosen, so a faulty first one gets the request."""

    def choice(self, seq: SupportsLenAndGetItem[T]) -> T:
        return seq[0]

    def sample(self, population: Sequence[T], k: int, *, counts: Iterable[int] | None = None) -> list[T]:
        return list(population)[:k]


class Server:
    """An aiohttp application on a free loopback port that can be stopped and started on the same port."""

    def __init__(self) -> None:
        self.port = 0
        self.running = 0
        """Requests that end by themselves or when their client disconnects."""
        self._runner: web.AppRunner | None = None

    def app(self) -> web.Application:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        await web.SockSite(self._runner, self._listener).start()

    async def stop(self) -> None:
        """Accept no more connections, finish the running requests, and stop."""
        if self._runner is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            await self._quiet()
            await self._runner.cleanup()
            self._runner = None

    async def _quiet(self) -> None:
        """Waits until no request runs: aiohttp would cut an answer after a short time.

        A new connection becomes a request after some iterations of the event loop; if the server closes before that,
        asyncio loses the connection and leaks its socket.
        """
        turns = 0
        async with asyncio.timeout(PATIENCE_S):
            while turns < 20:
                turns = 0 if self.running else turns + 1
                await asyncio.sleep(0)


class Engine(Server):
    """One replica. `words` are its answer, one token each; `prompt_tokens` is always 7."""

    def __init__(self, *words: str, bearer: str = "up") -> None:
        super().__init__()
        self.words = words or ("one", " two", " three")
        self.bearer = bearer
        self.status = 200
        self.headers: dict[str, str] = {}
        self.refusal: bytes | None = None
        """Of any status: the whole answer in place of one in JSON."""
        self.die_at: int | None = None
        """Cut the connection before this word (0: before any byte; of a chat, after the role; behind the last: before
        the end of the stream)."""
        self.pause_at: int | None = None
        """Wait for `go` before this word."""
        self.go = asyncio.Event()
        self.tells_usage = True
        self.knows_continuous = True
        self.cached_tokens = 0
        self.digest: str | None = None
        """Set: it numbers its tokens for the gateway, and goes on with streams of this digest."""
        self.leaves_at: int | None = None
        """End the stream with an error event of one who shuts down, before this word."""
        self.moves_to = ""
        """Then also tell this address."""
        self.health = 200
        """The status of /health; 0: no answer at all."""
        self.bodies: list[dict[str, Any]] = []
        self.seen_headers: list[CIMultiDict[str]] = []
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=REPLICA_REQUEST_BYTES)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        for path in ("/v1/embeddings", "/tokenize", "/detokenize"):
            app.router.add_post(path, self._complete)
        app.router.add_get("/health", self._health)
        if self.digest is not None:
            app.router.add_post(RESUME_PATH, self._complete)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        if self.health == 0:
            await asyncio.Event().wait()
        return web.Response(status=self.health)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.seen_headers.append(request.headers.copy())
        self.running += 1
        self.arrived.set()
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.refusal is not None:
            return web.Response(status=self.status, body=self.refusal, headers=self.headers)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status, headers=self.headers)
        if request.headers.get("Authorization") != f"Bearer {self.bearer}":
            return web.json_response({"error": {"message": "whose bearer is this?"}}, status=401)
        if not self.knows_continuous and "continuous_usage_stats" in (body.get("stream_options") or {}):
            return web.json_response({"error": {"message": "unknown", "param": "stream_options"}}, status=400)
        if self.die_at == 0 and not request.path.endswith("/chat/completions"):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if request.path == RESUME_PATH:
            asked = ResumeRequest.model_validate(body)
            if asked.digest != self.digest:
                return web.json_response({"error": {"message": "another stream"}}, status=409)
            return await self._stream(request, asked.request, len(asked.choices[0].tokens))
        if not body.get("stream"):
            if self.pause_at is not None:
                await self.go.wait()
            return web.json_response(self._document(body))
        return await self._stream(request, body)

    async def _stream(self, request: web.Request, body: dict[str, Any], begin: int = 0) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if self.digest is not None:
            response.headers[DIGEST_HEADER] = self.digest
        await response.prepare(request)
        options = body.get("stream_options") or {}
        if request.path.endswith("/chat/completions") and not begin:
            role = {"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            await response.write(b"data: " + json.dumps(role).encode() + b"\n\n")
        for count, word in enumerate(self.words[begin:], begin):
            if self.leaves_at == count:
                place = b" " + self.moves_to.encode() if self.moves_to else b""
                await response.write(b'data: {"error":{}}' + SIDE_LINE + b"! leaving" + place + b"\n\n")
                return response
            if self.pause_at == count:
                await self.go.wait()
            if self.die_at == count:
                assert request.transport is not None
                request.transport.abort()
                return response
            chunk: dict[str, Any] = {
                "id": "x",
                "choices": [{"index": 0, "text": word, "delta": {"content": word}}],
            }
            side = b""
            if self.digest is not None:
                side = SIDE_LINE + b"0 %d 7 0 %d" % (count + 1 == len(self.words), 100 + count)
            elif self.tells_usage and options.get("continuous_usage_stats"):
                chunk["usage"] = self._usage(count + 1)
            data = json.dumps(chunk, separators=(",", ":")).encode()
            await response.write(b"data: " + data + side + b"\n\n")
        if self.die_at == len(self.words):
            assert request.transport is not None
            request.transport.abort()
            return response
        if self.tells_usage and options.get("include_usage"):
            last = {"id": "x", "choices": [], "usage": self._usage(len(self.words))}
            await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _document(self, body: dict[str, Any]) -> dict[str, Any]:
        text = "".join(self.words)
        return {
            "id": "x",
            "object": "text_completion",
            "model": body["model"],
            "choices": [{"index": 0, "text": text, "message": {"role": "assistant", "content": text}}],
            "usage": self._usage(len(self.words)),
        }

    def _usage(self, completion: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": 7,
            "completion_tokens": completion,
            "total_tokens": 7 + completion,
        }
        if self.cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


class Api(Server):
    """The API's internal port."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[str, KeyIdentity] = {}
        self.lookups = 0
        self.away = False
        self.forget_answers = 0
        """Accept this many deliveries of usage but drop the answer."""
        self.batches: list[list[int]] = []
        self.records: dict[tuple[str, int], dict[str, Any]] = {}
        self.arrived = asyncio.Event()

    def know(self, text: str, tenant: str, *namespaces: str, **more: Any) -> None:
        fields = {"scopes": ["inference"], **more}
        self.keys[digest_of(text)] = KeyIdentity(
            key_id=f"id-{text[3]}",
            subject=f"user-{text[3]}",
            tenant=tenant,
            namespaces=list(namespaces),
            **fields,
        )

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/internal/keys/lookup", self._lookup)
        app.router.add_post("/internal/usage", self._usage)
        app.router.add_post(budget_leases.PATH, self._leases)
        return app

    async def _lookup(self, request: web.Request) -> web.Response:
        self.lookups += 1
        if self.away or request.headers.get("Authorization") != "Bearer to-api":
            return web.Response(status=500)
        asked = await request.json()
        found = self.keys.get(asked["sha256"])
        return (
            web.json_response(self._counted(found, asked["gateway"])) if found else web.Response(status=404)
        )

    def _counted(self, key: KeyIdentity, gateway: str) -> dict[str, Any]:
        """The key's accounts, with the costs of the records that have arrived."""
        through = max((seq for name, seq in self.records if name == gateway), default=0)
        document = key.model_copy(update={"counted_through": through}).to_wire()
        for account in document["accounts"]:
            kind, name = account["name"].split("/")
            field = "keyId" if kind == "key" else "tenant"
            spent = sum(r["costNano"] for r in self.records.values() if r[field] == name)
            for cost in account["costs"]:
                cost["spentNano"] = spent
        return document

    async def _leases(self, request: web.Request) -> web.Response:
        """Grants everything that is wanted: there is one gateway that asks."""
        if self.away:
            return web.Response(status=500)
        asked = budget_leases.LeaseRequest.model_validate(await request.json())
        through = max((seq for name, seq in self.records if name == asked.gateway), default=0)
        grants = [
            budget_leases.LeaseGrant(account=ask.account, kind=ask.kind, amount=ask.wanted, reach=ask.limit)
            for ask in asked.asks
        ]
        answer = budget_leases.LeaseAnswer(number=asked.number, counted_through=through, grants=grants)
        return web.json_response(answer.to_wire())

    async def _usage(self, request: web.Request) -> web.Response:
        if self.away:
            return web.Response(status=500)
        batch = UsageBatch.model_validate(await request.json())
        self.batches.append([record.seq for record in batch.records])
        for record in batch.records:
            self.records.setdefault((batch.gateway, record.seq), record.to_wire())
        self.arrived.set()
        if self.forget_answers:
            self.forget_answers -= 1
            assert request.transport is not None
            request.transport.abort()
        through = max(seq for gateway, seq in self.records if gateway == batch.gateway)
        return web.json_response({"acceptedThrough": through})

    def total(self, key_id: str | None = None) -> tuple[int, int, int]:
        """(requests, prompt tokens, completion tokens) of a key."""
        mine = [r for r in self.records.values() if key_id is None or r["keyId"] == key_id]
        return len(mine), sum(r["promptTokens"] for r in mine), sum(r["completionTokens"] for r in mine)

    async def wait_for(self, requests: int) -> None:
        """Waits until so many usage records have arrived."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.records) < requests:
                self.arrived.clear()
                await self.arrived.wait()


class Operator(Server):
    """Streams the routes document at every change."""

    def __init__(self) -> None:
        super().__init__()
        self.services: list[dict[str, Any]] = []
        self.revision = 0
        self.connections = 0
        self._changed = asyncio.Condition()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/routes", self._routes)
        return app

    async def publish(self, *services: dict[str, Any]) -> None:
        async with self._changed:
            self.services = list(services)
            self.revision += 1
            self._changed.notify_all()

    async def _routes(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer to-operator":
            return web.Response(status=401)
        self.connections += 1
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            revision = self.revision
            document = {"revision": revision, "services": self.services}
            await response.write(json.dumps(document).encode() + b"\n")
            async with self._changed:
                await self._changed.wait_for(lambda seen=revision: self.revision != seen)  # type: ignore[misc]


def route(name: str, *engines: Engine | dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A service of the routes document."""
    endpoints = [
        engine
        if isinstance(engine, dict)
        else {"pod": f"{name}-1-{index}", "url": engine.url, "ready": True, "draining": False}
        for index, engine in enumerate(engines)
    ]
    service: dict[str, Any] = {
        "tenant": "tenant-a",
        "namespace": "team-a",
        "name": name,
        "uid": f"uid-{name}",
        "modelId": name,
        "desiredReplicas": len(engines),
        "readyReplicas": len(engines),
        "suspended": False,
        "minReplicas": 0,
        "maxReplicas": 2,
        "bearer": "up",
        "endpoints": endpoints,
    }
    return {**service, **fields}


async def review(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A TokenReview that knows two callers."""
    names = {"of-operator": OPERATOR, "of-somebody": "system:serviceaccount:team-a:default"}
    name = names.get(body["spec"]["token"])
    if name is None:
        return {"status": {"authenticated": False}}
    return {
        "status": {"authenticated": True, "audiences": body["spec"]["audiences"], "user": {"username": name}}
    }


@dataclass
class House:
    """A gateway with its API, operator and engines."""

    folder: Path
    api: Api = field(default_factory=Api)
    operator: Operator = field(default_factory=Operator)
    engines: list[Engine] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)
    gateway: Gateway | None = None
    session: aiohttp.ClientSession | None = None

    def settings(self) -> Settings:
        for name in ("api", "operator"):
            (self.folder / name).write_text(f"to-{name}\n")
        values: dict[str, Any] = {
            "public_address": "127.0.0.1:0",
            "internal_address": "127.0.0.1:0",
            "state_dir": self.folder / "state",
            "operator_url": self.operator.url,
            "operator_token_file": self.folder / "operator",
            "api_url": self.api.url,
            "api_token_file": self.folder / "api",
            "hold_timeout_s": PATIENCE_S,
            "suspect_s": 0.02,
            "suspect_max_s": 0.05,
            "connect_timeout_s": 1.0,
            "max_requests": 64,
            "usage_commit_s": 0.0,
            "usage_delivery_s": 0.0,
            "linger_s": 0.0,
            "drain_s": PATIENCE_S,
            "batch_lines": 0,
        }
        return Settings(**{**values, **self.overrides})

    def environment(self) -> dict[str, str]:
        """The same settings for a gateway process."""
        settings = self.settings()
        return {
            f"BUSBAR_GATEWAY_{item.name.upper()}": str(getattr(settings, item.name))
            for item in dataclasses.fields(settings)
            if not isinstance(getattr(settings, item.name), tuple)
        }

    async def engine(self, *words: str, digest: str | None = None) -> Engine:
        engine = Engine(*words)
        engine.digest = digest
        await engine.start()
        self.engines.append(engine)
        return engine

    async def start_neighbours(self) -> None:
        self.api.know(KEY_A, "tenant-a", "team-a")
        self.api.know(KEY_A2, "tenant-a", "team-a")
        self.api.know(KEY_B, "tenant-b", "team-b")
        await self.api.start()
        await self.operator.start()
        self.session = aiohttp.ClientSession()

    async def start_gateway(self) -> None:
        self.gateway = Gateway(self.settings(), reviewer=Reviewer(review), rng=FirstOfEquals())
        await self.gateway.start()

    async def stop_gateway(self) -> None:
        if self.gateway is not None:
            await self.gateway.stop()
            self.gateway = None

    async def stop(self) -> None:
        await self.stop_gateway()
        if self.session is not None:
            await self.session.close()
        for server in [*self.engines, self.operator, self.api]:
            await server.stop()

    @property
    def public(self) -> str:
        assert self.gateway is not None
        return "http://{}:{}".format(*self.gateway.public)

    @property
    def internal(self) -> str:
        assert self.gateway is not None
        return "http://{}:{}".format(*self.gateway.internal)

    async def publish(self, *services: dict[str, Any]) -> None:
        """Publish routes and wait until the gateway has them."""
        await self.operator.publish(*services)
        assert self.gateway is not None
        async with asyncio.timeout(PATIENCE_S):
            while self.gateway.revision != self.operator.revision:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def routes_saved(self) -> Path:
        """The gateway's file of routes, once it exists; the gateway writes it after it has applied them."""
        saved = self.folder / "state" / "routes.json"
        async with asyncio.timeout(PATIENCE_S):
            while not saved.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return saved

    @asynccontextmanager
    async def post(
        self, body: dict[str, Any], *, path: str = "/v1/completions", api_key: str | None = KEY_A, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self.session is not None
        headers = {**({"Authorization": f"Bearer {api_key}"} if api_key else {}), **more.pop("headers", {})}
        async with self.session.post(self.public + path, json=body, headers=headers, **more) as response:
            yield response

    async def ask(self, model: str = "m", *, api_key: str | None = KEY_A, **fields: Any) -> tuple[int, Any]:
        """A whole request: (status, JSON)."""
        async with self.post({"model": model, "prompt": "hi", **fields}, api_key=api_key) as response:
            return response.status, await response.json()

    async def ask_at(self, path: str, model: str = "m", **fields: Any) -> tuple[int, Any]:
        """A whole request to another path: (status, JSON)."""
        async with self.post({"model": model, **fields}, path=path) as response:
            return response.status, await response.json()

    async def stream(self, model: str = "m", *, api_key: str = KEY_A, **fields: Any) -> list[Any]:
        """A streamed request: its events, parsed ([DONE] as a string)."""
        async with self.post(
            {"model": model, "prompt": "hi", "stream": True, **fields}, api_key=api_key
        ) as response:
            assert response.status == 200, await response.text()
            return events(await response.read())


def events(data: bytes) -> list[Any]:
    """The payloads of a whole event stream."""
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [part.decode() if part == b"[DONE]" else json.loads(part) for part in parts]


def text_of(stream: list[Any]) -> str:
    """The text that an event stream carries."""
    return "".join(c["text"] for e in stream if isinstance(e, dict) for c in e.get("choices", ()))


@asynccontextmanager
async def started(house: House) -> AsyncIterator[House]:
    """With its neighbours and the gateway running; engines are added by the test."""
    await house.start_neighbours()
    try:
        await house.start_gateway()
        yield house
    finally:
        await house.stop()
