"""REST for what feeds and nodes draw."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, services_of
from busbar.api.routes import power_schemas as schemas
from busbar.api.routes.schemas import EventList, errors
from busbar.kube.contracts.power_view import Resolution

Anyone = Annotated[Caller, Depends(AnyCaller())]
Name = Annotated[str, Query(max_length=253)]
_READ = errors(401, 403, 503)


def router() -> APIRouter:
    """All of them."""
    routes = APIRouter(tags=["Power"])

    @routes.get(
        "/power/domains",
        operation_id="listPowerDomains",
        summary="Budget, draw and headroom of each feed",
        response_model=schemas.FeedPowerList,
        responses=_READ,
    )
    async def domains(request: Request, caller: Anyone) -> schemas.FeedPowerList:
        found = await services_of(request).power.feeds(caller)
        return schemas.FeedPowerList.model_validate({"items": found})

    @routes.get(
        "/power/nodes",
        operation_id="listPowerNodes",
        summary="Draw of each node, and where the numbers come from",
        response_model=schemas.NodePowerList,
        responses=_READ,
    )
    async def nodes(request: Request, caller: Anyone) -> schemas.NodePowerList:
        found = await services_of(request).power.nodes(caller)
        return schemas.NodePowerList.model_validate({"items": found})

    @routes.get(
        "/power/events",
        operation_id="listPowerEvents",
        summary="What happened to power domains, newest first; for admins, and empty for everybody else",
        response_model=EventList,
        responses=_READ,
    )
    async def events(request: Request, caller: Anyone) -> EventList:
        return EventList.model_validate({"items": await services_of(request).power.events(caller)})

    @routes.get(
        "/power/series",
        operation_id="readPowerSeries",
        summary="Means of one domain or of one node: of seconds over 15 minutes, or of minutes over a day",
        response_model=schemas.PowerSeriesInfo,
        responses=errors(401, 403, 404, 422, 503),
    )
    async def series(
        request: Request,
        caller: Anyone,
        domain: Annotated[Name, Query(description="Its name, where no node is named.")] = "",
        node: Annotated[Name, Query(description="Its name, where no domain is named.")] = "",
        resolution: Annotated[
            Resolution, Query(description="Seconds over 15 minutes, or minutes over a day.")
        ] = Resolution.SECOND,
    ) -> schemas.PowerSeriesInfo:
        found = await services_of(request).power.series(caller, domain, node, resolution)
        return schemas.PowerSeriesInfo(
            name=found.name,
            resolution=found.resolution,
            period_seconds=found.resolution.period_s,
            watts=list(found.watts),
            leased_watts=list(found.leased),
            forecast_watts=list(found.forecast),
        )

    return routes
