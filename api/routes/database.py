"""REST for the backup and the restore of the database (admins)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from busbar.api.access.identity import Caller
from busbar.api.dependencies import AdminOnly, services_of
from busbar.api.errors import BadRequest
from busbar.api.routes import schemas
from busbar.api.routes.schemas import errors

Admin = Annotated[Caller, Depends(AdminOnly())]
LINES = "application/x-ndjson"
_LINES: dict[str, Any] = {LINES: {"schema": {"type": "string"}}}


def router() -> APIRouter:
    """Read it, ask about it, replace it."""
    routes = APIRouter(tags=["Database"])

    @routes.get(
        "/database",
        operation_id="backupDatabase",
        summary="All tables as lines of JSON, of one moment, without browser sessions (admins)",
        response_class=StreamingResponse,
        responses={200: {"content": _LINES, "description": "Lines of JSON"}, **errors(401, 403, 503)},
    )
    async def backup(request: Request, caller: Admin) -> StreamingResponse:
        lines = services_of(request).backup.dump(caller)
        first = await anext(lines)  # a database that does not answer is an error, not a short file
        return StreamingResponse(_then(first, lines), media_type=LINES)

    @routes.get(
        "/database/state",
        operation_id="readDatabaseState",
        summary="The schema, and whether a backup can be restored here (admins)",
        response_model=schemas.DatabaseState,
        responses=errors(401, 403, 503),
    )
    async def state(request: Request, caller: Admin) -> schemas.DatabaseState:
        return schemas.DatabaseState.model_validate(await services_of(request).backup.state(caller))

    @routes.put(
        "/database",
        operation_id="restoreDatabase",
        summary="Restore a backup into an unused database, all of it or nothing (admins)",
        response_model=schemas.DatabaseRestored,
        responses=errors(400, 401, 403, 409, 413, 422, 503),
        openapi_extra={
            "requestBody": {
                "required": True,
                "description": 'A line `{"uids": {"old": "new"}}` for objects created again, then the backup.',
                "content": _LINES,
            }
        },
    )
    async def restore(request: Request, caller: Admin) -> schemas.DatabaseRestored:
        done = await services_of(request).backup.restore(caller, _body(request))
        return schemas.DatabaseRestored.model_validate(done)

    return routes


async def _then(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in others:
        yield piece


async def _body(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect as error:
        raise BadRequest("the body ended before its last line") from error
