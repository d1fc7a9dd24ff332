"""Pages of training jobs: the list, and one job with its curves, log and events."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from busbar.api.identity import Caller
from busbar.api.permissions import InNamespace, Known, services_of
from busbar.api.portal import object_pages
from busbar.api.portal.render import frame, html, is_fragment
from busbar.api.portal.views import FILTERS, JobView, job_view, matches
from busbar.kube.resources import TRAINING_JOBS

SHOWN = 300
"""Rows of one list; filters reach the rest."""

Anyone = Annotated[Caller, Depends(Known())]
Reader = Annotated[Caller, Depends(InNamespace("get", TRAINING_JOBS))]


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
        context = _filtered(views, show, q)
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
            **await object_pages.of_object(request, caller, TRAINING_JOBS, obj),
        }
        return html("job.html", {**await frame(request, caller, "jobs"), **context})

    routes.include_router(object_pages.router(TRAINING_JOBS, "jobs"))
    return routes


def _filtered(views: list[JobView], show: str, text: str) -> dict[str, Any]:
    """The list's rows under a filter, and how many each filter would show."""
    found = [view for view in views if matches(view, show, text)]
    return {
        "jobs": found[:SHOWN],
        "more": max(0, len(found) - SHOWN),
        "counts": {"": len(views), **{key: sum(matches(v, key, "") for v in views) for key in FILTERS}},
        "show": show,
        "q": text,
    }
