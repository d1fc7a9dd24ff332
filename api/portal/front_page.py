"""The front page: what runs, what waits and why, who holds what, what it costs per hour."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AnyCaller, services_of
from busbar.api.objects.overview import Failed, Holder, Overview, Place, Running, Waiting
from busbar.api.portal.formatting import money, number
from busbar.api.portal.object_views import TONES, Badge
from busbar.api.portal.render import frame, html, is_fragment
from busbar.kube.contracts.preview import span

SHOWN = 50
"""Rows of one table; the pages of jobs and services have the rest."""


@dataclass(frozen=True)
class Row:
    """One line of a table about an object."""

    href: str
    name: str
    where: str
    """Its namespace and tenant."""
    badge: Badge
    message: str
    amount: str
    place: str
    percent: float | None
    time: str
    """Running: the time left. Waiting: how long already. Failed: how long ago."""
    likely: str
    cost: str


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/")
    async def front(request: Request, caller: Annotated[Caller, Depends(AnyCaller())]) -> Response:
        found = await services_of(request).overviews.overview(caller)
        around = await frame(request, caller, "overview")
        context = {**around, **page_of(found, everybody=around["sees_all"])}
        return html("overview_parts.html" if is_fragment(request) else "overview.html", context)

    return routes


def page_of(found: Overview, *, everybody: bool) -> dict[str, Any]:
    """What the template shows of an overview. Pure.

    Args:
        everybody: the reader sees all tenants, so what is held beyond them belongs to none of them.
    """
    now = found.as_of
    return {
        "facts": [
            ("Running", str(len(found.running)), ""),
            ("Waiting", str(len(found.waiting)), _oldest(found.waiting, now)),
            (
                "Accelerators held",
                f"{number(found.allocated, 1)} of {number(found.capacity, 1)}",
                "" if everybody else "in the pools you may use",
            ),
            (
                "Cost per hour",
                money(found.cost_per_hour),
                "of everybody" if everybody else "of what you see",
            ),
            ("Ended in 24 h", f"{found.succeeded} succeeded", f"{len(found.failed)} failed"),
        ],
        "running": [_running(one, now) for one in found.running[:SHOWN]],
        "more_running": max(0, len(found.running) - SHOWN),
        "waiting": [_waiting(one, now) for one in found.waiting[:SHOWN]],
        "more_waiting": max(0, len(found.waiting) - SHOWN),
        "failed": [_failed(one, now) for one in found.failed[:SHOWN]],
        "more_failed": max(0, len(found.failed) - SHOWN),
        "holders": [_holder(one, everybody) for one in found.holders],
    }


def _oldest(waiting: Sequence[Waiting], now: datetime) -> str:
    since = waiting[0].since if waiting else None
    return f"the longest for {_span(since, now)}" if since is not None else ""


def _running(one: Running, now: datetime) -> Row:
    return _row(
        one,
        badge=Badge(one.phase, TONES.get(one.phase, "wait")),
        amount=", ".join(_amount(place) for place in one.places),
        place=", ".join(place.pool for place in one.places),
        percent=one.percent,
        time=_span(now, one.ends_at) if one.ends_at is not None and one.ends_at > now else "",
        cost=money(one.cost_per_hour),
    )


def _waiting(one: Waiting, now: datetime) -> Row:
    likely = one.start_p50
    return _row(
        one,
        badge=Badge(one.reason or "Waiting", "wait"),
        message=one.message,
        time=_span(one.since, now) if one.since is not None else "",
        likely="" if likely is None else f"in {_span(now, likely)}" if likely > now else "any moment",
    )


def _failed(one: Failed, now: datetime) -> Row:
    return _row(one, badge=Badge(one.reason or "Failed", "bad"), message=one.message, time=_span(one.at, now))


def _row(one: Running | Waiting | Failed, badge: Badge, time: str, **more: Any) -> Row:
    part = "services" if getattr(one, "kind", "") == "ModelService" else "jobs"
    blank: dict[str, Any] = {
        "message": "",
        "amount": "",
        "place": "",
        "percent": None,
        "likely": "",
        "cost": "",
    }
    return Row(
        href=f"/{part}/{one.namespace}/{one.name}",
        name=one.name,
        where=f"{one.namespace} · {one.tenant}" if one.tenant else one.namespace,
        badge=badge,
        time=time,
        **{**blank, **more},
    )


def _amount(place: Place) -> str:
    return f"{number(place.accelerators, 1)} × {place.accelerator}"


def _holder(one: Holder, everybody: bool) -> dict[str, Any]:
    title = one.title or ("Pods of other controllers" if everybody else "Everybody else")
    return {
        "title": title,
        "held": [
            {
                "accelerator": "any" if row.accelerator == "*" else row.accelerator,
                "held": number(row.held, 1),
                "guaranteed": number(row.guaranteed, 1),
            }
            for row in one.held
        ],
        "running": one.running,
        "waiting": one.waiting,
        "cost": money(one.cost_per_hour) if one.cost_per_hour is not None else "",
    }


def _span(start: datetime, end: datetime) -> str:
    return span(max(0.0, (end - start).total_seconds()))
