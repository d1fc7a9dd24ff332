"""The pools page: every pool with its nodes as a heat map."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, services_of
from busbar.api.errors import Unavailable
from busbar.api.portal.pool_views import pool_view, profile_view, tenant_view
from busbar.api.portal.render import frame, html, is_fragment
from busbar.kube.contracts.preview import NodeLoad


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/pools")
    async def pools(request: Request, caller: Annotated[Caller, Depends(AnyCaller())]) -> Response:
        services = services_of(request)
        found = await services.cluster.pools(caller)
        loads: list[NodeLoad] = []
        problem = ""
        try:
            loads = await services.cluster.nodes(caller)
        except Unavailable as error:
            problem = error.message
        context: dict[str, Any] = {
            "pools": [pool_view(pool, loads) for pool in found],
            "problem": problem,
            "profiles": [
                view for p in await services.cluster.profiles(caller) if (view := profile_view(p)).rows
            ],
            "tenants": [tenant_view(t) for t in await services.cluster.tenants(caller)],
        }
        if is_fragment(request):
            return html("pools_list.html", context)
        return html("pools.html", {**await frame(request, caller, "pools"), **context})

    return routes
