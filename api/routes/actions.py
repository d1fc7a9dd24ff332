"""REST: actions on an object: cancel, resume, scale."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import InNamespace, services_of
from busbar.api.routes import schemas
from busbar.api.routes.body import ModelRoute, one
from busbar.api.routes.schemas import errors
from busbar.api.routes.served import Served
from busbar.kube.resources import MODEL_SERVICES
from busbar.kube.types import ModelService

_ERRORS = (401, 403, 404, 409, 422, 429, 503)


def router(of: Served) -> APIRouter:
    """Cancel and resume."""
    routes = of.routes()

    @routes.post(
        f"{of.one}/cancel",
        operation_id=f"cancel{of.kind}",
        summary="Suspend: save the state, give everything back, keep the object and its output",
        response_model=of.model,
        responses=errors(*_ERRORS),
    )
    async def cancel(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, of.may("patch")]
    ) -> Response:
        return one(await services_of(request).objects.suspend(caller, of.resource, namespace, name, True))

    @routes.post(
        f"{of.one}/resume",
        operation_id=f"resume{of.kind}",
        summary="Undo a cancel: queue again and continue from the last checkpoint",
        response_model=of.model,
        responses=errors(*_ERRORS),
    )
    async def resume(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, of.may("patch")]
    ) -> Response:
        return one(await services_of(request).objects.suspend(caller, of.resource, namespace, name, False))

    return routes


def scale() -> APIRouter:
    """The scale route, which only ModelServices have."""
    routes = APIRouter(tags=["ModelServices"], route_class=ModelRoute)

    @routes.put(
        "/namespaces/{namespace}/modelservices/{name}/scale",
        operation_id="scaleModelService",
        summary="Set the replica count, or give it back to the autoscaler",
        response_model=ModelService,
        responses=errors(400, 413, *_ERRORS),
    )
    async def scale(
        request: Request,
        namespace: str,
        name: str,
        body: schemas.ScaleTo,
        caller: Annotated[Caller, Depends(InNamespace("patch", MODEL_SERVICES))],
    ) -> Response:
        return one(await services_of(request).objects.scale(caller, namespace, name, body.replicas))

    return routes
