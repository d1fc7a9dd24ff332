"""The page of batches: a person's own, with their progress, their errors, and their files to download.

Batches are made at the gateway (`/v1/batches`, `busbar batch create`); here they are read, cancelled and downloaded.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from pydantic import ValidationError

from busbar.api.access.identity import Caller, CallerRole
from busbar.api.dependencies import AnyCaller, services_of
from busbar.api.errors import NotFound
from busbar.api.portal.formatting import ago
from busbar.api.portal.object_views import Badge
from busbar.api.portal.render import frame, html, is_fragment
from busbar.api.records.batches import OPEN
from busbar.api.services import Services
from busbar.kube.contracts.batches import BatchInfo, FileRef, ListWanted
from busbar.kube.contracts.preview import span

SHOWN = 100
"""The newest so many; `busbar batch list` has the rest."""
Anyone = Annotated[Caller, Depends(AnyCaller())]
_TONES = {"completed": "done", "failed": "bad", "expired": "bad", "cancelled": "rest", "in_progress": "go"}


class Kind(StrEnum):
    """Files that may be downloaded."""

    ANSWERS = "answers"
    ERRORS = "errors"
    REQUESTS = "requests"


@dataclass(frozen=True)
class BatchView:
    """A row of the list."""

    id: str
    href: str
    tenant: str
    badge: Badge
    problem: str
    endpoint: str
    total: int
    completed: int
    failed: int
    percent: float | None
    age: str
    left: str
    """How long it may still take; empty when it has ended."""
    open: bool
    files: tuple[str, ...]
    """What can be downloaded."""
    metadata: str


def batch_view(tenant: str, found: BatchInfo, now: datetime) -> BatchView:
    """A batch as the list shows it."""
    ended = found.completed + found.failed
    files = {Kind.ANSWERS: found.output_file_id, Kind.ERRORS: found.error_file_id}
    is_open = found.status in OPEN
    return BatchView(
        id=found.id,
        href=f"/batches/{tenant}/{found.id}",
        tenant=tenant,
        badge=Badge(found.status.replace("_", " ").capitalize(), _TONES.get(found.status, "wait")),
        problem=found.problem or "",
        endpoint=found.endpoint,
        total=found.total,
        completed=found.completed,
        failed=found.failed,
        percent=100 * ended / found.total if found.total else None,
        age=ago(datetime.fromtimestamp(found.created_at, UTC), now),
        left=span(max(0.0, found.expires_at - now.timestamp())) if is_open else "",
        open=is_open,
        files=(*(kind.value for kind, file in files.items() if file), Kind.REQUESTS.value),
        metadata=", ".join(f"{name}={value}" for name, value in sorted(found.metadata.items())),
    )


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/batches")
    async def listing(request: Request, caller: Anyone) -> Response:
        services = services_of(request)
        views = await _views(services, caller)
        context: dict[str, Any] = {"batches": views}
        if is_fragment(request):
            return html("batches_list.html", {**context, "csrf": _csrf(services, caller)})
        context |= {"gateway": services.settings.shown_gateway_url}
        return html("batches.html", {**await frame(request, caller, "batches"), **context})

    @routes.post("/batches/{tenant}/{batch_id}/cancel")
    async def cancel(request: Request, tenant: str, batch_id: str, caller: Anyone) -> Response:
        services = services_of(request)
        await services.batches.cancel(_reference(services, caller, tenant, batch_id))
        return RedirectResponse("/batches", status_code=303)

    @routes.get("/batches/{tenant}/{batch_id}/{kind}")
    async def download(request: Request, tenant: str, batch_id: str, kind: Kind, caller: Anyone) -> Response:
        services = services_of(request)
        found = await services.batches.get(_reference(services, caller, tenant, batch_id))
        files = {
            Kind.ANSWERS: found.output_file_id,
            Kind.ERRORS: found.error_file_id,
            Kind.REQUESTS: found.input_file_id,
        }
        file_id = files[kind]
        if file_id is None:
            raise NotFound(f"the batch has no {kind.value}")
        file = FileRef(tenant=tenant, subject=caller.subject, id=file_id)
        await services.files.get(file)
        name = f"{batch_id}-{kind.value}.jsonl"
        return StreamingResponse(
            _pieces(services, file),
            media_type="application/x-ndjson",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    return routes


async def _views(services: Services, caller: Caller) -> list[BatchView]:
    now, found = services.clock(), []
    for tenant in _tenants(services, caller):
        wanted = ListWanted(tenant=tenant, subject=caller.subject, limit=SHOWN)
        found += [(each, tenant) for each in (await services.batches.page(wanted)).batches]
    found.sort(key=lambda pair: (pair[0].created_at, pair[0].id), reverse=True)
    return [batch_view(tenant, each, now) for each, tenant in found[:SHOWN]]


async def _pieces(services: Services, file: FileRef) -> AsyncIterator[bytes]:
    after: int | None = 0
    while after is not None:
        data, after = await services.files.content(file, after)
        yield data


def _tenants(services: Services, caller: Caller) -> list[str]:
    """Those in whose name the caller's keys may have made batches."""
    mine = {membership.tenant for membership in services.tenancy.memberships(caller)}
    if caller.role is CallerRole.ADMIN and caller.tenant:
        mine.add(caller.tenant)
    return sorted(mine)


def _reference(services: Services, caller: Caller, tenant: str, batch_id: str) -> FileRef:
    """Raises NotFound for what is not the caller's."""
    try:
        if tenant in _tenants(services, caller):
            return FileRef(tenant=tenant, subject=caller.subject, id=batch_id)
    except ValidationError:
        pass
    raise NotFound("there is no such batch")


def _csrf(services: Services, caller: Caller) -> str:
    return services.sessions.csrf(caller.session) if caller.session else ""
