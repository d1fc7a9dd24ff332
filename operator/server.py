"""The operator's HTTP: the internal port for our own processes, and the port of metrics and probes.

Internal (8090), each call with a service-account token of audience ``busbar-operator``:

    GET  /snapshot   the snapshot that a plan would be made on now
    GET  /nodes      what each node has, and what jobs hold of it (kube.contracts.preview)
    POST /preview    what the next round would do with a draft (kube.contracts.preview)
    POST /service-plan  the cheapest replicas of a service for a stated load (kube.contracts.service_plan)
    GET  /service-series  a service's load over time, and its replicas (kube.contracts.service_series)
    GET  /power      what feeds and nodes draw; /power/series: their means (kube.contracts.power_view)
    GET  /routes     NDJSON: a whole routes document at each change, and every 15 s

Only the callers named in the settings (the API's and the gateway's service accounts) are admitted: a snapshot
contains every tenant's jobs, and the routes contain bearers. A standby answers them 503. Metrics (8093): ``/metrics``,
``/healthz``, ``/ready``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError

from busbar.kube.client import KubeClient
from busbar.kube.contracts.auth import AUDIENCE_OPERATOR, Reviewer, ReviewError
from busbar.kube.contracts.power_view import PATH as POWER_PATH
from busbar.kube.contracts.power_view import SERIES_PATH, PowerPicture, PowerSeries, Resolution
from busbar.kube.contracts.preview import NODES_PATH, PreviewAnswer, PreviewRequest
from busbar.kube.contracts.preview import PATH as PREVIEW_PATH
from busbar.kube.contracts.routes import RESEND_S, Routes
from busbar.kube.contracts.service_plan import PATH as SERVICE_PLAN_PATH
from busbar.kube.contracts.service_plan import ServicePlanAnswer, ServicePlanRequest
from busbar.kube.contracts.service_series import PATH as SERVICE_SERIES_PATH
from busbar.kube.contracts.service_series import SeriesSpan, ServiceSeries
from busbar.kube.errors import KubeError
from busbar.kube.informer import Key
from busbar.kube.types import ModelService, TrainingJob
from busbar.operator.errors import Busy, PreviewFailed
from busbar.operator.metrics import Metrics
from busbar.operator.previews.preview import loads_of
from busbar.operator.scheduling.snapshot import Draft
from busbar.operator.settings import Settings
from busbar.scheduler import Snapshot

DRAFT_LIMIT = 1024 * 1024


class Power(Protocol):
    """What is asked about power."""

    def picture(self) -> PowerPicture: ...

    def series(self, feed: str, node: str, resolution: Resolution) -> PowerSeries: ...


class RoutesFeed:
    """The current routes document, and an event that is set when it changes."""

    def __init__(self, build: Callable[[int], Routes]) -> None:
        self._build = build
        self.current: Routes | None = None  # None until every kind has been listed
        self._bell = asyncio.Event()

    def refresh(self) -> None:
        """Builds the document again; it gets a new revision only if its content changed."""
        revision = self.current.revision if self.current is not None else 0
        made = self._build(revision)
        if self.current is None or made != self.current:
            self.current = made.model_copy(update={"revision": revision + 1})
            bell, self._bell = self._bell, asyncio.Event()
            bell.set()

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next change, or after the timeout."""
        bell = self._bell
        try:
            async with asyncio.timeout(timeout_s):
                await bell.wait()
        except TimeoutError:
            return


class Server:
    """Both ports. ``start`` and ``stop``; the handlers only read."""

    def __init__(
        self,
        settings: Settings,
        client: KubeClient,
        metrics: Metrics,
        feed: RoutesFeed,
        snapshot: Callable[[], Snapshot],
        preview: Callable[[Draft, bool], Awaitable[PreviewAnswer]],
        service_plan: Callable[[ServicePlanRequest], Awaitable[ServicePlanAnswer]],
        service_series: Callable[[Key, SeriesSpan], ServiceSeries],
        power: Power,
        problems: Callable[[], list[str]],
        is_ready: Callable[[], bool],
        has_asked: Callable[[], bool],
    ) -> None:
        self._settings, self._client, self._metrics = settings, client, metrics
        self._feed, self._snapshot, self._preview = feed, snapshot, preview
        self._service_plan, self._service_series = service_plan, service_series
        self._power, self._problems, self._is_ready = power, problems, is_ready
        self._has_asked = has_asked
        self._reviewer = Reviewer(self._post)
        self._runners: list[web.AppRunner] = []
        self.ports: dict[str, int] = {}
        own = settings.namespace
        self._callers = frozenset(settings.allowed_callers) or frozenset(
            f"system:serviceaccount:{own}:{name}" for name in ("busbar-api", "busbar-gateway")
        )

    async def start(self) -> None:
        await self._serve("metrics", self._public(), self._settings.metrics_port)
        await self._serve("internal", self._internal(), self._settings.internal_port)

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()

    async def _serve(self, name: str, app: web.Application, port: int) -> None:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, self._settings.internal_host, port)
        await site.start()
        self.ports[name] = runner.addresses[0][1]

    def _public(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/ready", self._get_ready)
        return app

    def _internal(self) -> web.Application:
        app = web.Application(middlewares=[self._authenticate], client_max_size=DRAFT_LIMIT)
        app.router.add_get("/snapshot", self._get_snapshot)
        app.router.add_get(NODES_PATH, self._get_nodes)
        app.router.add_post(PREVIEW_PATH, self._post_preview)
        app.router.add_post(SERVICE_PLAN_PATH, self._post_service_plan)
        app.router.add_get(SERVICE_SERIES_PATH, self._get_service_series)
        app.router.add_get(POWER_PATH, self._get_power)
        app.router.add_get(SERIES_PATH, self._get_series)
        app.router.add_get("/routes", self._get_routes)
        return app

    # -- who asks --------------------------------------------------------------------------------------

    @web.middleware
    async def _authenticate(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            caller = await self._reviewer.authenticate_header(
                request.headers.get("Authorization"), AUDIENCE_OPERATOR
            )
        except ReviewError as error:
            return _error(503, "ReviewUnavailable", f"the caller could not be checked: {error}")
        if caller is None:
            return _error(401, "Unauthorized", f"a token of audience {AUDIENCE_OPERATOR} is needed")
        if caller.username not in self._callers:
            return _error(403, "Forbidden", f"{caller.username} may not use this port")
        return await handler(request)

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return await self._client.call("POST", path, body=dict(body))
        except KubeError as error:
            raise ReviewError(str(error)) from error

    # -- internal --------------------------------------------------------------------------------------

    async def _get_snapshot(self, request: web.Request) -> web.Response:
        if not self._is_ready():
            return _error(503, "NotReady", "the operator has not seen the whole cluster yet; try again")
        return web.json_response(self._snapshot().to_json())

    async def _get_nodes(self, request: web.Request) -> web.Response:
        if not self._is_ready():
            return _error(503, "NotReady", "the operator has not seen the whole cluster yet; try again")
        return web.json_response(loads_of(self._snapshot()).to_wire())

    async def _post_preview(self, request: web.Request) -> web.Response:
        if not self._is_ready():
            return _error(503, "NotReady", "the operator has not seen the whole cluster yet; try again")
        try:
            asked = PreviewRequest.model_validate_json(await request.read())
        except ValidationError:
            text = 'the body must be JSON: {"object": <TrainingJob or ModelService>, "admin": false}'
            return _error(400, "BadRequest", text)
        kind: type[Draft] = ModelService if asked.object.get("kind") == "ModelService" else TrainingJob
        try:
            draft = kind.model_validate(asked.object)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            return _error(422, "Invalid", first["msg"], field=where)
        try:
            return web.json_response((await self._preview(draft, asked.admin)).to_wire())
        except (Busy, PreviewFailed) as error:
            return _error(503, type(error).__name__, str(error))

    async def _post_service_plan(self, request: web.Request) -> web.Response:
        if not self._is_ready():
            return _error(503, "NotReady", "the operator has not seen the whole cluster yet; try again")
        try:
            asked = ServicePlanRequest.model_validate_json(await request.read())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            return _error(422, "Invalid", f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")
        try:
            return web.json_response((await self._service_plan(asked)).to_wire())
        except Busy as error:
            return _error(503, type(error).__name__, str(error))

    async def _get_service_series(self, request: web.Request) -> web.Response:
        if not self._is_ready():
            return _error(503, "NotReady", "the operator has not seen the whole cluster yet; try again")
        asked = request.query
        try:
            span = SeriesSpan(asked.get("span", SeriesSpan.HOUR))
        except ValueError:
            return _error(400, "BadRequest", f"span is {' or '.join(SeriesSpan)}")
        key = Key(asked.get("namespace", ""), asked.get("name", ""))
        return web.json_response(self._service_series(key, span).to_wire())

    async def _get_power(self, request: web.Request) -> web.Response:
        if not self._is_ready():
            return _error(503, "NotReady", "the operator has not seen the whole cluster yet; try again")
        return web.json_response(self._power.picture().to_wire())

    async def _get_series(self, request: web.Request) -> web.Response:
        asked = request.query
        try:
            resolution = Resolution(asked.get("resolution", Resolution.SECOND))
        except ValueError:
            return _error(400, "BadRequest", "resolution is second or minute")
        found = self._power.series(asked.get("feed", ""), asked.get("node", ""), resolution)
        return web.json_response(found.to_wire())

    async def _get_routes(self, request: web.Request) -> web.StreamResponse:
        if not self._is_ready():
            return _error(503, "NotReady", "the operator has not seen the whole cluster yet; try again")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        while True:
            current = self._feed.current
            if current is not None:
                line = json.dumps(current.to_wire(), separators=(",", ":")) + "\n"
                await response.write(line.encode())
            await self._feed.changed(RESEND_S)

    # -- metrics and probes ----------------------------------------------------------------------------

    async def _get_metrics(self, request: web.Request) -> web.Response:
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _get_health(self, request: web.Request) -> web.Response:
        problems = self._problems()
        return web.json_response({"problems": problems}, status=500 if problems else 200)

    async def _get_ready(self, request: web.Request) -> web.Response:
        # A standby is ready too, so that a rollout does not wait for the lease; the Service selects the leader's label.
        ready = self._has_asked()
        return web.json_response({"ready": ready}, status=200 if ready else 503)


def _error(status: int, code: str, message: str, **more: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": message, **more}}, status=status)
