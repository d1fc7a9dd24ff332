"""Pages of training jobs: the list, and one job with its curves, log and events."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from busbar.api.identity import Caller
from busbar.api.permissions import InNamespace, Known, services_of
from busbar.api.portal.drafts import to_yaml
from busbar.api.portal.render import frame, html, is_fragment
from busbar.api.portal.views import FILTERS, job_view, matches
from busbar.kube.resources import EVENTS, TRAINING_JOBS

SHOWN = 300
"""Rows of one list; filters reach the rest."""

Anyone = Annotated[Caller, Depends(Known())]
Reader = Annotated[Caller, Depends(InNamespace("get", TRAINING_JOBS))]
Writer = Annotated[Caller, Depends(InNamespace("patch", TRAINING_JOBS))]
Deleter = Annotated[Caller, Depends(InNamespace("delete", TRAINING_JOBS))]


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/")
    async def home(_: Anyone) -> Response:
        return RedirectResponse("/jobs", status_code=303)

    @routes.get("/jobs")
    async def listing(
        request: Request,
        caller: Anyone,
        show: Annotated[str, Query(max_length=20)] = "",
        q: Annotated[str, Query(max_length=200)] = "",
    ) -> Response:
        services = services_of(request)
        now = services.clock()
        views = [job_view(obj, now) for obj in await services.objects.listing(caller, TRAINING_JOBS)]
        counts = {"": len(views), **{key: sum(matches(v, key, "") for v in views) for key in FILTERS}}
        found = [view for view in views if matches(view, show, q)]
        context = {
            "jobs": found[:SHOWN],
            "more": max(0, len(found) - SHOWN),
            "counts": counts,
            "show": show,
            "q": q,
        }
        if is_fragment(request):
            return html("jobs_list.html", context)
        return html("jobs.html", {**await frame(request, caller, "jobs"), **context})

    @routes.get("/jobs/{namespace}/{name}")
    async def one(request: Request, namespace: str, name: str, caller: Reader) -> Response:
        services = services_of(request)
        obj = await services.objects.get(caller, TRAINING_JOBS, namespace, name)
        view = job_view(obj, services.clock())
        if is_fragment(request):
            return html("job_status.html", {"job": view})
        pods = await services.pods.ranks(caller, TRAINING_JOBS, namespace, name)
        context = {
            "job": view,
            "ranks": sorted({pod["rank"] for pod in pods}) or [0],
            "yaml": to_yaml({key: obj[key] for key in ("apiVersion", "kind", "spec") if key in obj}),
            "may_write": await services.authorizer.allowed(caller, "patch", TRAINING_JOBS, namespace),
            "api": f"/api/v1alpha1/namespaces/{namespace}/trainingjobs/{name}",
        }
        return html("job.html", {**await frame(request, caller, "jobs"), **context})

    @routes.get("/jobs/{namespace}/{name}/events")
    async def events(
        request: Request,
        namespace: str,
        name: str,
        caller: Annotated[Caller, Depends(InNamespace("list", EVENTS, of=TRAINING_JOBS))],
    ) -> Response:
        services = services_of(request)
        found = await services.pods.events(caller, TRAINING_JOBS, namespace, name)
        return html("events.html", {"events": found, "now": services.clock()})

    @routes.post("/jobs/{namespace}/{name}/cancel")
    async def cancel(request: Request, namespace: str, name: str, caller: Writer) -> Response:
        await services_of(request).objects.suspend(caller, TRAINING_JOBS, namespace, name, True)
        return RedirectResponse(f"/jobs/{namespace}/{name}", status_code=303)

    @routes.post("/jobs/{namespace}/{name}/resume")
    async def resume(request: Request, namespace: str, name: str, caller: Writer) -> Response:
        await services_of(request).objects.suspend(caller, TRAINING_JOBS, namespace, name, False)
        return RedirectResponse(f"/jobs/{namespace}/{name}", status_code=303)

    @routes.post("/jobs/{namespace}/{name}/delete")
    async def delete(request: Request, namespace: str, name: str, caller: Deleter) -> Response:
        await services_of(request).objects.delete(caller, TRAINING_JOBS, namespace, name)
        return RedirectResponse("/jobs", status_code=303)

    return routes
