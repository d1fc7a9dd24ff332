"""Pages of training jobs: the list, and one job with its curves, log and events."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, InNamespace, services_of
from busbar.api.errors import Unavailable
from busbar.api.portal import object_pages
from busbar.api.portal.job_views import FILTERS, JobView, job_view, matches
from busbar.api.portal.power_views import JobPower, job_power
from busbar.api.portal.render import frame, html, is_fragment
from busbar.api.services import Services
from busbar.kube.resources import TRAINING_JOBS
from busbar.kube.types import TrainingJob

SHOWN = 300
"""Rows that one list shows; filters find the rest."""

Anyone = Annotated[Caller, Depends(AnyCaller())]
Reader = Annotated[Caller, Depends(InNamespace("get", TRAINING_JOBS))]


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/jobs")
    async def listing(
        request: Request,
        caller: Anyone,
        show: Annotated[str, Query(max_length=20)] = "",
        q: Annotated[str, Query(max_length=200)] = "",
    ) -> Response:
        services = services_of(request)
        now = services.clock()
        context = _filtered(await services.objects.listing(caller, TrainingJob), show, q, now)
        if is_fragment(request):
            return html("jobs_list.html", context)
        return html("jobs.html", {**await frame(request, caller, "jobs"), **context})

    @routes.get("/jobs/{namespace}/{name}")
    async def one(request: Request, namespace: str, name: str, caller: Reader) -> Response:
        services = services_of(request)
        obj = await services.objects.get(caller, TrainingJob, namespace, name)
        view = job_view(obj, services.clock())
        power = await _power(services, caller, view)
        if is_fragment(request):
            return html("job_status.html", {"job": view, "power": power})
        pods = await services.pods.ranks(caller, TRAINING_JOBS, namespace, name)
        context = {
            "job": view,
            "power": power,
            "ranks": sorted({pod.rank for pod in pods}) or [0],
            **await object_pages.of_object(request, caller, TRAINING_JOBS, obj),
        }
        return html("job.html", {**await frame(request, caller, "jobs"), **context})

    routes.include_router(object_pages.router(TRAINING_JOBS, "jobs"))
    return routes


async def _power(services: Services, caller: Caller, view: JobView) -> JobPower | None:
    """What the job draws now, as far as nodes that the caller may see report it."""
    if not view.nodes:
        return None
    try:
        return job_power(view.nodes, view.accelerators_per_pod, await services.power.nodes(caller))
    except Unavailable:
        return None


def _filtered(jobs: list[TrainingJob], show: str, text: str, now: datetime) -> dict[str, Any]:
    """The list's rows under a filter, and how many each filter would show."""
    found = [job for job in jobs if matches(job, show, text)]
    return {
        "jobs": [job_view(job, now) for job in found[:SHOWN]],
        "more": max(0, len(found) - SHOWN),
        "counts": {"": len(jobs), **{key: sum(matches(job, key, "") for job in jobs) for key in FILTERS}},
        "show": show,
        "q": text,
    }
