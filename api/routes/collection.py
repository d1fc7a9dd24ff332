"""REST: the lists of a kind, and making an object."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, services_of
from busbar.api.routes.body import Body, many, one, takes
from busbar.api.routes.schemas import errors
from busbar.api.routes.served import Served


def router(of: Served) -> APIRouter:
    """List everywhere, list in a namespace, create."""
    routes = of.routes()

    @routes.get(
        of.everywhere,
        operation_id=f"listAll{of.kind}s",
        summary=f"Every {of.kind} the caller may see",
        response_model=of.many,
        responses=errors(401, 403, 503),
    )
    async def list_all(request: Request, caller: Annotated[Caller, Depends(AnyCaller())]) -> Response:
        return many(await services_of(request).objects.listing(caller, of.model))

    @routes.get(
        of.collection,
        operation_id=f"list{of.kind}s",
        summary=f"The {of.kind}s of a namespace",
        response_model=of.many,
        responses=errors(401, 403, 404, 503),
    )
    async def list_some(
        request: Request, namespace: str, caller: Annotated[Caller, of.may("list")]
    ) -> Response:
        return many(await services_of(request).objects.listing(caller, of.model, namespace))

    @routes.post(
        of.collection,
        operation_id=f"create{of.kind}",
        summary=f"Create a {of.kind}",
        status_code=201,
        response_model=of.model,
        responses=errors(400, 401, 403, 404, 409, 413, 422, 429, 503),
        openapi_extra=takes((of.kind,), "The object as kubectl would apply it: metadata and spec."),
    )
    async def create(
        request: Request, namespace: str, caller: Annotated[Caller, of.may("create")], body: Body
    ) -> Response:
        return one(await services_of(request).objects.create(caller, of.resource, namespace, body), 201)

    return routes
