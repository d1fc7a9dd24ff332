"""The public port: the OpenAI routes, /health and /ready.

Every answer is JSON that an OpenAI client understands, errors too. A handler does, in order: who is it
(`keys`), what does it want (this module), which service is that (`routes`), and then hands over (`relay`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from busbar.gateway.errors import BadRequest, ClientError, TooLarge, Unavailable, body
from busbar.gateway.keys import KeyDirectory
from busbar.gateway.metrics import Metrics
from busbar.gateway.relay import Call, Relay
from busbar.gateway.routes import RouteTable

log = logging.getLogger("busbar.gateway.requests")
_ID = web.RequestKey("id", str)
_ARRIVED = web.RequestKey("arrived", float)
_SERVICE = web.RequestKey("service", str)
_KEY_ID = web.RequestKey("key_id", str)
BODY_S = 60.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """Handlers of the public port."""

    def __init__(self, keys: KeyDirectory, relay: Relay, metrics: Metrics, body_bytes: int) -> None:
        self._keys = keys
        self._relay = relay
        self._metrics = metrics
        self._body_bytes = body_bytes
        self.table: RouteTable | None = None
        self.closing = False
        self.in_hand = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._account, _tell_errors], client_max_size=self._body_bytes)
        app.on_response_prepare.append(_hide_versions)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        if self.closing:
            return web.Response(status=503, text="shutting down\n")
        if self.table is None:
            return web.Response(status=503, text="no routes yet: waiting for the operator\n")
        return web.Response(text="ready\n")

    async def _models(self, request: web.Request) -> web.Response:
        key = await self._keys.identify(request.headers.get("Authorization"))
        cards = [_card(name, service.namespace) for name, service in self._routes().names(key)]
        return web.json_response({"object": "list", "data": cards})

    async def _model(self, request: web.Request) -> web.Response:
        key = await self._keys.identify(request.headers.get("Authorization"))
        name = request.match_info["model"]
        service = self._routes().resolve(key, name)
        return web.json_response(_card(name, service.namespace))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        key = await self._keys.identify(request.headers.get("Authorization"))
        document, model, stream = understand(await _body(request))
        service = self._routes().resolve(key, model)
        request[_SERVICE] = f"{service.namespace}/{service.name}"
        request[_KEY_ID] = key.key_id
        if self.closing:
            raise Unavailable("The gateway is restarting. Try again.", retry_after_s=1)
        call = Call(
            path=request.path,
            request_id=request[_ID],
            document=document,
            stream=stream,
            arrived=request[_ARRIVED],
        )
        return await self._relay.answer(request, call, service, key)

    def _routes(self) -> RouteTable:
        if self.table is None:
            raise Unavailable("The gateway does not know any model yet. Try again shortly.", retry_after_s=5)
        return self.table

    @web.middleware
    async def _account(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give the request an id, count it, log one line about it."""
        if not request.path.startswith("/v1/"):
            return await handler(request)
        request[_ID] = f"req-{uuid.uuid4().hex}"
        request[_ARRIVED] = started = time.monotonic()
        self.in_hand += 1
        self.idle.clear()
        code = 499
        try:
            response = await handler(request)
            code = response.status
            if not response.prepared:
                response.headers["X-Request-Id"] = request[_ID]
            return response
        finally:
            self.in_hand -= 1
            if not self.in_hand:
                self.idle.set()
            self._metrics.requests.labels(str(code)).inc()
            log.info(
                "request",
                extra={
                    "requestId": request[_ID],
                    "path": request.path if request.match_info.http_exception is None else "unknown",
                    "status": code,
                    "seconds": round(time.monotonic() - started, 4),
                    "service": request.get(_SERVICE),
                    "keyId": request.get(_KEY_ID),
                },
            )


async def _hide_versions(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "busbar"


async def _body(request: web.Request) -> bytes:
    """The whole body, which must arrive in reasonable time."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise BadRequest(f"The request's body did not arrive within {BODY_S:.0f} s.") from error


def understand(data: bytes) -> tuple[dict[str, Any], str, bool]:
    """(document, model, stream) of a request's body; raises BadRequest saying which field is wrong."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest("The body is not JSON.") from error
    if not isinstance(document, dict):
        raise BadRequest("The body must be a JSON object.")
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("`model` must name a model; GET /v1/models lists them.", param="model")
    stream = document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("`stream` must be true or false.", param="stream")
    return document, model, bool(stream)


def _card(name: str, namespace: str) -> dict[str, object]:
    # `created` is required by OpenAI clients; the routes do not tell it, and 0 says so.
    return {"id": name, "object": "model", "created": 0, "owned_by": namespace}


@web.middleware
async def _tell_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as OpenAI error JSON; no internals."""
    try:
        return await handler(request)
    except ClientError as error:
        return _answer(error)
    except web.HTTPRequestEntityTooLarge:
        return _answer(TooLarge(f"The request body is larger than {request.client_max_size >> 20} MiB."))
    except web.HTTPException as error:
        plain = BadRequest(f"{request.method} {request.path}: {error.reason}.")
        return _answer(plain, status=error.status)
    except ConnectionResetError:
        return web.Response(status=499)  # the client left; nobody reads this
    except Exception:
        log.exception("unexpected", extra={"requestId": request.get(_ID)})
        return _answer(ClientError("Something went wrong in the gateway. Try again."))


def _answer(error: ClientError, status: int | None = None) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else {}
    if isinstance(error, Unavailable) and error.retry_after_s is None:
        headers["Retry-After"] = "5"
    return web.json_response(body(error), status=status or error.status, headers=headers)
