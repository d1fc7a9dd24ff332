"""REST: one object of a kind: read, change, delete."""

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import services_of
from busbar.api.routes.body import Body, one, takes
from busbar.api.routes.schemas import errors
from busbar.api.routes.served import Served


def router(of: Served) -> APIRouter:
    """Get, change, delete."""
    routes = of.routes()

    @routes.get(
        of.one,
        operation_id=f"get{of.kind}",
        summary=f"One {of.kind}",
        response_model=of.model,
        responses=errors(401, 403, 404, 503),
    )
    async def get(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, of.may("get")]
    ) -> Response:
        return one(await services_of(request).objects.get(caller, of.model, namespace, name))

    @routes.patch(
        of.one,
        operation_id=f"change{of.kind}",
        summary="Change the spec, labels or annotations (JSON merge patch)",
        response_model=of.model,
        responses=errors(400, 401, 403, 404, 409, 413, 422, 429, 503),
        openapi_extra=takes((), "A merge patch with `spec`, `metadata.labels` or `metadata.annotations`."),
    )
    async def change(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, of.may("patch")], body: Body
    ) -> Response:
        return one(await services_of(request).objects.change(caller, of.resource, namespace, name, body))

    @routes.delete(
        of.one,
        operation_id=f"delete{of.kind}",
        summary=f"Delete a {of.kind}; its pods follow, its output stays unless it says otherwise",
        status_code=204,
        responses=errors(401, 403, 404, 429, 503),
        response_class=Response,
    )
    async def delete(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, of.may("delete")]
    ) -> Response:
        await services_of(request).objects.delete(caller, of.resource, namespace, name)
        return Response(status_code=204)

    return routes
