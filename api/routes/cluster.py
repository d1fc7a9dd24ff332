"""REST for the caller, the overview, pools, profiles, nodes, tenants, models and changes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response, StreamingResponse

from busbar.api.access.authorization import Reach
from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, authenticate, services_of
from busbar.api.errors import TooMany
from busbar.api.routes import schemas
from busbar.api.routes.body import many
from busbar.api.routes.schemas import errors
from busbar.kube.resources import TRAINING_JOBS

Anyone = Annotated[Caller, Depends(AnyCaller())]
_READ = errors(401, 403, 503)


def router() -> APIRouter:
    """All of them."""
    routes = APIRouter()
    _callers(routes)
    _cluster(routes)
    _models(routes)
    _changes(routes)
    return routes


def _callers(routes: APIRouter) -> None:
    @routes.get("/me", operation_id="me", tags=["Callers"], response_model=schemas.Me, responses=_READ)
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


def _cluster(routes: APIRouter) -> None:
    @routes.get(
        "/overview",
        operation_id="readOverview",
        tags=["Cluster"],
        summary="What runs, what waits and why, who holds what, what it costs per hour",
        response_model=schemas.OverviewInfo,
        responses=_READ,
    )
    async def overview(request: Request, caller: Anyone) -> schemas.OverviewInfo:
        return schemas.OverviewInfo.model_validate(await services_of(request).overviews.overview(caller))

    @routes.get(
        "/pools", operation_id="listPools", tags=["Cluster"], response_model=schemas.PoolList, responses=_READ
    )
    async def pools(request: Request, caller: Anyone) -> Response:
        return many(await services_of(request).cluster.pools(caller))

    @routes.get(
        "/profiles",
        operation_id="listProfiles",
        tags=["Cluster"],
        response_model=schemas.ProfileList,
        responses=_READ,
    )
    async def profiles(request: Request, caller: Anyone) -> Response:
        return many(await services_of(request).cluster.profiles(caller))

    @routes.get(
        "/nodes", operation_id="listNodes", tags=["Cluster"], response_model=schemas.NodeList, responses=_READ
    )
    async def nodes(request: Request, caller: Anyone) -> schemas.NodeList:
        found = await services_of(request).cluster.nodes(caller)
        return schemas.NodeList.model_validate({"items": found})

    @routes.get(
        "/tenants",
        operation_id="listTenants",
        tags=["Cluster"],
        response_model=schemas.TenantList,
        responses=_READ,
    )
    async def tenants(request: Request, caller: Anyone) -> Response:
        return many(await services_of(request).cluster.tenants(caller))


def _models(routes: APIRouter) -> None:
    @routes.get(
        "/models",
        operation_id="listModels",
        tags=["Cluster"],
        response_model=schemas.ModelList,
        responses=_READ,
    )
    async def models(request: Request, caller: Anyone) -> schemas.ModelList:
        services = services_of(request)
        found = await services.cluster.models(caller)
        return schemas.ModelList.model_validate(
            {"items": found, "base_url": services.settings.shown_gateway_url + "/v1"}
        )


def _changes(routes: APIRouter) -> None:
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
        if services.change_stream.full(caller.subject):
            raise TooMany("too many open event streams; poll instead", retry_after_s=10)

        async def look() -> Reach:
            known = await authenticate(request, again=True)
            return await services.authorizer.reach(known, TRAINING_JOBS)

        reach = await services.authorizer.reach(caller, TRAINING_JOBS)
        return StreamingResponse(
            services.change_stream.stream(caller.subject, reach, look),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
