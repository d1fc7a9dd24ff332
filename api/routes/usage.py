"""REST for usage and for deleted jobs."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, services_of
from busbar.api.errors import Invalid
from busbar.api.records.usage_ledger import By
from busbar.api.routes import schemas
from busbar.api.routes.schemas import errors
from busbar.kube.resources import TRAINING_JOBS

Anyone = Annotated[Caller, Depends(AnyCaller())]
DEFAULT_RANGE = timedelta(days=30)


def router() -> APIRouter:
    """Usage and history."""
    routes = APIRouter(tags=["Usage"])

    @routes.get(
        "/usage",
        operation_id="readUsage",
        response_model=schemas.UsageTotals,
        responses=errors(401, 403, 422, 503),
    )
    async def usage(
        request: Request,
        caller: Anyone,
        by: By = By.TENANT,
        since: Annotated[datetime | None, Query(description="Default: 30 days ago.")] = None,
        until: Annotated[datetime | None, Query(description="Default: now.")] = None,
    ) -> schemas.UsageTotals:
        services = services_of(request)
        start, end = time_range(since, until, services.clock())
        found = await services.usage.report(caller, by, start, end)
        return schemas.UsageTotals.model_validate(found)

    @routes.get(
        "/history",
        operation_id="listPastJobs",
        summary="Objects that were deleted, newest first",
        response_model=schemas.PastJobList,
        responses=errors(401, 403, 422, 503),
    )
    async def history(
        request: Request, caller: Anyone, limit: Annotated[int, Query(ge=1, le=500)] = 100
    ) -> schemas.PastJobList:
        services = services_of(request)
        reach = await services.authorizer.reach(caller, TRAINING_JOBS)
        rows = await services.history.past(None if reach.everything else reach.namespaces, limit)
        return schemas.PastJobList.model_validate({"items": [dict(row) for row in rows]})

    return routes


def time_range(since: datetime | None, until: datetime | None, now: datetime) -> tuple[datetime, datetime]:
    """The range that was asked for.

    Raises:
        Invalid: a time without a zone or out of bounds, or an end before the beginning.
    """
    for name, value in (("since", since), ("until", until)):
        if value is not None and value.tzinfo is None:
            raise Invalid(f"{name} needs a time zone, for example 2026-01-31T00:00:00Z", field=name)
        if value is not None and not 1970 <= value.year <= 9000:
            raise Invalid(f"{name} must lie between the years 1970 and 9000", field=name)
    end = until or now
    start = since or end - DEFAULT_RANGE
    if start >= end:
        raise Invalid("since must be before until", field="since")
    return start, end
