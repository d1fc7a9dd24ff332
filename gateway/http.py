"""The public port: the OpenAI routes, /tokenize and /detokenize, /health and /ready.

Every answer is JSON that an OpenAI client understands, errors too. A handler identifies the key (`keys`), parses the
request (this module), finds the service (`routes`), and then forwards the request (`proxy`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from busbar.gateway import responses
from busbar.gateway.batch_routes import BatchRoutes
from busbar.gateway.delivery import Call
from busbar.gateway.documents import object_of
from busbar.gateway.errors import (
    BadRequest,
    ClientError,
    MethodNotAllowed,
    TooLarge,
    Unavailable,
    UnknownRoute,
    body,
)
from busbar.gateway.keys import KeyDirectory
from busbar.gateway.load_counts import Progress
from busbar.gateway.metrics import Metrics
from busbar.gateway.proxy import Proxy
from busbar.gateway.routes import RouteTable, adapters_for
from busbar.kube.contracts.routes import ServiceRoute
from busbar.kube.documents import shown
from busbar.kube.http_connection import body_problem

log = logging.getLogger("busbar.gateway.requests")
_ID = web.RequestKey("id", str)
_ARRIVED = web.RequestKey("arrived", float)
_SERVICE = web.RequestKey("service", str)
_KEY_ID = web.RequestKey("key_id", str)
BODY_S = 60.0
MODEL_PATHS = (
    *("/v1/completions", "/v1/chat/completions", responses.PATH, "/v1/embeddings"),
    *("/tokenize", "/detokenize"),
)
"""What goes on to a replica, found by the body's `model`."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PublicPort:
    """Handlers of the public port."""

    def __init__(
        self, keys: KeyDirectory, proxy: Proxy, batches: BatchRoutes, metrics: Metrics, body_bytes: int
    ) -> None:
        self._keys = keys
        self._proxy = proxy
        self._batches = batches
        self._metrics = metrics
        self._body_bytes = body_bytes
        self.table: RouteTable | None = None
        self.closing = False
        self.in_hand = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._account, _tell_errors])
        app.on_response_prepare.append(_hide_versions)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        for path in MODEL_PATHS:
            app.router.add_post(path, self._complete)
        self._batches.add_to(app.router)
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
        cards = []
        for name, service in self._routes().names(key):
            cards.append(_card(name, service))
            served = [each.name for each in adapters_for(service, key) if each.problem is None]
            cards += [_card(f"{name}:{each}", service, parent=name) for each in served]
        return web.json_response({"object": "list", "data": cards})

    async def _model(self, request: web.Request) -> web.Response:
        key = await self._keys.identify(request.headers.get("Authorization"))
        name = request.match_info["model"]
        target = self._routes().resolve(key, name)
        parent = name.removesuffix(f":{target.adapter}") if target.adapter else None
        return web.json_response(_card(name, target.service, parent))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        key = await self._keys.identify(request.headers.get("Authorization"))
        document, model, stream = understand(await _body(request, self._body_bytes))
        if request.path == responses.PATH:
            responses.check(document)
        target = self._routes().resolve(key, model)
        service = target.service
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
            tenant=key.tenant,
            key_id=key.key_id,
            weight=terms.weight if (terms := service.terms_of(key.tenant)) else 1.0,
            adapter=target.adapter,
            progress=Progress(stream),
        )
        return await self._proxy.answer(request, call, service, key)

    def _routes(self) -> RouteTable:
        if self.table is None:
            raise Unavailable("The gateway does not know any model yet. Try again shortly.", retry_after_s=5)
        return self.table

    @web.middleware
    async def _account(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give the request an id, count it, log one line about it."""
        if not request.path.startswith("/v1/") and request.path not in MODEL_PATHS:
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


async def _body(request: web.Request, limit: int) -> bytes:
    """The whole body, which must arrive in reasonable time. Raises TooLarge, before it is read where its size is told."""
    told = request.content_length
    if told is not None and told > limit:
        raise _too_large(f"{told:,}", limit)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.content.iter_any():
                data += piece
                if len(data) > limit:
                    raise _too_large(f"more than {limit:,}", limit)
    except TimeoutError as error:
        raise BadRequest(f"The request's body did not arrive within {BODY_S:.0f} s.") from error
    return bytes(data)


def _too_large(size: str, limit: int) -> TooLarge:
    return TooLarge(
        f"The request's body has {size} bytes; at most {limit:,} ({limit >> 20} MiB) are taken. Make it shorter."
    )


def understand(data: bytes) -> tuple[dict[str, Any], str, bool]:
    """(document, model, stream) of a request's body; raises BadRequest saying which field is wrong."""
    document = object_of(data)
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("`model` must name a model; GET /v1/models lists them.", param="model")
    stream = document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("`stream` must be true or false.", param="stream")
    return document, model, bool(stream)


def _card(name: str, service: ServiceRoute, parent: str | None = None) -> dict[str, object]:
    # `created` is required by OpenAI clients; the routes do not tell it, and 0 says so.
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": service.namespace,
        "max_model_len": service.max_model_len,
        **({} if parent is None else {"parent": parent}),
    }


@web.middleware
async def _tell_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as OpenAI error JSON; no internals."""
    try:
        if (
            len(request.headers.getall("Authorization", ())) > 1
        ):  # a proxy in front may have checked another one
            raise BadRequest("There are several Authorization headers; send the one with the key.")
        return await handler(request)
    except ClientError as error:
        return _answer(error)
    except web.HTTPNotFound:
        return _answer(UnknownRoute(f"There is no {shown(request.path)} here."))
    except web.HTTPMethodNotAllowed as error:
        answer = _answer(MethodNotAllowed(f"{request.path} does not take {shown(request.method)}."))
        answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except web.HTTPException as error:
        plain = BadRequest(f"{shown(request.path)}: {error.reason}.")
        return _answer(plain, status=error.status)
    except web.RequestPayloadError as error:
        answer = refuse(BadRequest.status, body_problem(error))
        answer.force_close()  # where the next request begins is not known
        return answer
    except ConnectionResetError:
        return web.Response(status=499)  # the client left; nobody reads this
    except RecursionError:
        return _answer(BadRequest("The body is nested too deeply."))
    except Exception:
        log.exception("unexpected", extra={"requestId": request.get(_ID)})
        return _answer(ClientError("Something went wrong in the gateway. Try again."))


def refuse(status: int, problem: str) -> web.Response:
    """The answer to what is not a request; `problem` is a sentence without capital and full stop."""
    answer = _answer(BadRequest(f"{problem[0].upper()}{problem[1:]}."), status)
    answer.headers["Server"] = "busbar"
    return answer


def _answer(error: ClientError, status: int | None = None) -> web.Response:
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unavailable) and error.retry_after_s is None:
        headers["Retry-After"] = "5"
    return web.json_response(body(error), status=status or error.status, headers=headers)
