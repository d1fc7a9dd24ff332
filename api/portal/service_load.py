"""The part of a service's page that shows its load and its replicas over time."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import InNamespace, services_of
from busbar.api.errors import Unavailable
from busbar.api.portal.render import html
from busbar.api.portal.service_charts import Chart, charts
from busbar.kube.contracts.service_series import SeriesSpan
from busbar.kube.resources import MODEL_SERVICES
from busbar.kube.types import ModelService


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/services/{namespace}/{name}/load")
    async def load(
        request: Request,
        namespace: str,
        name: str,
        caller: Annotated[Caller, Depends(InNamespace("get", MODEL_SERVICES))],
        span: Annotated[SeriesSpan, Query()] = SeriesSpan.HOUR,
    ) -> Response:
        services = services_of(request)
        found = await services.objects.get(caller, ModelService, namespace, name)
        made: list[Chart] = []
        problem = ""
        try:
            series = await services.service_loads.series(caller, namespace, name, span)
            made = charts(series, found.spec.slo)
        except Unavailable as error:
            problem = error.message
        href = f"/services/{namespace}/{name}"
        return html(
            "service_load.html",
            {"charts": made, "problem": problem, "span": span, "spans": list(SeriesSpan), "href": href},
        )

    return routes
