"""REST: the preview of a draft, before anything is created."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from busbar.api.access.identity import Caller
from busbar.api.dependencies import InNamespace, services_of
from busbar.api.routes import schemas
from busbar.api.routes.body import Body, takes
from busbar.api.routes.schemas import errors
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

    return routes
