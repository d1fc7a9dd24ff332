"""The internal port: /demand for the operator, /metrics for Prometheus, /health.

Any pod of the cluster may reach this port, so every caller needs a token: /demand is for the
operator alone, and /metrics names services only to callers with an allowed token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime

from aiohttp import web

from busbar.gateway.metrics import Metrics
from busbar.kube.contracts.auth import AUDIENCE_GATEWAY, Reviewer, ReviewError
from busbar.kube.contracts.demand import AccountUse, Demand, ServiceDemand


class Internal:
    """Handlers of the internal port."""

    def __init__(
        self,
        reviewer: Reviewer,
        operator_subject: str,
        metrics_subjects: Collection[str],
        demand: Callable[[], list[ServiceDemand]],
        accounts: Callable[[], list[AccountUse]],
        metrics: Metrics,
        refresh: Callable[[], None],
    ) -> None:
        self._reviewer = reviewer
        self._operator_subject = operator_subject
        self._metrics_subjects = frozenset(metrics_subjects) | {operator_subject}
        self._demand = demand
        self._accounts = accounts
        self._metrics = metrics
        self._refresh = refresh
        self._started = time.monotonic()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1024)
        app.router.add_get("/health", self._health)
        app.router.add_get("/demand", self._get_demand)
        app.router.add_get("/metrics", self._get_metrics)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _get_demand(self, request: web.Request) -> web.Response:
        subject = await self._subject(request)
        if subject is None:
            raise web.HTTPUnauthorized(text="a token with this gateway's audience is required\n")
        if subject != self._operator_subject:
            raise web.HTTPForbidden(text=f"{subject} may not read demand; only the operator may\n")
        demand = Demand(
            services=self._demand(),
            accounts=self._accounts(),
            as_of=datetime.now(UTC),
            counted_seconds=round(time.monotonic() - self._started, 3),
        )
        return web.json_response(text=demand.model_dump_json(by_alias=True))

    async def _get_metrics(self, request: web.Request) -> web.Response:
        self._refresh()
        detailed = (
            "Authorization" in request.headers and await self._subject(request) in self._metrics_subjects
        )
        return web.Response(
            body=self._metrics.text(per_service=detailed),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _subject(self, request: web.Request) -> str | None:
        try:
            caller = await self._reviewer.authenticate_header(
                request.headers.get("Authorization"), AUDIENCE_GATEWAY
            )
        except ReviewError as error:
            raise web.HTTPServiceUnavailable(text=f"{error}\n", headers={"Retry-After": "5"}) from error
        return caller.username if caller else None
