"""Probes on both ports, and numbers on the internal one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from busbar.api.dependencies import Public, services_of
from busbar.api.errors import Unavailable
from busbar.api.routes.schemas import errors

Probe = Annotated[None, Depends(Public("probes carry no credentials and learn nothing"))]
Numbers = Annotated[
    None, Depends(Public("Prometheus needs no credentials here, and the numbers name nobody"))
]


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


def numbers() -> APIRouter:
    """`/metrics`, for Prometheus."""
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics(request: Request, _: Numbers) -> Response:
        return Response(services_of(request).database.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes
