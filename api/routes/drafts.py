"""REST: what would be: the preview of a draft, and the plan of a service for a load."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from busbar.api.access.identity import Caller
from busbar.api.dependencies import InNamespace, services_of
from busbar.api.routes import schemas
from busbar.api.routes.body import Body, takes
from busbar.api.routes.schemas import errors
from busbar.kube.contracts.service_plan import Milliseconds, Percentile, Rate, ServicePlanRequest
from busbar.kube.resources import MODEL_SERVICES, TRAINING_JOBS


def router() -> APIRouter:
    """The preview."""
    routes = APIRouter(tags=["Preview"])

    @routes.post(
        "/namespaces/{namespace}/preview",
        operation_id="preview",
        summary="Where a draft would run, when, in which mode, at what cost, or exactly why not",
        response_model=schemas.PreviewInfo,
        responses=errors(400, 401, 403, 404, 409, 413, 422, 429, 503),
        openapi_extra=takes(
            (TRAINING_JOBS.kind, MODEL_SERVICES.kind),
            "A TrainingJob or ModelService that does not exist yet; `kind` says which.",
        ),
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

    @routes.get(
        "/namespaces/{namespace}/modelservices/{name}/plan",
        operation_id="planModelService",
        summary="The cheapest replicas, over pools, that carry a stated load within the latency target",
        response_model=schemas.ServicePlanInfo,
        responses=errors(401, 403, 404, 422, 503),
    )
    async def plan(
        request: Request,
        namespace: str,
        name: str,
        caller: Annotated[Caller, Depends(InNamespace("get", MODEL_SERVICES))],
        rate: Annotated[Rate, Query(description="Requests per second, of the sizes that they have now.")],
        ttft_milliseconds: Annotated[
            Milliseconds | None, Query(alias="ttftMilliseconds", description="Default: that of spec.slo.")
        ] = None,
        tpot_milliseconds: Annotated[
            Milliseconds | None, Query(alias="tpotMilliseconds", description="Default: that of spec.slo.")
        ] = None,
        percentile: Annotated[
            Percentile | None, Query(description="Default: that of spec.slo, else 99.")
        ] = None,
    ) -> schemas.ServicePlanInfo:
        asked = ServicePlanRequest(
            namespace=namespace,
            name=name,
            rate=rate,
            ttft_milliseconds=ttft_milliseconds,
            tpot_milliseconds=tpot_milliseconds,
            percentile=percentile,
        )
        found = await services_of(request).previews.service_plan(caller, asked)
        return schemas.ServicePlanInfo.model_validate(found)

    return routes
