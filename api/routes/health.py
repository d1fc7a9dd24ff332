"""Probes and numbers, on both ports."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse, Response

from busbar.api.errors import Unavailable
from busbar.api.permissions import Public, services_of
from busbar.api.routes.schemas import errors

Probe = Annotated[None, Depends(Public("probes carry no credentials and learn nothing"))]


def router() -> APIRouter:
    routes = APIRouter(tags=["Health"])

    @routes.get(
        "/health",
        operation_id="health",
        summary="Whether the process answers",
        response_class=PlainTextResponse,
    )
    async def health(_: Probe) -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @routes.get(
        "/ready",
        operation_id="ready",
        summary="Whether the first lists are complete",
        response_class=PlainTextResponse,
        responses=errors(503),
    )
    async def ready(request: Request, _: Probe) -> PlainTextResponse:
        if not services_of(request).store.ready:
            raise Unavailable("waiting for the first lists from Kubernetes", retry_after_s=2)
        return PlainTextResponse("ok\n")

    return routes


def description() -> APIRouter:
    """The OpenAPI description, made when somebody first asks."""
    routes = APIRouter()
    made: list[bytes] = []

    @routes.get("/api/v1alpha1/openapi.json", include_in_schema=False)
    async def openapi(
        _: Annotated[None, Depends(Public("the description is in the repository too"))],
    ) -> Response:
        if not made:
            from busbar.api.openapi import generated

            made.append(next(iter(generated().values())).encode())
        return Response(made[0], media_type="application/json")

    return routes
