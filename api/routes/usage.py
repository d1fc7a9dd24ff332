"""REST for usage and for deleted jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, services_of
from busbar.api.errors import Invalid
from busbar.api.records.usage_export import Group
from busbar.api.records.usage_files import csv_of, focus_of
from busbar.api.records.usage_ledger import By
from busbar.api.routes import schemas
from busbar.api.routes.schemas import errors
from busbar.kube.resources import TRAINING_JOBS

Anyone = Annotated[Caller, Depends(AnyCaller())]
DEFAULT_RANGE = timedelta(days=30)


def _not_a_number(text: object) -> object:
    """Pydantic would take a number for seconds since 1970, which the description does not say."""
    try:
        float(str(text))
    except ValueError:
        return text
    raise ValueError("write the time out, for example 2026-01-31T00:00:00Z")


Time = Annotated[datetime, BeforeValidator(_not_a_number)]


def router() -> APIRouter:
    """Usage and history."""
    routes = APIRouter(tags=["Usage"])
    _totals(routes)
    _export(routes)
    _history(routes)
    return routes


def _totals(routes: APIRouter) -> None:
    @routes.get(
        "/usage",
        operation_id="readUsage",
        response_model=schemas.UsageTotals,
        responses=errors(401, 403, 422, 503),
    )
    async def usage(
        request: Request,
        caller: Anyone,
        by: Annotated[By, Query(description="What a row is of.")] = By.TENANT,
        since: Annotated[Time | None, Query(description="Default: 30 days ago.")] = None,
        until: Annotated[Time | None, Query(description="Default: now.")] = None,
    ) -> schemas.UsageTotals:
        services = services_of(request)
        start, end = time_range(since, until, services.clock())
        found = await services.usage.report(caller, by, start, end)
        return schemas.UsageTotals.model_validate(found)


def _export(routes: APIRouter) -> None:
    @routes.get(
        "/usage/export",
        operation_id="exportUsage",
        summary="Use by tenant, namespace, user, job or service, as JSON, CSV or FOCUS 1.2",
        description="Members see their own tenants'; by user, they see themselves, and admins of a tenant everybody in "
        "it. FOCUS has a row for each object and day, whatever `by` says, and needs a currency.",
        response_model=schemas.UsageExport,
        responses={
            200: {"content": {"text/csv": {"schema": {"type": "string"}}}, "description": "The export."},
            **errors(401, 403, 422, 503),
        },
    )
    async def export(
        request: Request,
        caller: Anyone,
        by: Annotated[Group, Query(description="What a row is of.")] = Group.TENANT,
        since: Annotated[Time | None, Query(description="Default: 30 days ago.")] = None,
        until: Annotated[Time | None, Query(description="Default: now.")] = None,
        format: Annotated[Literal["json", "csv", "focus"], Query(description="Of the answer.")] = "json",
        currency: Annotated[
            str | None, Query(pattern="^[A-Z]{3}$", description="Of the pools' prices, for FOCUS: EUR, USD.")
        ] = None,
    ) -> Response:
        services = services_of(request)
        start, end = time_range(since, until, services.clock())
        if format == "focus":
            if currency is None:
                raise Invalid(
                    "FOCUS needs the currency of the pools' prices, for example EUR", field="currency"
                )
            text = focus_of(await services.usage.days(caller, start, end), currency)
            return _file(text, "busbar-focus-1.2.csv")
        lines = await services.usage.lines(caller, by, start, end)
        if format == "csv":
            return _file(csv_of(by, lines), f"busbar-usage-by-{by.value}.csv")
        found = {"by": by.value, "since": start, "until": end, "items": lines}
        return JSONResponse(schemas.UsageExport.model_validate(found).model_dump(mode="json", by_alias=True))


def _history(routes: APIRouter) -> None:
    @routes.get(
        "/history",
        operation_id="listPastJobs",
        summary="Objects that were deleted, newest first",
        response_model=schemas.PastJobList,
        responses=errors(401, 403, 422, 503),
    )
    async def history(
        request: Request,
        caller: Anyone,
        limit: Annotated[int, Query(ge=1, le=500, description="At most so many, the newest.")] = 100,
    ) -> schemas.PastJobList:
        services = services_of(request)
        reach = await services.authorizer.reach(caller, TRAINING_JOBS)
        rows = await services.history.past(None if reach.everything else reach.namespaces, limit)
        return schemas.PastJobList.model_validate({"items": [dict(row) for row in rows]})


def _file(text: str, name: str) -> Response:
    return Response(
        text,
        media_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


def time_range(since: datetime | None, until: datetime | None, now: datetime) -> tuple[datetime, datetime]:
    """The range that was asked for, in UTC.

    Raises:
        Invalid: a time without a zone or out of bounds, or an end before the beginning.
    """
    for name, value in (("since", since), ("until", until)):
        if value is not None and value.tzinfo is None:
            raise Invalid(f"{name} needs a time zone, for example 2026-01-31T00:00:00Z", field=name)
        if value is not None and not 1970 <= value.year <= 9000:
            raise Invalid(f"{name} must lie between the years 1970 and 9000", field=name)
    end = (until or now).astimezone(UTC)
    start = end - DEFAULT_RANGE if since is None else since.astimezone(UTC)
    if start >= end:
        raise Invalid("since must be before until", field="since")
    return start, end
