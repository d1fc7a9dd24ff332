"""Puts the parts together, starts them, and ends them in order.

Start:  spool and left-over slots → routes from disk → ports open → stream of routes, delivery of usage.
End:    lines of batches go back to the API → /ready says no, connections are still taken (`linger`) → ports close, waiting requests are turned
        away with Retry-After → running streams end (`drain`) → what is held of shared limits goes back → usage is written and delivered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from aiohttp import web

from busbar.gateway.accounts import Accounts
from busbar.gateway.admissions import AdmissionRing
from busbar.gateway.api_client import ApiClient
from busbar.gateway.batch_routes import BatchRoutes
from busbar.gateway.batch_runner import BatchRunner
from busbar.gateway.endpoint_picker import EndpointPicker, QueueLimits
from busbar.gateway.http import PublicPort, refuse
from busbar.gateway.inflight import InflightTable
from busbar.gateway.internal import Internal
from busbar.gateway.keys import KeyDirectory
from busbar.gateway.lease_keeper import LeaseKeeper
from busbar.gateway.metrics import Metrics
from busbar.gateway.proxy import Proxy
from busbar.gateway.routes import RouteTable
from busbar.gateway.routestream import RouteStream
from busbar.gateway.settings import Settings, address
from busbar.gateway.slow_clients import HeadLimit
from busbar.gateway.spool import Spool
from busbar.gateway.usage_recorder import UsageRecorder
from busbar.kube.contracts.auth import ApiServerPoster, Reviewer, ReviewError
from busbar.kube.contracts.keys import KeyIdentity
from busbar.kube.contracts.routes import Routes
from busbar.kube.http_connection import connections
from busbar.kube.token_file import TokenFile

log = logging.getLogger("busbar.gateway")

_DELIVERY_AT_END_S = 3.0


class Gateway:
    """A whole gateway. `start`, then `stop`; the addresses really bound are in `public` and `internal`."""

    def __init__(
        self, settings: Settings, *, reviewer: Reviewer | None = None, rng: random.Random | None = None
    ) -> None:
        """`rng` chooses among replicas that are equally busy."""
        self._settings = settings
        self._reviewer = reviewer
        self._rng = rng
        self._stack = AsyncExitStack()
        self._ports: list[asyncio.Server] = []
        self.public = ("", 0)
        self.internal = ("", 0)

    @property
    def revision(self) -> int | None:
        """Revision of the routes in force, None before any."""
        return self._stream.current.revision if self._stream.current else None

    async def start(self) -> None:
        """Open everything; raises SpoolError when the state folder cannot be used."""
        settings = self._settings
        control = await self._session(aiohttp.TCPConnector(limit=64))
        # A new connection per request, because an idle one may have been closed unnoticed.
        replicas = await self._session(aiohttp.TCPConnector(limit=0, force_close=True))
        api = ApiClient(control, settings.api_url, TokenFile(settings.api_token_file))
        self._metrics = Metrics()
        self._picker = EndpointPicker(_limits(settings), time.monotonic, self._rng)
        self._metrics.watch_demand(self._picker.demand)
        self._accounts = Accounts(gateways=settings.replicas)
        self._stack.callback(self._accounts.close)
        self._recorder = self._open_recorder(api)
        self._accounts.restore(
            AdmissionRing(settings.state_dir / "admissions"), self._recorder.cut_off, self._recorder.delivered
        )
        self._leases = self._keep_leases(api)
        keys = KeyDirectory(
            lambda digest: self._look_up(api, digest),
            fresh_s=settings.key_cache_s,
            stale_s=settings.key_stale_s,
            negative_s=settings.key_negative_s,
            entries=settings.key_cache_entries,
        )
        proxy = Proxy(
            settings, replicas, self._picker, self._recorder, self._accounts, self._leases, self._metrics
        )
        self._stack.push_async_callback(proxy.stop)
        self._contacts = proxy.contacts
        self._public_port = PublicPort(
            keys, proxy, BatchRoutes(keys, api), self._metrics, settings.request_body_mib << 20
        )
        self._batches = BatchRunner(
            api,
            keys,
            proxy,
            lambda: self._public_port.table,
            self._recorder.gateway_id,
            most=settings.batch_lines,
            poll_s=settings.batch_poll_s,
        )
        self._stream = RouteStream(
            control,
            settings.operator_url,
            TokenFile(settings.operator_token_file),
            settings.state_dir / "routes.json",
            self._apply,
        )
        self._stream.load()
        internal = Internal(
            self._reviewer or await self._kubernetes(),
            settings.operator_subject,
            settings.metrics_subjects,
            lambda: self._picker.demand(self._contacts.of),
            self._accounts.tenants,
            self._metrics,
            self._refresh,
        )
        self._recorder.start()
        if self._leases is not None:
            self._leases.start()
        self.public = await self._listen(self._public_port.app(), settings.public_address)
        self.internal = await self._listen(internal.app(), settings.internal_address)
        self._following = asyncio.create_task(self._stream.run())
        self._batches.start()
        log.info("started", extra={"public": self.public, "internal": self.internal})

    async def stop(self) -> None:
        """Shut down in the order above. Returns when the process may exit."""
        settings = self._settings
        self._public_port.closing = True
        await self._batches.stop()
        await asyncio.sleep(settings.linger_s)
        self._ports[0].close()
        self._picker.close()
        try:
            async with asyncio.timeout(settings.drain_s):
                await self._public_port.idle.wait()
        except TimeoutError:
            log.warning("requests_cut_off", extra={"requests": self._public_port.in_hand})
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        if self._leases is not None:
            await self._leases.stop()
        await self._stack.aclose()
        log.info("stopped")

    async def _kubernetes(self) -> Reviewer:
        """Asks the cluster this runs in; outside of one no caller can be verified, so all are refused."""
        try:
            poster = ApiServerPoster.in_cluster(os.environ)
        except (KeyError, OSError) as error:
            log.warning("no_cluster", extra={"error": repr(error), "effect": "/demand is closed"})
            return Reviewer(_no_cluster)
        return Reviewer(await self._stack.enter_async_context(poster))

    def _open_recorder(self, api: ApiClient) -> UsageRecorder:
        settings = self._settings
        spool = Spool(
            settings.state_dir / "usage",
            segment_bytes=settings.spool_segment_mib << 20,
            limit_bytes=settings.spool_limit_mib << 20,
        )
        inflight = InflightTable(settings.state_dir / "usage" / "running", 2 * settings.max_requests)
        recorder = UsageRecorder(
            spool,
            inflight,
            api.deliver,
            self._accounts,
            batch=settings.usage_batch,
            running_limit=settings.max_requests,
            retry_max_s=settings.usage_retry_max_s,
            commit_s=settings.usage_commit_s,
            delivery_s=settings.usage_delivery_s,
        )
        self._stack.push_async_callback(recorder.stop, _DELIVERY_AT_END_S)
        return recorder

    def _keep_leases(self, api: ApiClient) -> LeaseKeeper | None:
        """None: this gateway is alone, and the limits are its own."""
        if self._accounts.shared is None:
            return None
        return LeaseKeeper(
            self._accounts.shared,
            api.renew,
            lambda: self._recorder.gateway_id,
            self._settings.replicas,
            self._settings.state_dir / "processes",
        )

    async def _look_up(self, api: ApiClient, digest: str) -> KeyIdentity | None:
        gateway_id = self._recorder.gateway_id
        key = await api.lookup(digest, gateway_id)
        if key is not None:
            self._accounts.learn(key, gateway_id)
        return key

    async def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return await self._stack.enter_async_context(session)

    async def _listen(self, app: web.Application, where: str) -> tuple[str, int]:
        host, port = address(where)
        limit = HeadLimit(self._settings.header_timeout_s)
        app.middlewares.insert(0, limit.middleware)
        # Cancelling the handler when its client leaves is what stops the work at the replica.
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        connection = connections(runner, refuse, keepalive_timeout=self._settings.idle_timeout_s)
        listening = await limit.listen(connection, host, port)
        self._stack.callback(listening.close)
        self._ports.append(listening)
        bound: tuple[str, int] = listening.sockets[0].getsockname()[:2]
        return bound

    def _apply(self, document: Routes) -> None:
        self._public_port.table = RouteTable(document)
        self._picker.update(self._public_port.table)
        self._contacts.keep({each.url for service in document.services for each in service.endpoints})

    def _refresh(self) -> None:
        metrics = self._metrics
        metrics.in_hand.set(self._public_port.in_hand)
        metrics.undelivered.set(self._recorder.undelivered)
        metrics.oldest_usage.set(self._recorder.oldest_s)
        metrics.spool_bytes.set(self._recorder.spool_bytes)
        metrics.routes_connected.set(self._stream.connected)
        metrics.leases_renewed.set(self._leases is None or not self._leases.away)
        metrics.services.set(len(self._public_port.table or ()))


async def _no_cluster(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    raise ReviewError("this gateway runs outside of a cluster and cannot check tokens")


def _limits(settings: Settings) -> QueueLimits:
    return QueueLimits(
        hold_timeout_s=settings.hold_timeout_s,
        hold_limit=settings.hold_limit,
        hold_limit_per_user=settings.hold_limit_per_user,
        replica_in_flight=settings.replica_in_flight,
        suspect_s=settings.suspect_s,
        suspect_max_s=settings.suspect_max_s,
    )
