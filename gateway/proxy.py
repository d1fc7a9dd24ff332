"""Forwards one request to replicas: choose, forward, retry, resume, stream, count.

A replica's failure is hidden from the client: the request goes back to the head of the endpoint picker's queue and
on to another replica. Before the first byte to the client it starts again from the beginning. After the first byte
another replica resumes the stream behind the last token (`delivery`); where the model server sends no token ids
(engines other than ours), the stream ends with an error event.

A replica that *refused* (connection refused, 503, 429, or it shuts down) does not count; a replica that *failed*
while it may have worked on the request counts, and after `attempts` of these the client gets a 502, or the error
event: a request that kills replicas must not go through all of them.

An answer that is not a stream is read whole before it is passed on, so its replica may fail until the last byte and
the request can still be retried.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from busbar.gateway import sse
from busbar.gateway.accounts import Accounts, Grant
from busbar.gateway.delivery import Call, Delivery
from busbar.gateway.endpoint_picker import EndpointPicker, Lease
from busbar.gateway.errors import BadRequest, BadUpstream, ClientError, LimitReached, Unavailable, body
from busbar.gateway.lease_keeper import LeaseKeeper
from busbar.gateway.metrics import Metrics
from busbar.gateway.picking import Ask
from busbar.gateway.prefix_table import blocks_of
from busbar.gateway.replicas import ReplicaFailedError, Replicas
from busbar.gateway.request_cost import Estimate, PromptRatio, estimate
from busbar.gateway.settings import Settings
from busbar.gateway.usage_recorder import Usage, UsageRecorder
from busbar.gateway.watchdog import Watch
from busbar.kube.contracts.keys import KeyIdentity
from busbar.kube.contracts.routes import ServiceRoute
from busbar.kube.contracts.streams import DIGEST_HEADER, RESUME_PATH, StreamEnd

Client = web.Request | None
"""Who gets the answer; None: nobody, `Call.keep` does."""

REFUSAL_SHOWN = 200
"""Bytes of a replica's refusal that is not JSON."""

log = logging.getLogger("busbar.gateway.proxy")


class Proxy:
    """Forwards calls to replicas."""

    def __init__(
        self,
        settings: Settings,
        session: aiohttp.ClientSession,
        picker: EndpointPicker,
        recorder: UsageRecorder,
        accounts: Accounts,
        leases: LeaseKeeper | None,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._picker = picker
        self._recorder = recorder
        self._accounts = accounts
        self._leases = leases
        self._ratio = PromptRatio()
        self._metrics = metrics
        self._without_continuous: set[str] = set()
        """Services (by uid) whose engine refuses `continuous_usage_stats`."""
        self._replicas = Replicas(settings, session)
        self._watchdog = self._replicas.watchdog
        self.contacts = self._replicas.contacts

    async def stop(self) -> None:
        await self._watchdog.stop()

    async def answer(
        self, request: Client, call: Call, service: ServiceRoute, key: KeyIdentity
    ) -> web.StreamResponse:
        """Answer the client. Raises ClientError as long as nothing has been sent."""
        asks = estimate(call.path, call.document, self._ratio.of(service.key), service.max_model_len)
        needs = self._needs(call, service, asks)  # may fail on what it reads, so before anything is held
        grant = await self._accept(call, service, key, asks)
        try:
            usage = self._recorder.begin(
                service.price_of(call.adapter),
                requestId=call.request_id,
                keyId=key.key_id,
                tenant=key.tenant,
                namespace=service.namespace,
                service=service.name,
                model=service.model_id,
            )
        except ClientError:
            grant.settle(0)
            raise
        call = replace(call, headers=grant.headers)
        moved = partial(self._picker.moved, service)
        delivery = Delivery(call, self._settings.resume_tokens, needs, moved)
        code = 499  # the client left
        try:
            with self._picker.visit(service, call.progress, batch=call.keep is not None):
                response = await self._try_replicas(request, call, service, key, usage, delivery)
            code = response.status
            return response
        except ClientError as error:
            code = error.status
            raise
        finally:
            usage.end()
            grant.settle(sum(usage.tokens))
            self._ratio.learn(service.key, asks.text_bytes, usage.tokens[0])
            if delivery.charged is not None:
                prompt, output = usage.tokens
                tokens = prompt, min(prompt, delivery.meter.cached_tokens), output
                self._picker.settle(service, _owner(key), delivery.charged, tokens)
            self._metrics.served(service, code, *usage.tokens)
            if call.keep is None:
                self._picker.ended(service, call.progress, code, *usage.tokens)

    async def _accept(self, call: Call, service: ServiceRoute, key: KeyIdentity, asks: Estimate) -> Grant:
        attempt = 0
        while True:
            try:
                return self._accounts.accept(
                    key, call.request_id, asks, service, adapter=call.adapter, again=attempt > 0
                )
            except LimitReached as error:
                attempt += 1
                if not (error.short and self._leases is not None and await self._leases.more(attempt)):
                    self._metrics.limited.labels(error.kind).inc()
                    raise

    def _needs(self, call: Call, service: ServiceRoute, asks: Estimate) -> Ask:
        """What the choice of a replica looks at."""
        several = max(service.max_replicas, len(service.endpoints)) > 1
        blocks = blocks_of(call.document, call.tenant, call.adapter) if several else ()
        batch = call.keep is not None
        return Ask(max(1, asks.prompt_tokens), asks.output_tokens, blocks, call.adapter, batch, call.stream)

    async def _try_replicas(
        self,
        request: Client,
        call: Call,
        service: ServiceRoute,
        key: KeyIdentity,
        usage: Usage,
        delivery: Delivery,
    ) -> web.StreamResponse:
        try:
            return await self._ask_around(request, call, service, key, usage, delivery)
        except ClientError as error:
            if delivery.response is None:
                raise
            self._metrics.broken.inc()
            call.progress.broken = True
            if not isinstance(error, BadUpstream):
                error = BadUpstream(
                    f"The stream broke: no other replica could go on with it. {error.message}"
                )
            with self._client(request) as client:
                last = delivery.meter.broken(body(error))
                await self._send(request, call, delivery.response, last, client)
                client.heard()
                await delivery.response.write_eof()
            return delivery.response

    async def _ask_around(
        self,
        request: Client,
        call: Call,
        service: ServiceRoute,
        key: KeyIdentity,
        usage: Usage,
        delivery: Delivery,
    ) -> web.StreamResponse:
        patience_s = self._settings.hold_timeout_s
        failures = 0
        again, moved_to = False, ""
        while True:
            entered, delivered = time.monotonic(), delivery.tokens
            lease = await self._picker.enter(
                service,
                _owner(key),
                entered + patience_s,
                ask=delivery.ask,
                again=again,
                prefer=moved_to,
            )
            call.progress.placed = True
            delivery.work, delivery.charged = lease.work, delivery.charged or lease.work.ask
            held = time.monotonic() - entered
            patience_s = max(0.0, patience_s - held)
            self._metrics.hold.observe(held)
            failure: ReplicaFailedError | None = None
            worked = False
            try:
                attempt = self._resume if delivery.begun else self._attempt
                response = await attempt(request, call, lease, usage, delivery)
                worked = True
                return response
            except ReplicaFailedError as error:
                failure = error
            finally:
                self._picker.leave(
                    lease,
                    suspect=failure is not None and not failure.moved_to,
                    suspect_s=failure.pause_s if failure else None,
                    worked=worked,
                )
            if not failure.moved_to:
                self._tell_failure(call, lease, delivery, failure)
            delivery.moved_at = time.monotonic() if failure.moved_to else None
            if delivery.begun and not delivery.resumable:
                raise BadUpstream(
                    f"The stream broke: the replica failed in mid-answer ({failure.reason}). Ask again."
                )
            if delivery.tokens > delivered:
                patience_s = self._settings.hold_timeout_s
            if not delivery.begun:
                self._metrics.retries.labels("refused" if failure.refused else "failed").inc()
            again, moved_to = True, failure.moved_to
            failures += not failure.refused
            if failures >= self._settings.attempts:
                raise BadUpstream(
                    f"{failures} replicas of {service.model_id!r} failed on this request; the last: {failure.reason}."
                )
            if failure.refused and patience_s <= 0:
                raise Unavailable(f"No replica of {service.model_id!r} takes requests.", retry_after_s=10)

    def _tell_failure(
        self, call: Call, lease: Lease, delivery: Delivery, failure: ReplicaFailedError
    ) -> None:
        log.warning(
            "replica_failed",
            extra={
                "service": lease.service.key,
                "pod": lease.endpoint.pod,
                "requestId": call.request_id,
                "reason": failure.reason,
                "delivered": delivery.tokens,
            },
        )

    async def _attempt(
        self, request: Client, call: Call, lease: Lease, usage: Usage, delivery: Delivery
    ) -> web.StreamResponse:
        """Ask a replica for the whole answer."""
        delivery.restart()
        uid, model_id = lease.service.uid, lease.service.model_id
        continuous = not call.is_response and uid not in self._without_continuous
        data = call.upstream_body(model_id, continuous=continuous, rank=lease.rank)
        async with self._replicas.post(call, lease, call.path, data) as (upstream, watch):
            if not (call.stream and continuous and upstream.status == 400):
                return await self._pass_on(request, call, upstream, watch, usage, delivery)
            refusal = await self._replicas.read(upstream, watch)
            if b"stream_options" not in refusal and b"continuous_usage_stats" not in refusal:
                return await self._whole(request, call, upstream, usage, refusal)
        # Not every engine knows this field. Then broken streams are counted by their pieces of text.
        data = call.upstream_body(model_id, continuous=False, rank=lease.rank)
        async with self._replicas.post(call, lease, call.path, data) as (upstream, watch):
            if upstream.status == 200:
                self._without_continuous.add(uid)
            return await self._pass_on(request, call, upstream, watch, usage, delivery)

    async def _resume(
        self, request: Client, call: Call, lease: Lease, usage: Usage, delivery: Delivery
    ) -> web.StreamResponse:
        """Ask a replica to go on behind what the client has. Raises BadUpstream where it cannot."""
        delivery.meter.go_on()
        data = delivery.resume_body(lease.service.model_id)
        async with self._replicas.post(call, lease, RESUME_PATH, data) as (upstream, watch):
            if upstream.status != 200:
                await self._replicas.read(upstream, watch)
                raise BadUpstream(
                    "The stream broke: the replica failed in mid-answer, and the next one could not go on with it "
                    f"(it answered {upstream.status}). Ask again."
                )
            (self._metrics.resumed if delivery.moved_at is None else self._metrics.moved).inc()
            log.info(
                "stream_resumed",
                extra={
                    "service": lease.service.key,
                    "pod": lease.endpoint.pod,
                    "requestId": call.request_id,
                    "delivered": delivery.tokens,
                },
            )
            with self._client(request) as client:
                return await self._stream(request, call, upstream, watch, client, usage, delivery)

    async def _pass_on(
        self,
        request: Client,
        call: Call,
        upstream: aiohttp.ClientResponse,
        watch: Watch,
        usage: Usage,
        delivery: Delivery,
    ) -> web.StreamResponse:
        if upstream.status == 200 and call.stream and upstream.content_type == "text/event-stream":
            delivery.begin(upstream.headers.get(DIGEST_HEADER, ""))
            with self._client(request) as client:
                return await self._stream(request, call, upstream, watch, client, usage, delivery)
        return await self._whole(request, call, upstream, usage, await self._replicas.read(upstream, watch))

    async def _whole(
        self,
        request: Client,
        call: Call,
        upstream: aiohttp.ClientResponse,
        usage: Usage,
        data: bytes,
    ) -> web.StreamResponse:
        document = _document(data)
        if document is None and upstream.status == 200:
            raise ReplicaFailedError("its answer is not a JSON object", refused=False)
        if document is None:
            document = body(_refusal(upstream.status, data))
            data = json.dumps(document).encode()
        counted = sse.tokens(document.get("usage"))
        if call.keep is not None:
            if counted and upstream.status == 200:
                usage.set(*counted)
            if not await call.keep(upstream.status, data):
                usage.set(0, 0)
            return web.Response(status=upstream.status)
        headers = {**call.headers, "X-Request-Id": call.request_id, "Content-Length": str(len(data))}
        response = web.StreamResponse(status=upstream.status, headers=headers)
        response.content_type = "application/json"
        if counted and upstream.status == 200:
            usage.set(*counted)
        with self._client(request) as client:
            await self._send(request, call, response, data, client)
        return response

    async def _stream(
        self,
        request: Client,
        call: Call,
        upstream: aiohttp.ClientResponse,
        watch: Watch,
        client: Watch,
        usage: Usage,
        delivery: Delivery,
    ) -> web.StreamResponse:
        """Pass a replica's events on to the end of the answer; those that came together go together.

        Raises ReplicaFailedError.
        """
        meter = delivery.meter
        # The last events of /v1/responses hold the whole answer, and so may be as long as one.
        whole = self._settings.response_body_mib << 20
        cutter = sse.Cutter(whole if call.is_response else self._settings.event_kib << 10)
        while not (meter.done or meter.failed):
            data = await self._next(upstream, watch)
            if not data:
                break
            shown, problem = sse.read(cutter, meter, data)
            if shown:
                if delivery.response is None:
                    shown = delivery.hold_early(shown)
                    delivery.response = _event_stream(call) if shown else None
                if delivery.response is not None:
                    delivery.goes_on()
                    # Counted first, so that a token that a client received is counted even if this process dies.
                    usage.set(meter.prompt_tokens, meter.completion_tokens, meter.cached_tokens)
                    await self._send(request, call, delivery.response, shown, client)
            if problem is not None:
                raise ReplicaFailedError(problem, refused=False)
            if meter.cut is not None:
                leaving, meter.cut = meter.cut is StreamEnd.LEAVING, None
                to, meter.moved_to = meter.moved_to, ""
                reason = "the stream moves" if to else "it shuts down" if leaving else "its engine failed"
                raise ReplicaFailedError(reason, refused=leaving, moved_to=to)
        usage.set(meter.prompt_tokens, meter.completion_tokens, meter.cached_tokens)
        if delivery.response is None:
            raise ReplicaFailedError("it ended the stream before the first event", refused=False)
        if not meter.done and not meter.failed:
            raise ReplicaFailedError("it ended the stream too early", refused=False)
        client.heard()
        await delivery.response.write_eof()
        return delivery.response

    async def _next(self, upstream: aiohttp.ClientResponse, watch: Watch) -> bytes:
        """What the replica sent since the last call, empty at its end. Raises ReplicaFailedError."""
        watch.heard()
        try:
            data = await upstream.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = watch.silence.reason if watch.silence else "it closed the connection"
            raise ReplicaFailedError(reason, refused=False, unanswered=True) from error
        watch.pause()
        if data:
            watch.limit_s = self._settings.stream_idle_timeout_s
        return data

    async def _send(
        self, request: Client, call: Call, response: web.StreamResponse, data: bytes, client: Watch
    ) -> None:
        """Write to the client."""
        client.heard()
        assert request is not None  # whoever keeps answers takes no streams
        if not response.prepared:
            await response.prepare(request)
            call.progress.first_at = now = time.monotonic()
            self._metrics.first_byte.observe(now - call.arrived)
        await response.write(data)
        client.pause()

    @contextmanager
    def _client(self, request: Client) -> Iterator[Watch]:
        """A client that does not read is cut off: watched while something is written to it."""
        with self._watchdog.watch("", self._settings.client_stall_s) as watch:
            watch.pause()
            watch.cut = lambda: _abort(request)
            try:
                yield watch
            except (ConnectionError, asyncio.CancelledError) as error:
                if watch.silence is None:
                    raise
                raise ConnectionResetError("the client stopped reading") from error


def _document(data: bytes) -> dict[str, Any] | None:
    """A replica's whole answer, None where it is not a JSON object."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _refusal(status: int, data: bytes) -> BadRequest:
    """What a replica that is well says of a wrong request, where it does not say it in JSON."""
    text = data[:REFUSAL_SHOWN].decode(errors="replace")
    return BadRequest(f"The model server refused the request with the status {status}. It said: {text!r}.")


def _owner(key: KeyIdentity) -> tuple[str, str, str]:
    return key.tenant, key.subject, key.key_id


def _abort(request: Client) -> None:
    if request is not None and request.transport is not None:
        request.transport.abort()


def _event_stream(call: Call) -> web.StreamResponse:
    return web.StreamResponse(
        headers={
            **call.headers,
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            "X-Request-Id": call.request_id,
        }
    )
