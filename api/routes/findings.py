"""REST: logs, events, pods and curves of an object."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from busbar.api.access.identity import Caller
from busbar.api.dependencies import InNamespace, authenticate, read_pod_log, services_of
from busbar.api.objects.pods import while_allowed
from busbar.api.routes import schemas
from busbar.api.routes.schemas import errors
from busbar.api.routes.served import Served
from busbar.kube.resources import EVENTS


def router(of: Served) -> APIRouter:
    """Logs; events and pods; samples."""
    routes = of.routes()
    _logs(routes, of)
    _pods(routes, of)
    _samples(routes, of)
    return routes


def _logs(routes: APIRouter, of: Served) -> None:
    @routes.get(
        f"{of.one}/logs",
        operation_id=f"read{of.kind}Logs",
        summary="The log of one rank, as text; with follow=true as it is written",
        response_class=StreamingResponse,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The log."},
            **errors(401, 403, 404, 409, 422, 503),
        },
    )
    async def logs(
        request: Request,
        namespace: str,
        name: str,
        caller: Annotated[Caller, Depends(read_pod_log(of.resource))],
        follow: Annotated[bool, Query(description="Go on until the container ends.")] = False,
        rank: Annotated[
            int, Query(ge=0, le=4096, description="Which pod of the gang, or which replica.")
        ] = 0,
        tail: Annotated[int | None, Query(ge=1, le=100_000, description="Only the last lines.")] = None,
        attempt: Annotated[
            int | None, Query(ge=0, le=2**31 - 1, description="Default: the newest with pods.")
        ] = None,
    ) -> StreamingResponse:
        pods = services_of(request).pods
        stream = await pods.logs(
            caller, of.resource, namespace, name, rank=rank, follow=follow, tail=tail, attempt=attempt
        )

        async def look() -> None:
            known = await authenticate(request, again=True)
            await pods.require_log(known, of.resource, namespace, name)

        return StreamingResponse(while_allowed(stream, look), media_type="text/plain; charset=utf-8")


def _pods(routes: APIRouter, of: Served) -> None:
    @routes.get(
        f"{of.one}/events",
        operation_id=f"list{of.kind}Events",
        summary="Kubernetes events of the object and its pods",
        response_model=schemas.EventList,
        responses=errors(401, 403, 404, 503),
    )
    async def events(
        request: Request,
        namespace: str,
        name: str,
        caller: Annotated[Caller, Depends(InNamespace("list", EVENTS, of=of.resource))],
    ) -> schemas.EventList:
        found = await services_of(request).pods.events(caller, of.resource, namespace, name)
        return schemas.EventList.model_validate({"items": found})

    @routes.get(
        f"{of.one}/pods",
        operation_id=f"list{of.kind}Pods",
        summary="The object's pods by attempt and rank",
        response_model=schemas.PodList,
        responses=errors(401, 403, 404, 503),
    )
    async def pods(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, of.may("get")]
    ) -> schemas.PodList:
        found = await services_of(request).pods.ranks(caller, of.resource, namespace, name)
        return schemas.PodList.model_validate({"items": found})


def _samples(routes: APIRouter, of: Served) -> None:
    @routes.get(
        f"{of.one}/samples",
        operation_id=f"list{of.kind}Samples",
        summary="Loss and throughput (or ready replicas) over time",
        response_model=schemas.SampleList,
        responses=errors(401, 403, 404, 503),
    )
    async def samples(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, of.may("get")]
    ) -> schemas.SampleList:
        services = services_of(request)
        found = await services.objects.get(caller, of.model, namespace, name)
        curve = await services.history.curve(found.metadata.uid)
        return schemas.SampleList.model_validate({"items": [dict(row) for row in curve]})
