"""REST for what is not one object: who am I, pools, nodes, tenants, models, usage, past jobs, changes."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse

from busbar.api.errors import Invalid, TooMany
from busbar.api.identity import Caller
from busbar.api.ledger import By
from busbar.api.permissions import Known, services_of
from busbar.api.routes import schemas
from busbar.api.routes.body import raw
from busbar.api.routes.schemas import errors
from busbar.api.usage import usage_for
from busbar.kube.resources import TRAINING_JOBS

Anyone = Annotated[Caller, Depends(Known())]
DEFAULT_RANGE = timedelta(days=30)


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get(
        "/me", operation_id="me", tags=["Callers"], response_model=schemas.Me, responses=errors(401, 403, 503)
    )
    async def me(request: Request, caller: Anyone) -> schemas.Me:
        services = services_of(request)
        return schemas.Me(
            subject=caller.subject,
            groups=list(caller.groups),
            admin=await services.authorizer.is_admin(caller),
            source=caller.source.value,
            scopes=sorted(caller.scopes),
            tenants=[
                schemas.MembershipInfo(tenant=m.tenant, role=m.role, namespaces=list(m.namespaces))
                for m in services.tenancy.memberships(caller)
            ],
        )

    @routes.get(
        "/pools",
        operation_id="listPools",
        tags=["Cluster"],
        response_model=schemas.PoolList,
        responses=errors(401, 403, 503),
    )
    async def pools(request: Request, caller: Anyone) -> JSONResponse:
        return raw({"items": await services_of(request).cluster.pools(caller)})

    @routes.get(
        "/nodes",
        operation_id="listNodes",
        tags=["Cluster"],
        response_model=schemas.NodeList,
        responses=errors(401, 403, 503),
    )
    async def nodes(request: Request, caller: Anyone) -> schemas.NodeList:
        found = await services_of(request).cluster.nodes(caller)
        return schemas.NodeList.model_validate({"items": found})

    @routes.get(
        "/tenants",
        operation_id="listTenants",
        tags=["Cluster"],
        response_model=schemas.TenantList,
        responses=errors(401, 403, 503),
    )
    async def tenants(request: Request, caller: Anyone) -> JSONResponse:
        return raw({"items": await services_of(request).cluster.tenants(caller)})

    @routes.get(
        "/models",
        operation_id="listModels",
        tags=["Cluster"],
        response_model=schemas.ModelList,
        responses=errors(401, 403, 503),
    )
    async def models(request: Request, caller: Anyone) -> schemas.ModelList:
        services = services_of(request)
        found = await services.cluster.models(caller)
        return schemas.ModelList.model_validate(
            {"items": found, "base_url": services.settings.shown_gateway_url + "/v1"}
        )

    @routes.get(
        "/usage",
        operation_id="readUsage",
        tags=["Usage"],
        response_model=schemas.Usage,
        responses=errors(401, 403, 422, 503),
    )
    async def usage(
        request: Request,
        caller: Anyone,
        by: By = By.TENANT,
        since: Annotated[datetime | None, Query(description="Default: 30 days ago.")] = None,
        until: Annotated[datetime | None, Query(description="Default: now.")] = None,
    ) -> schemas.Usage:
        services = services_of(request)
        for name, value in (("since", since), ("until", until)):
            if value is not None and value.tzinfo is None:
                raise Invalid(f"{name} needs a time zone, for example 2026-01-31T00:00:00Z", field=name)
        end = until or services.clock()
        start = since or end - DEFAULT_RANGE
        if start >= end:
            raise Invalid("since must be before until", field="since")
        found = await usage_for(services, caller, by, start, end)
        return schemas.Usage.model_validate(found)

    @routes.get(
        "/history",
        operation_id="listPastJobs",
        tags=["Usage"],
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

    @routes.get(
        "/changes",
        operation_id="watchChanges",
        tags=["Cluster"],
        summary="Server-sent events: `changed` whenever something the caller may see did",
        response_class=StreamingResponse,
        responses={
            200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "Events."},
            **errors(401, 403, 429, 503),
        },
    )
    async def changes(request: Request, caller: Anyone) -> StreamingResponse:
        services = services_of(request)
        if services.live.full:
            raise TooMany("too many open event streams; poll instead", retry_after_s=10)
        reach = await services.authorizer.reach(caller, TRAINING_JOBS)
        return StreamingResponse(
            services.live.stream(reach),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return routes
