"""One request and the replicas it meets: choose, forward, retry, stream, count.

Until the first byte for the client, a replica's failure is nobody's business but ours: the request goes
back to the head of the room's queue and on to another replica. A replica that *refused* (connection
refused, 503, 429) never worked on it, so that is free; a replica that *failed* while it may have been at
work counts, and after `attempts` of these the client gets a 502 (a request that kills replicas must not go
through all of them). After the first byte a failure ends the stream with an error event.

An answer that is not a stream is read whole before it is passed on, so its replica may die to the last.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from busbar.gateway import sse
from busbar.gateway.errors import BadUpstream, ClientError, Unavailable, body
from busbar.gateway.ledger import Ledger, Usage
from busbar.gateway.metrics import Metrics
from busbar.gateway.room import Lease, Room
from busbar.gateway.settings import Settings
from busbar.kube.contracts.keys import KeyIdentity
from busbar.kube.contracts.routes import ServiceRoute

log = logging.getLogger("busbar.gateway.relay")

EARLY_EVENTS = 16
"""Events without content (the role, comments) kept back at most, so that a replica's death may still be hidden."""
_REFUSING = frozenset({429, 503})
_OUR_FAULT = frozenset({401, 403})


@dataclass(frozen=True)
class Call:
    """A client's request, understood."""

    path: str
    request_id: str
    document: dict[str, Any]
    stream: bool
    arrived: float
    """Monotonic time."""

    def upstream_body(self, model_id: str, *, continuous: bool) -> bytes:
        """What the replica gets: the model's own id, and a wish for usage that we can count by."""
        document = {**self.document, "model": model_id}
        if self.stream:
            options = self.document.get("stream_options")
            options = dict(options) if isinstance(options, dict) else {}
            options["include_usage"] = True
            if continuous:
                options["continuous_usage_stats"] = True
            document["stream_options"] = options
        return json.dumps(document, separators=(",", ":")).encode()


class ReplicaFailedError(Exception):
    """This replica did not answer; nothing has been sent to the client."""

    def __init__(self, reason: str, *, refused: bool, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.refused = refused
        self.pause_s = pause_s


class Relay:
    """Forwards calls to replicas."""

    def __init__(
        self, settings: Settings, session: aiohttp.ClientSession, room: Room, ledger: Ledger, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._session = session
        self._room = room
        self._ledger = ledger
        self._metrics = metrics
        self._without_continuous: set[str] = set()
        """Services (by uid) whose engine refuses `continuous_usage_stats`."""

    async def answer(
        self, request: web.Request, call: Call, service: ServiceRoute, key: KeyIdentity
    ) -> web.StreamResponse:
        """Answer the client. Raises ClientError as long as nothing has been sent."""
        usage = self._ledger.begin(
            requestId=call.request_id,
            keyId=key.key_id,
            tenant=service.tenant,
            namespace=service.namespace,
            service=service.name,
            model=service.model_id,
        )
        code = 499  # the client left
        try:
            with self._room.visit(service):
                response = await self._try_replicas(request, call, service, key, usage)
            code = response.status
            return response
        except ClientError as error:
            code = error.status
            raise
        finally:
            usage.end()
            self._metrics.served(service, code, *usage.tokens)

    async def _try_replicas(
        self, request: web.Request, call: Call, service: ServiceRoute, key: KeyIdentity, usage: Usage
    ) -> web.StreamResponse:
        patience_s = self._settings.hold_timeout_s
        failures = 0
        again = False
        while True:
            entered = time.monotonic()
            lease = await self._room.enter(service, key.key_id, entered + patience_s, again=again)
            held = time.monotonic() - entered
            patience_s = max(0.0, patience_s - held)
            self._metrics.hold.observe(held)
            failure: ReplicaFailedError | None = None
            worked = False
            try:
                response = await self._attempt(request, call, lease, usage)
                worked = True
                return response
            except ReplicaFailedError as error:
                failure = error
            finally:
                self._room.leave(
                    lease,
                    suspect=failure is not None,
                    suspect_s=failure.pause_s if failure else None,
                    worked=worked,
                )
            log.warning(
                "replica_failed",
                extra={
                    "service": f"{service.namespace}/{service.name}",
                    "pod": lease.endpoint.pod,
                    "requestId": call.request_id,
                    "reason": failure.reason,
                },
            )
            self._metrics.retries.labels("refused" if failure.refused else "failed").inc()
            again = True
            failures += not failure.refused
            if failures >= self._settings.attempts:
                raise BadUpstream(
                    f"{failures} replicas of {service.model_id!r} failed on this request; the last: {failure.reason}."
                )
            if failure.refused and patience_s <= 0:
                raise Unavailable(f"No replica of {service.model_id!r} takes requests.", retry_after_s=10)

    async def _attempt(
        self, request: web.Request, call: Call, lease: Lease, usage: Usage
    ) -> web.StreamResponse:
        uid = lease.service.uid
        continuous = uid not in self._without_continuous
        async with self._post(call, lease, continuous=continuous) as upstream:
            if not (call.stream and continuous and upstream.status == 400):
                return await self._pass_on(request, call, upstream, usage)
            refusal = await self._read(upstream)
            if b"stream_options" not in refusal and b"continuous_usage_stats" not in refusal:
                return await self._whole(request, call, upstream, usage, refusal)
        # Not every engine knows this field. Then broken streams are counted by their pieces of text.
        async with self._post(call, lease, continuous=False) as upstream:
            if upstream.status == 200:
                self._without_continuous.add(uid)
            return await self._pass_on(request, call, upstream, usage)

    async def _pass_on(
        self, request: web.Request, call: Call, upstream: aiohttp.ClientResponse, usage: Usage
    ) -> web.StreamResponse:
        if upstream.status == 200 and call.stream and upstream.content_type == "text/event-stream":
            return await self._stream(request, call, upstream, usage)
        return await self._whole(request, call, upstream, usage, await self._read(upstream))

    @asynccontextmanager
    async def _post(
        self, call: Call, lease: Lease, *, continuous: bool
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The replica's answer, its status one that concerns the client.

        Raises ReplicaFailedError, or BadUpstream when the replica took its whole time and said nothing: another
        one would do the same.
        """
        headers = {
            "Authorization": f"Bearer {lease.service.bearer}",
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if call.stream else "application/json",
            "Accept-Encoding": "identity",
            "X-Request-Id": call.request_id,
            "X-Busbar-Request-Id": call.request_id,
        }
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self._settings.connect_timeout_s,
            sock_read=self._settings.first_byte_timeout_s,
        )
        try:
            response = await self._session.post(
                lease.endpoint.url.rstrip("/") + call.path,
                data=io.BytesIO(call.upstream_body(lease.service.model_id, continuous=continuous)),
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ReplicaFailedError("it could not be connected to", refused=True) from error
        except TimeoutError as error:
            raise BadUpstream(f"The model did not answer within {timeout.sock_read:.0f} s.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaFailedError("it closed the connection without an answer", refused=False) from error
        try:
            _check_status(response)
            yield response
        finally:
            response.close()  # for one not read to its end, this is what cancels the work upstream

    async def _read(self, upstream: aiohttp.ClientResponse) -> bytes:
        """A whole answer. Raises ReplicaFailedError or BadUpstream."""
        limit = self._settings.response_body_mib << 20
        data = bytearray()
        try:
            async for piece in upstream.content.iter_any():
                data += piece
                if len(data) > limit:
                    raise BadUpstream(f"The model server's answer is larger than {limit >> 20} MiB.")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReplicaFailedError("it broke off in its answer", refused=False) from error
        return bytes(data)

    async def _whole(
        self,
        request: web.Request,
        call: Call,
        upstream: aiohttp.ClientResponse,
        usage: Usage,
        data: bytes,
    ) -> web.StreamResponse:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ReplicaFailedError("its answer is not JSON", refused=False) from error
        headers = {"X-Request-Id": call.request_id, "Content-Length": str(len(data))}
        response = web.StreamResponse(status=upstream.status, headers=headers)
        response.content_type = "application/json"
        counted = sse.tokens(document.get("usage")) if isinstance(document, dict) else None
        if counted and upstream.status == 200:
            usage.set(*counted)
        await self._send(request, call, response, data)
        return response

    async def _stream(
        self, request: web.Request, call: Call, upstream: aiohttp.ClientResponse, usage: Usage
    ) -> web.StreamResponse:
        meter = sse.Meter(sse.Wish.of(call.document))
        early: list[bytes] = []
        response: web.StreamResponse | None = None
        problem = None
        try:
            async with aclosing(self._events(upstream, meter)) as events:
                async for event in events:
                    if response is None:
                        early.append(event)
                        if not meter.begun and len(early) < EARLY_EVENTS:
                            continue
                        event = b"".join(early)
                        response = _event_stream(call)
                    # Counted first: a client that saw a token while we died must find it on its account.
                    usage.set(meter.prompt_tokens, meter.completion_tokens)
                    await self._send(request, call, response, event)
            usage.set(meter.prompt_tokens, meter.completion_tokens)
        except ReplicaFailedError as error:
            if response is None:
                raise
            problem = error.reason
        if response is None:
            raise ReplicaFailedError("it ended the stream before the first event", refused=False)
        if problem is None and not meter.done and not meter.failed:
            problem = "it ended the stream too early"
        if problem is not None:
            self._metrics.broken.inc()
            told = BadUpstream(f"The stream broke: the replica failed in mid-answer ({problem}). Ask again.")
            await self._send(request, call, response, sse.encode(body(told)))
        async with self._patience(request):
            await response.write_eof()
        return response

    async def _events(
        self, upstream: aiohttp.ClientResponse, meter: sse.Meter
    ) -> AsyncGenerator[bytes, None]:
        """The events for the client, as soon as they are there; those that came together go together.

        Raises ReplicaFailedError.
        """
        cutter = sse.Cutter(self._settings.event_kib << 10)
        wait_s = self._settings.first_byte_timeout_s
        while not (meter.done or meter.failed):
            try:
                async with asyncio.timeout(wait_s):
                    data = await upstream.content.readany()
            except TimeoutError as error:
                raise ReplicaFailedError(f"it was silent for {wait_s:.0f} s", refused=False) from error
            except (aiohttp.ClientError, OSError) as error:
                raise ReplicaFailedError("it closed the connection", refused=False) from error
            if not data:
                return
            wait_s = self._settings.stream_idle_timeout_s
            shown, problem = _read_events(cutter, meter, data)
            if shown:
                yield shown
            if problem is not None:
                raise ReplicaFailedError(problem, refused=False)

    async def _send(
        self, request: web.Request, call: Call, response: web.StreamResponse, data: bytes
    ) -> None:
        """Write to the client."""
        async with self._patience(request):
            if not response.prepared:
                await response.prepare(request)
                self._metrics.first_byte.observe(time.monotonic() - call.arrived)
            await response.write(data)

    @asynccontextmanager
    async def _patience(self, request: web.Request) -> AsyncIterator[None]:
        """A client that does not read is cut off."""
        try:
            async with asyncio.timeout(self._settings.client_stall_s):
                yield
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from error


def _read_events(cutter: sse.Cutter, meter: sse.Meter, data: bytes) -> tuple[bytes, str | None]:
    """(what of `data` the client gets, what is wrong with the rest)."""
    shown = []
    try:
        for event in cutter.feed(data):
            part = meter.event(event)
            if part is not None:
                shown.append(part)
            if meter.done or meter.failed:
                break
    except BadUpstream as error:
        return b"".join(shown), error.message
    return b"".join(shown), None


def _event_stream(call: Call) -> web.StreamResponse:
    return web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            "X-Request-Id": call.request_id,
        }
    )


def _check_status(response: aiohttp.ClientResponse) -> None:
    status = response.status
    if status in _REFUSING:
        raise ReplicaFailedError(
            f"it answered {status}", refused=True, pause_s=_seconds(response.headers.get("Retry-After"))
        )
    if status >= 500 or status in _OUR_FAULT or not (status == 200 or status >= 400):
        raise ReplicaFailedError(f"it answered {status}", refused=False)


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isdigit() else None
