"""The routes of a replica that are about its engine: answered in the engine's process, on a socket that only the front knows.

    GET  /metrics /v1/models /v1/models/{id} /is_sleeping
    POST /sleep /wake_up /kv_shares /adapters /v1/load_lora_adapter /v1/unload_lora_adapter
    POST /migrate /migrate/begin /migrate/blocks /migrate/commit /migrate/abort

The front has checked the caller's bearer. It passes each of these on as it comes (`server.py`).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from busbar.kube.contracts.workload import MIGRATE_PATH, ServingStatus
from busbar.workloads.serving.adapter_route import AdapterRoute
from busbar.workloads.serving.admission import Standing, refusal_of
from busbar.workloads.serving.engine import Engine
from busbar.workloads.serving.errors import Busy, EngineFailed, RequestError, Unauthorized
from busbar.workloads.serving.http_request import answer_to, read_json, refusal
from busbar.workloads.serving.kv_shares import KvShareRoute
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.migrate_in import Arrivals
from busbar.workloads.serving.migrate_out import Departures
from busbar.workloads.serving.report import phase_steps, table_report, tenant_blocks
from busbar.workloads.serving.served_models import LOAD_PATH, UNLOAD_PATH, ServedModels
from busbar.workloads.serving.settings import ServerSettings
from busbar.workloads.serving.sleep_routes import SleepRoutes

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SECRET_HEADER = "x-busbar-front"
STALLED_PASSES = 4
"""Times that weights are streamed in full: a step that takes longer is assumed to hang."""


class EngineRoutes:
    """Those of one engine, and what they have in common with its commands."""

    def __init__(self, settings: ServerSettings, engine: Engine, secret: str) -> None:
        """Only requests with the `secret` are answered."""
        self.settings = settings
        self.engine = engine
        self.draining = False
        self.models = ServedModels(settings, engine, int(time.time()))
        name = uuid.uuid4().hex
        self.departures = Departures(engine, name, settings, self._count_migration)
        self.arrivals = Arrivals(engine, name, settings.model_id, self.models, self._taking)
        self._secret = secret
        self._kv_shares = KvShareRoute(engine, settings)
        self._adapters = AdapterRoute(engine, settings.spec_adapters, self.models)
        self._leaving: asyncio.Task[None] | None = None
        self._left_before = 0, 0
        """Streams that had left when the drain began, with their blocks and without."""

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self.settings.max_body_bytes, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get("/v1/models", self.list_models),
                web.get("/v1/models/{id:.+}", self.model),
                web.post(LOAD_PATH, self.load_adapter),
                web.post(UNLOAD_PATH, self.unload_adapter),
                web.post(MIGRATE_PATH, self.departures.migrate),
                *SleepRoutes(self.engine, self._check_quiet).routes(),
                *self._kv_shares.routes(),
                *self._adapters.routes(),
                *self.arrivals.routes(),
            ]
        )
        app.on_cleanup.extend((self._stop_leaving, self._adapters.stop))
        return app

    def start_drain(self) -> None:
        self.draining = True
        self._left_before = self.departures.copied, self.departures.recomputed

    @property
    def left(self) -> tuple[int, int]:
        """(streams that have left with their blocks, without) since the drain began, or the start."""
        copied, recomputed = self._left_before
        return self.departures.copied - copied, self.departures.recomputed - recomputed

    def leave(self, peers: list[str]) -> None:
        """Streams move to the peers; also those that can move only later."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self.departures.leave(peers))

    def status(self) -> ServingStatus:
        """What the operator reads of the engine."""
        loaded = self.engine.loaded
        status = ServingStatus(
            model_id=self.settings.model_id,
            role=self.settings.role,
            running=max(self.engine.running, self.departures.leaving_now),
            waiting=self.engine.waiting,
            restarted=self.settings.restarted,
        )
        if loaded is None:
            return status
        core = loaded.core
        return self._adapters.told(self._kv_shares.told(status)).model_copy(
            update={
                "kv_blocks_total": core.scheduler.pool.total,
                "kv_blocks_free": core.scheduler.pool.free,
                "kv_tenants": tenant_blocks(core.scheduler),
                "requests_total": core.requests_total,
                "tokens_total": core.tally.tokens_total,
                "adapters": self.models.reports(loaded),
                "saturated": core.saturated,
                "sleep_level": int(self.engine.sleep_level),
                "phase_seconds": core.phase_seconds,
                "phase_steps": phase_steps(core.speed),
                "report": table_report(loaded, self.settings),
            }
        )

    @property
    def stall_s(self) -> float:
        """A step that takes longer is assumed to hang; longer where streamed weights make every step long."""
        loaded = self.engine.loaded
        if loaded is None or loaded.streaming is None:
            return self.settings.stall_s
        return max(self.settings.stall_s, STALLED_PASSES * loaded.streaming.pass_s)

    # -- handlers -----------------------------------------------------------------------------

    async def metrics(self, request: web.Request) -> web.Response:
        core = self._loaded().core
        self.models.tell_metrics(core, time.time())
        core.metrics.sleeping(self.engine.sleep_level)
        core.metrics.restarted(self.settings.restarted)
        core.metrics.phases(core.phase_seconds.model_dump())
        text = core.metrics.render()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models.cards()})

    async def model(self, request: web.Request) -> web.Response:
        return web.json_response(self.models.card(self.models.adapter_name(request.match_info["id"])))

    async def load_adapter(self, request: web.Request) -> web.Response:
        if self.engine.sleep_level:
            raise self.engine.unavailable()
        return web.json_response(await self.models.load(await read_json(request)))

    async def unload_adapter(self, request: web.Request) -> web.Response:
        return web.json_response(await self.models.unload(await read_json(request)))

    # -- inside -------------------------------------------------------------------------------

    def _check_quiet(self) -> None:
        """Raises Busy where the replica may not sleep; the front knows of requests that the engine does not have yet."""
        if self.draining:
            raise Busy("this replica is draining, and ends")
        if self.arrivals.open:
            raise Busy(f"{self.arrivals.open} streams are on their way here, or have just come")

    def _taking(self) -> Loaded:
        """The model, where streams from elsewhere are taken. Raises Overloaded."""
        engine = self.engine
        stalled_s = self.stall_s if engine.step_seconds > self.stall_s else None
        standing = Standing(engine.state, self.draining, stalled_s, engine.waiting, self.settings.max_waiting)
        if (found := refusal_of(standing)) is not None:
            self.count_rejected(found[0])
            raise found[1]
        return self._loaded()

    def count_rejected(self, reason: str) -> None:
        """Where requests are not taken; empty: not counted."""
        if reason and self.engine.loaded is not None:
            self.engine.loaded.core.metrics.rejected(reason)

    def _loaded(self) -> Loaded:
        if self.engine.loaded is None:
            raise self.engine.unavailable()
        return self.engine.loaded

    def _count_migration(self, outcome: str) -> None:
        if self.engine.loaded is not None:
            self.engine.loaded.core.metrics.migrated(outcome)

    async def _stop_leaving(self, _: web.Application) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        await self.departures.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every refusal becomes OpenAI's error JSON."""
        try:
            if not hmac.compare_digest(request.headers.get(SECRET_HEADER, ""), self._secret):
                raise Unauthorized("only the front of this replica is answered here")
            return await handler(request)
        except (RequestError, web.HTTPException) as error:
            return refusal(error, request, self.settings.max_body_bytes)
        except Exception:
            log.exception("a handler failed")
            return answer_to(EngineFailed("the server failed on this request; its log says why"))
