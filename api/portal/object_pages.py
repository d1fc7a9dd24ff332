"""What the pages of jobs and of services share: events, cancel, resume, delete, and what a page shows of any object."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse, Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import InNamespace, services_of
from busbar.api.portal.drafts import to_yaml
from busbar.api.portal.render import html
from busbar.kube.resources import EVENTS, Resource
from busbar.kube.types.meta import Resource as Model


def router(resource: Resource, part: str) -> APIRouter:
    """The shared routes of a kind below `/<part>/`."""
    routes = APIRouter()
    one = f"/{part}/{{namespace}}/{{name}}"
    may_list_events = Depends(InNamespace("list", EVENTS, of=resource))
    may_write = Depends(InNamespace("patch", resource))
    may_delete = Depends(InNamespace("delete", resource))

    @routes.get(f"{one}/events")
    async def events(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, may_list_events]
    ) -> Response:
        services = services_of(request)
        found = await services.pods.events(caller, resource, namespace, name)
        return html("events.html", {"events": found, "now": services.clock()})

    @routes.post(f"{one}/cancel")
    async def cancel(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, may_write]
    ) -> Response:
        await services_of(request).objects.suspend(caller, resource, namespace, name, True)
        return RedirectResponse(f"/{part}/{namespace}/{name}", status_code=303)

    @routes.post(f"{one}/resume")
    async def resume(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, may_write]
    ) -> Response:
        await services_of(request).objects.suspend(caller, resource, namespace, name, False)
        return RedirectResponse(f"/{part}/{namespace}/{name}", status_code=303)

    @routes.post(f"{one}/delete")
    async def delete(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, may_delete]
    ) -> Response:
        await services_of(request).objects.delete(caller, resource, namespace, name)
        return RedirectResponse(f"/{part}", status_code=303)

    return routes


async def of_object(request: Request, caller: Caller, resource: Resource, obj: Model) -> dict[str, Any]:
    """What the page of one object needs beyond its view."""
    namespace, name = obj.metadata.namespace or "", obj.metadata.name
    wire = obj.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {
        "yaml": to_yaml({key: wire[key] for key in ("apiVersion", "kind", "spec") if key in wire}),
        "may_write": await services_of(request).authorizer.allowed(caller, "patch", resource, namespace),
        "api": f"/api/v1alpha1/namespaces/{namespace}/{resource.plural}/{name}",
    }
