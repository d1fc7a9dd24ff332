"""Pages of model services: the list, and one service with its try-it box and scale."""

from typing import Annotated

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from busbar.api.errors import Invalid
from busbar.api.identity import Caller
from busbar.api.permissions import InNamespace, Known, services_of
from busbar.api.portal.drafts import to_yaml
from busbar.api.portal.render import frame, html, is_fragment
from busbar.api.portal.views import service_view
from busbar.kube.resources import EVENTS, MODEL_SERVICES

Reader = Annotated[Caller, Depends(InNamespace("get", MODEL_SERVICES))]
Writer = Annotated[Caller, Depends(InNamespace("patch", MODEL_SERVICES))]
Deleter = Annotated[Caller, Depends(InNamespace("delete", MODEL_SERVICES))]


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/services")
    async def listing(request: Request, caller: Annotated[Caller, Depends(Known())]) -> Response:
        services = services_of(request)
        now = services.clock()
        views = [service_view(obj, now) for obj in await services.objects.listing(caller, MODEL_SERVICES)]
        if is_fragment(request):
            return html("services_list.html", {"services": views})
        return html("services.html", {**await frame(request, caller, "services"), "services": views})

    @routes.get("/services/{namespace}/{name}")
    async def one(request: Request, namespace: str, name: str, caller: Reader) -> Response:
        services = services_of(request)
        obj = await services.objects.get(caller, MODEL_SERVICES, namespace, name)
        view = service_view(obj, services.clock())
        if is_fragment(request):
            return html("service_status.html", {"service": view})
        context = {
            "service": view,
            "gateway": services.settings.shown_gateway_url,
            "yaml": to_yaml({key: obj[key] for key in ("apiVersion", "kind", "spec") if key in obj}),
            "may_write": await services.authorizer.allowed(caller, "patch", MODEL_SERVICES, namespace),
            "api": f"/api/v1alpha1/namespaces/{namespace}/modelservices/{name}",
        }
        return html("service.html", {**await frame(request, caller, "services"), **context})

    @routes.get("/services/{namespace}/{name}/events")
    async def events(
        request: Request,
        namespace: str,
        name: str,
        caller: Annotated[Caller, Depends(InNamespace("list", EVENTS, of=MODEL_SERVICES))],
    ) -> Response:
        services = services_of(request)
        found = await services.pods.events(caller, MODEL_SERVICES, namespace, name)
        return html("events.html", {"events": found, "now": services.clock()})

    @routes.post("/services/{namespace}/{name}/complete")
    async def complete(
        request: Request,
        namespace: str,
        name: str,
        caller: Reader,
        prompt: Annotated[str, Form(max_length=10_000)],
        max_tokens: Annotated[int, Form()] = 64,
        temperature: Annotated[float, Form()] = 0.8,
    ) -> Response:
        services = services_of(request)
        await services.objects.get(caller, MODEL_SERVICES, namespace, name)
        stream = await services.completions.stream(caller, namespace, name, prompt, max_tokens, temperature)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    @routes.post("/services/{namespace}/{name}/scale")
    async def scale(
        request: Request,
        namespace: str,
        name: str,
        caller: Writer,
        replicas: Annotated[str, Form(max_length=6)] = "",
    ) -> Response:
        text = replicas.strip()
        if text and not text.isdigit():
            raise Invalid("replicas must be a whole number, or empty for the autoscaler", field="replicas")
        count = int(text) if text else None
        await services_of(request).objects.scale(caller, namespace, name, count)
        return RedirectResponse(f"/services/{namespace}/{name}", status_code=303)

    @routes.post("/services/{namespace}/{name}/cancel")
    async def cancel(request: Request, namespace: str, name: str, caller: Writer) -> Response:
        await services_of(request).objects.suspend(caller, MODEL_SERVICES, namespace, name, True)
        return RedirectResponse(f"/services/{namespace}/{name}", status_code=303)

    @routes.post("/services/{namespace}/{name}/resume")
    async def resume(request: Request, namespace: str, name: str, caller: Writer) -> Response:
        await services_of(request).objects.suspend(caller, MODEL_SERVICES, namespace, name, False)
        return RedirectResponse(f"/services/{namespace}/{name}", status_code=303)

    @routes.post("/services/{namespace}/{name}/delete")
    async def delete(request: Request, namespace: str, name: str, caller: Deleter) -> Response:
        await services_of(request).objects.delete(caller, MODEL_SERVICES, namespace, name)
        return RedirectResponse("/services", status_code=303)

    return routes
