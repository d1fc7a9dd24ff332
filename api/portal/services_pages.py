"""Pages of model services: the list, and one service with its load, try-it box, scale, adapters, and what a load would need."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Form, Query, Request
from fastapi.responses import RedirectResponse, Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, InNamespace, services_of
from busbar.api.errors import ApiError, Invalid
from busbar.api.kubernetes.client import Object
from busbar.api.portal import object_pages, service_load, try_it
from busbar.api.portal.drafts import positive_or_none, whole_or_none
from busbar.api.portal.render import frame, html, is_fragment
from busbar.api.portal.service_views import service_view
from busbar.kube.contracts.service_plan import MOST_RATE, ServicePlanAnswer, ServicePlanRequest
from busbar.kube.contracts.service_series import SeriesSpan
from busbar.kube.resources import MODEL_SERVICES
from busbar.kube.types import ModelService

Reader = Annotated[Caller, Depends(InNamespace("get", MODEL_SERVICES))]
Writer = Annotated[Caller, Depends(InNamespace("patch", MODEL_SERVICES))]
LONGEST_MS = 3_600_000.0
"""Of a latency target, as in the CRD."""
Words = Annotated[str, Query(max_length=20)]
"""A number as somebody typed it."""


def router() -> APIRouter:
    routes = APIRouter()
    _reading(routes)
    _planning(routes)
    _changing(routes)
    _adapting(routes)
    routes.include_router(service_load.router())
    routes.include_router(try_it.router())
    routes.include_router(object_pages.router(MODEL_SERVICES, "services"))
    return routes


def _reading(routes: APIRouter) -> None:
    @routes.get("/services")
    async def listing(request: Request, caller: Annotated[Caller, Depends(AnyCaller())]) -> Response:
        services = services_of(request)
        now = services.clock()
        views = [service_view(obj, now) for obj in await services.objects.listing(caller, ModelService)]
        if is_fragment(request):
            return html("services_list.html", {"services": views})
        return html("services.html", {**await frame(request, caller, "services"), "services": views})

    @routes.get("/services/{namespace}/{name}")
    async def one(
        request: Request,
        namespace: str,
        name: str,
        caller: Reader,
        span: Annotated[SeriesSpan, Query()] = SeriesSpan.HOUR,
    ) -> Response:
        services = services_of(request)
        obj = await services.objects.get(caller, ModelService, namespace, name)
        view = service_view(obj, services.clock())
        if is_fragment(request):
            return html("service_status.html", {"service": view})
        return await _page(request, caller, obj, span=span)


async def _page(request: Request, caller: Caller, obj: ModelService, **more: object) -> Response:
    """A service's whole page."""
    services = services_of(request)
    context = {
        "service": service_view(obj, services.clock()),
        "asked_adapters": try_it.usable_adapters(obj, services.tenancy),
        "gateway": services.settings.shown_gateway_url,
        "span": SeriesSpan.HOUR,
        **await object_pages.of_object(request, caller, MODEL_SERVICES, obj),
        **more,
    }
    return html("service.html", {**await frame(request, caller, "services"), **context})


def _planning(routes: APIRouter) -> None:
    @routes.get("/services/{namespace}/{name}/plan")
    async def plan(
        request: Request,
        namespace: str,
        name: str,
        caller: Reader,
        rate: Words = "",
        ttft: Words = "",
        tpot: Words = "",
    ) -> Response:
        obj = await services_of(request).objects.get(caller, ModelService, namespace, name)
        asked = {"rate": rate, "ttft": ttft, "tpot": tpot}
        answer: dict[str, Any] = {"problem": None, "plan": None}
        try:
            answer["plan"] = await _plan(request, caller, namespace, name, asked)
        except ApiError as error:
            answer["problem"] = error
        if is_fragment(request):
            return html("service_plan.html", answer)
        return await _page(request, caller, obj, asked=asked, **answer)


async def _plan(
    request: Request, caller: Caller, namespace: str, name: str, asked: dict[str, str]
) -> ServicePlanAnswer:
    """The cheapest mix for a load, as the form has it."""
    rate = positive_or_none(asked["rate"], "requests per second", MOST_RATE)
    if rate is None:
        raise Invalid("how many?", field="requests per second")
    question = ServicePlanRequest(
        namespace=namespace,
        name=name,
        rate=rate,
        ttft_milliseconds=positive_or_none(asked["ttft"], "first token", LONGEST_MS, least=1.0),
        tpot_milliseconds=positive_or_none(asked["tpot"], "later tokens", LONGEST_MS, least=1.0),
    )
    return await services_of(request).previews.service_plan(caller, question)


def _changing(routes: APIRouter) -> None:
    @routes.post("/services/{namespace}/{name}/scale")
    async def scale(
        request: Request,
        namespace: str,
        name: str,
        caller: Writer,
        replicas: Annotated[str, Form(max_length=6)] = "",
    ) -> Response:
        count = whole_or_none(replicas, "replicas", "the autoscaler")
        await services_of(request).objects.scale(caller, namespace, name, count)
        return RedirectResponse(f"/services/{namespace}/{name}", status_code=303)


def _adapting(routes: APIRouter) -> None:
    @routes.post("/services/{namespace}/{name}/adapters")
    async def load(
        request: Request,
        namespace: str,
        name: str,
        caller: Writer,
        adapter: Annotated[str, Form(max_length=63)],
        uri: Annotated[str, Form(max_length=512)],
        tenants: Annotated[str, Form(max_length=4096)] = "",
    ) -> Response:
        only = [each for each in tenants.replace(",", " ").split() if each]
        row: Object = {"name": adapter.strip(), "uri": uri.strip(), **({"tenants": only} if only else {})}
        return await _changed(request, caller, namespace, name, adapter.strip(), [row])

    @routes.post("/services/{namespace}/{name}/adapters/{adapter}/unload")
    async def unload(request: Request, namespace: str, name: str, caller: Writer, adapter: str) -> Response:
        return await _changed(request, caller, namespace, name, adapter, [])


async def _changed(
    request: Request, caller: Caller, namespace: str, name: str, adapter: str, rows: list[Object]
) -> Response:
    """The service's page, once `rows` are in place of the adapter's.

    Raises:
        Conflict: somebody else changed the service meanwhile.
    """
    objects = services_of(request).objects
    found = await objects.get(caller, ModelService, namespace, name)
    others = [each for each in found.spec.adapters or () if each.name != adapter]
    former = next((each for each in found.spec.adapters or () if each.name == adapter), None)
    if former is not None and former.price is not None:
        rows = [row | {"price": former.price.model_dump(mode="json", by_alias=True)} for row in rows]
    wanted = [*(each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in others), *rows]
    version = {"resourceVersion": found.metadata.resource_version}
    await objects.change(
        caller, MODEL_SERVICES, namespace, name, {"spec": {"adapters": wanted or None}, "metadata": version}
    )
    return RedirectResponse(f"/services/{namespace}/{name}", status_code=303)
