"""The pools page: every pool with its nodes as a heat map."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from busbar.api.cluster import NodeLoad
from busbar.api.errors import Unavailable
from busbar.api.identity import Caller
from busbar.api.permissions import Known, services_of
from busbar.api.portal.pool_views import pool_view, profile_view
from busbar.api.portal.render import frame, html, is_fragment
from busbar.api.portal.words import number


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/pools")
    async def pools(request: Request, caller: Annotated[Caller, Depends(Known())]) -> Response:
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
            "tenants": [_tenant(t) for t in await services.cluster.tenants(caller)],
        }
        if is_fragment(request):
            return html("pools_list.html", context)
        return html("pools.html", {**await frame(request, caller, "pools"), **context})

    return routes


def _tenant(tenant: dict[str, Any]) -> dict[str, Any]:
    spec, status = tenant.get("spec") or {}, tenant.get("status") or {}
    held = {str(row.get("accelerator")): row.get("count") for row in _rows(status.get("allocated"))}
    kinds = sorted({*held, *(str(q.get("accelerator")) for q in spec.get("quota") or [])})
    quotas = {str(q.get("accelerator")): q for q in spec.get("quota") or []}
    return {
        "name": tenant["metadata"]["name"],
        "title": spec.get("displayName") or tenant["metadata"]["name"],
        "weight": number(spec.get("weight", 1), 2),
        "running": status.get("running"),
        "waiting": status.get("waiting"),
        "rows": [
            {
                "accelerator": "any" if kind == "*" else kind,
                "held": number(held.get(kind) or 0, 1),
                "guaranteed": number(quotas.get(kind, {}).get("guaranteed", 0), 1),
                "ceiling": number(quotas.get(kind, {}).get("ceiling"), 1) or "none",
            }
            for kind in kinds
        ],
    }


def _rows(allocated: Any) -> list[dict[str, Any]]:
    """Held accelerators, whether the status carries a list of rows or a mapping."""
    if isinstance(allocated, dict):
        return [{"accelerator": key, "count": value} for key, value in sorted(allocated.items())]
    return list(allocated or [])
