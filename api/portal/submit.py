"""The submit page: a form or YAML, a preview before anything is made, then the object."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, services_of
from busbar.api.errors import ApiError, Invalid, Unauthenticated
from busbar.api.objects.objects import check_unicode
from busbar.api.portal.drafts import EXAMPLE, FORMS, PRESETS, draft, to_yaml
from busbar.api.portal.render import frame, html, is_fragment
from busbar.kube.contracts.preview import span
from busbar.kube.resources import MODEL_SERVICES
from busbar.kube.types import TrainingJob
from busbar.kube.types.training_status import TrainingPhase

Anyone = Annotated[Caller, Depends(AnyCaller())]


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/submit")
    async def page(
        request: Request,
        caller: Anyone,
        form: Annotated[str, Query(max_length=20)] = "train",
        training_job: Annotated[str, Query(max_length=253)] = "",
        namespace: Annotated[str, Query(max_length=253)] = "",
    ) -> Response:
        fields = {"training_job": training_job, "namespace": namespace}
        return await _page(request, caller, form if form in FORMS else "train", fields, None)

    @routes.post("/submit/preview")
    async def preview(request: Request, caller: Anyone) -> Response:
        fields = await _fields(request)
        form = fields.get("form", "train")
        problem: ApiError | None = None
        found: dict[str, Any] = {}
        try:
            resource, obj = draft(form, fields)
            services = services_of(request)
            answer = await services.previews.preview(caller, resource, _namespace(fields), obj)
            found = {"preview": answer, "span": span, "yaml": to_yaml(obj), "kind": resource.kind}
        except Unauthenticated:
            raise
        except ApiError as error:
            problem = error
        context = {"problem": problem, **found}
        if is_fragment(request):
            return html("preview.html", context)
        return await _page(request, caller, form, fields, context)

    @routes.post("/submit")
    async def submit(request: Request, caller: Anyone) -> Response:
        fields = await _fields(request)
        form = fields.get("form", "train")
        try:
            resource, obj = draft(form, fields)
            made = await services_of(request).objects.create(caller, resource, _namespace(fields), obj)
        except Unauthenticated:
            raise
        except ApiError as error:
            return await _page(request, caller, form, fields, {"problem": error}, error.status)
        part = "services" if resource is MODEL_SERVICES else "jobs"
        where = f"/{part}/{made.metadata.namespace}/{made.metadata.name}"
        return RedirectResponse(where, status_code=303)

    return routes


async def _fields(request: Request) -> dict[str, str]:
    fields = {key: value for key, value in (await request.form()).items() if isinstance(value, str)}
    check_unicode(fields)
    return fields


def _namespace(fields: dict[str, str]) -> str:
    name = fields.get("namespace", "").strip()
    if not name:
        raise Invalid("choose a namespace", field="namespace")
    return name


async def _page(
    request: Request,
    caller: Caller,
    form: str,
    fields: dict[str, str],
    answer: dict[str, Any] | None,
    status: int = 200,
) -> Response:
    services = services_of(request)
    jobs = await services.objects.listing(caller, TrainingJob)
    context = {
        "form": form,
        "fields": fields,
        "answer": answer,
        "namespaces": await services.cluster.namespaces(caller),
        "presets": {key: label for key, (label, _) in PRESETS.items()},
        "accelerators": sorted({p.spec.accelerator for p in await services.cluster.pools(caller)}),
        "trained": [
            job.metadata.name
            for job in jobs
            if job.status is not None and job.status.phase is TrainingPhase.SUCCEEDED
        ],
        "example": EXAMPLE,
    }
    return html("submit.html", {**await frame(request, caller, "submit"), **context}, status)
