"""The power page: every feed with its draw against its budget, now and over time, its nodes as a heat map, and what
happened to it."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, services_of
from busbar.api.errors import NotFound, Unavailable
from busbar.api.portal.power_curves import Curve, Span, curve
from busbar.api.portal.power_views import feed_views
from busbar.api.portal.render import frame, html, is_fragment
from busbar.kube.contracts.power_view import FeedPower

CURVES = 24
"""Of so many feeds, the first by name, the page has curves."""
EVENTS = 20
"""The newest that it shows."""


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/power")
    async def power(
        request: Request,
        caller: Annotated[Caller, Depends(AnyCaller())],
        span: Annotated[Span, Query()] = Span.QUARTER,
    ) -> Response:
        views = services_of(request).power
        context: dict[str, Any] = {
            "feeds": [],
            "curves": {},
            "problem": "",
            "span": span,
            "spans": list(Span),
            "events": [],
        }

        async def curve_of(feed: FeedPower) -> tuple[str, Curve | None]:
            try:
                found = await views.series(caller, feed.name, "", span.resolution)
            except NotFound:  # deleted in between
                return feed.name, None
            drawn = curve(feed.name, found.watts, feed.budget_watts, span, found.leased, found.forecast)
            return feed.name, drawn

        try:
            feeds = await views.feeds(caller)
            context["feeds"] = feed_views(feeds, await views.nodes(caller))
            context["curves"] = dict(await asyncio.gather(*map(curve_of, feeds[:CURVES])))
            context["events"] = (await views.events(caller))[:EVENTS]
        except Unavailable as error:
            context["problem"] = error.message
        if is_fragment(request):
            return html("power_list.html", context)
        return html("power.html", {**await frame(request, caller, "power"), **context})

    return routes
