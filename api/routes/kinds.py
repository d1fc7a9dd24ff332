"""REST for our two namespaced kinds: the same routes for TrainingJobs and ModelServices."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from busbar.api.identity import Caller
from busbar.api.permissions import InNamespace, Known, read_pod_log, services_of
from busbar.api.routes import schemas
from busbar.api.routes.body import Body, raw, takes
from busbar.api.routes.schemas import errors
from busbar.kube.resources import EVENTS, MODEL_SERVICES, TRAINING_JOBS, Resource
from busbar.kube.types import ModelService, TrainingJob
from busbar.kube.types.meta import Resource as Kind


def router() -> APIRouter:
    """Both kinds."""
    both = APIRouter()
    both.include_router(_routes(TRAINING_JOBS, TrainingJob, schemas.TrainingJobList))
    both.include_router(_routes(MODEL_SERVICES, ModelService, schemas.ModelServiceList))
    both.include_router(_scale())
    both.include_router(_preview())
    return both


def _routes(resource: Resource, model: type[Kind], many: type[schemas.Answer]) -> APIRouter:
    kind = resource.kind
    routes = APIRouter(tags=[f"{kind}s"])
    base = f"/namespaces/{{namespace}}/{resource.plural}"
    one = f"{base}/{{name}}"

    def may(verb: str) -> Any:
        return Depends(InNamespace(verb, resource))

    @routes.get(
        f"/{resource.plural}",
        operation_id=f"listAll{kind}s",
        summary=f"Every {kind} the caller may see",
        response_model=many,
        responses=errors(401, 403, 503),
    )
    async def list_all(request: Request, caller: Annotated[Caller, Depends(Known())]) -> JSONResponse:
        return raw({"items": await services_of(request).objects.listing(caller, resource)})

    @routes.get(
        base,
        operation_id=f"list{kind}s",
        summary=f"The {kind}s of a namespace",
        response_model=many,
        responses=errors(401, 403, 404, 503),
    )
    async def list_some(
        request: Request, namespace: str, caller: Annotated[Caller, may("list")]
    ) -> JSONResponse:
        return raw({"items": await services_of(request).objects.listing(caller, resource, namespace)})

    @routes.post(
        base,
        operation_id=f"create{kind}",
        summary=f"Create a {kind}",
        status_code=201,
        response_model=model,
        responses=errors(400, 401, 403, 404, 409, 413, 422, 429, 503),
        openapi_extra=takes(kind, "The object as kubectl would apply it: metadata and spec."),
    )
    async def create(
        request: Request, namespace: str, caller: Annotated[Caller, may("create")], body: Body
    ) -> JSONResponse:
        return raw(await services_of(request).objects.create(caller, resource, namespace, body), 201)

    @routes.get(
        one,
        operation_id=f"get{kind}",
        summary=f"One {kind}",
        response_model=model,
        responses=errors(401, 403, 404, 503),
    )
    async def get(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, may("get")]
    ) -> JSONResponse:
        return raw(await services_of(request).objects.get(caller, resource, namespace, name))

    @routes.patch(
        one,
        operation_id=f"change{kind}",
        summary="Change the spec, labels or annotations (JSON merge patch)",
        response_model=model,
        responses=errors(400, 401, 403, 404, 409, 413, 422, 429, 503),
        openapi_extra=takes("", "A merge patch with `spec`, `metadata.labels` or `metadata.annotations`."),
    )
    async def change(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, may("patch")], body: Body
    ) -> JSONResponse:
        return raw(await services_of(request).objects.change(caller, resource, namespace, name, body))

    @routes.delete(
        one,
        operation_id=f"delete{kind}",
        summary=f"Delete a {kind}; its pods follow, its output stays unless it says otherwise",
        status_code=204,
        responses=errors(401, 403, 404, 429, 503),
        response_class=Response,
    )
    async def delete(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, may("delete")]
    ) -> Response:
        await services_of(request).objects.delete(caller, resource, namespace, name)
        return Response(status_code=204)

    @routes.post(
        f"{one}/cancel",
        operation_id=f"cancel{kind}",
        summary="Suspend: save the state, give everything back, keep the object and its output",
        response_model=model,
        responses=errors(401, 403, 404, 409, 422, 429, 503),
    )
    async def cancel(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, may("patch")]
    ) -> JSONResponse:
        return raw(await services_of(request).objects.suspend(caller, resource, namespace, name, True))

    @routes.post(
        f"{one}/resume",
        operation_id=f"resume{kind}",
        summary="Undo a cancel: queue again and continue from the last checkpoint",
        response_model=model,
        responses=errors(401, 403, 404, 409, 422, 429, 503),
    )
    async def resume(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, may("patch")]
    ) -> JSONResponse:
        return raw(await services_of(request).objects.suspend(caller, resource, namespace, name, False))

    @routes.get(
        f"{one}/logs",
        operation_id=f"read{kind}Logs",
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
        caller: Annotated[Caller, Depends(read_pod_log(resource))],
        follow: Annotated[bool, Query(description="Go on until the container ends.")] = False,
        rank: Annotated[int, Query(ge=0, le=4096)] = 0,
        tail: Annotated[int | None, Query(ge=1, le=100_000, description="Only the last lines.")] = None,
        attempt: Annotated[int | None, Query(ge=0, description="Default: the newest with pods.")] = None,
    ) -> StreamingResponse:
        stream = await services_of(request).pods.logs(
            caller, resource, namespace, name, rank=rank, follow=follow, tail=tail, attempt=attempt
        )
        return StreamingResponse(stream, media_type="text/plain; charset=utf-8")

    @routes.get(
        f"{one}/events",
        operation_id=f"list{kind}Events",
        summary="Kubernetes events of the object and its pods",
        response_model=schemas.EventList,
        responses=errors(401, 403, 404, 503),
    )
    async def events(
        request: Request,
        namespace: str,
        name: str,
        caller: Annotated[Caller, Depends(InNamespace("list", EVENTS, of=resource))],
    ) -> JSONResponse:
        return raw({"items": await services_of(request).pods.events(caller, resource, namespace, name)})

    @routes.get(
        f"{one}/pods",
        operation_id=f"list{kind}Pods",
        summary="The object's pods by attempt and rank",
        response_model=schemas.PodList,
        responses=errors(401, 403, 404, 503),
    )
    async def pods(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, may("get")]
    ) -> schemas.PodList:
        found = await services_of(request).pods.ranks(caller, resource, namespace, name)
        return schemas.PodList.model_validate({"items": found})

    @routes.get(
        f"{one}/samples",
        operation_id=f"list{kind}Samples",
        summary="Loss and throughput (or ready replicas) over time",
        response_model=schemas.SampleList,
        responses=errors(401, 403, 404, 503),
    )
    async def samples(
        request: Request, namespace: str, name: str, caller: Annotated[Caller, may("get")]
    ) -> schemas.SampleList:
        services = services_of(request)
        found = await services.objects.get(caller, resource, namespace, name)
        curve = await services.history.curve(found["metadata"]["uid"])
        return schemas.SampleList.model_validate({"items": [dict(row) for row in curve]})

    return routes


def _scale() -> APIRouter:
    routes = APIRouter(tags=["ModelServices"])

    @routes.put(
        "/namespaces/{namespace}/modelservices/{name}/scale",
        operation_id="scaleModelService",
        summary="Set the replica count, or give it back to the autoscaler",
        response_model=ModelService,
        responses=errors(401, 403, 404, 409, 422, 429, 503),
    )
    async def scale(
        request: Request,
        namespace: str,
        name: str,
        body: schemas.ScaleTo,
        caller: Annotated[Caller, Depends(InNamespace("patch", MODEL_SERVICES))],
    ) -> JSONResponse:
        return raw(await services_of(request).objects.scale(caller, namespace, name, body.replicas))

    return routes


def _preview() -> APIRouter:
    routes = APIRouter(tags=["Preview"])

    @routes.post(
        "/namespaces/{namespace}/preview",
        operation_id="preview",
        summary="Where a draft would run, when, in which mode, at what cost, or exactly why not",
        response_model=schemas.PreviewInfo,
        responses=errors(400, 401, 403, 404, 409, 413, 422, 429, 503),
        openapi_extra={
            "requestBody": {
                "required": True,
                "description": "A TrainingJob or ModelService that does not exist yet; `kind` says which.",
                "content": {
                    "application/json": {
                        "schema": {
                            "oneOf": [
                                {"$ref": "#/components/schemas/TrainingJob"},
                                {"$ref": "#/components/schemas/ModelService"},
                            ]
                        }
                    }
                },
            }
        },
    )
    async def preview(
        request: Request,
        namespace: str,
        caller: Annotated[Caller, Depends(InNamespace("create", TRAINING_JOBS))],
        body: Body,
    ) -> schemas.PreviewInfo:
        resource = MODEL_SERVICES if body.get("kind") == MODEL_SERVICES.kind else TRAINING_JOBS
        found = await services_of(request).previews.preview(caller, resource, namespace, body)
        return schemas.PreviewInfo.model_validate(found)

    return routes
