"""The power page: every feed with its draw against its budget, and its nodes as a heat map."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, services_of
from busbar.api.errors import Unavailable
from busbar.api.portal.power_views import feed_views
from busbar.api.portal.render import frame, html, is_fragment


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/power")
    async def power(request: Request, caller: Annotated[Caller, Depends(AnyCaller())]) -> Response:
        views = services_of(request).power
        context: dict[str, Any] = {"feeds": [], "problem": ""}
        try:
            context["feeds"] = feed_views(await views.feeds(caller), await views.nodes(caller))
        except Unavailable as error:
            context["problem"] = error.message
        if is_fragment(request):
            return html("power_list.html", context)
        return html("power.html", {**await frame(request, caller, "power"), **context})

    return routes
