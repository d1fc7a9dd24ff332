"""REST for tokens and the audit trail."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from busbar.api.access.audit import MAX_ID
from busbar.api.access.identity import Caller
from busbar.api.access.tokens import TokenState
from busbar.api.dependencies import AdminOnly, AnyCaller, services_of
from busbar.api.routes import schemas
from busbar.api.routes.body import ModelRoute
from busbar.api.routes.schemas import errors

Anyone = Annotated[Caller, Depends(AnyCaller())]


def router() -> APIRouter:
    """Both."""
    routes = APIRouter(tags=["Callers"], route_class=ModelRoute)
    for add in (_list, _create, _revoke_many, _rotate, _revoke, _audit):
        add(routes)
    return routes


def _list(routes: APIRouter) -> None:
    @routes.get(
        "/tokens",
        operation_id="listTokens",
        summary="One's own tokens, newest first; everybody's for admins",
        response_model=schemas.TokenPage,
        responses=errors(401, 403, 422, 503),
    )
    async def tokens(
        request: Request,
        caller: Anyone,
        subject: Annotated[str | None, Query(max_length=253, description="For admins: one person's.")] = None,
        state: Annotated[TokenState | None, Query(description="Default: both.")] = None,
        before: Annotated[str | None, Query(max_length=32, description="`next` of the page before.")] = None,
        limit: Annotated[int, Query(ge=1, le=500, description="Rows of a page.")] = 100,
    ) -> schemas.TokenPage:
        rows = await services_of(request).token_service.page(
            caller, subject=subject, state=state, before=before, limit=limit
        )
        following = rows[-1].id if len(rows) == limit else None
        return schemas.TokenPage.model_validate({"items": rows, "next": following})


def _create(routes: APIRouter) -> None:
    @routes.post(
        "/tokens",
        operation_id="createToken",
        summary="A new token; its text is shown this once",
        status_code=201,
        response_model=schemas.TokenCreated,
        responses=errors(400, 401, 403, 409, 413, 422, 429, 503),
    )
    async def create(
        request: Request, body: schemas.TokenAsk, caller: Anyone, response: Response
    ) -> schemas.TokenCreated:
        lifetime = timedelta(days=body.expires_in_days) if body.expires_in_days is not None else None
        text, token = await services_of(request).token_service.create(
            caller,
            scopes=body.scopes,
            role=body.role,
            subject=body.subject,
            tenant=body.tenant,
            description=body.description,
            lifetime=lifetime,
            limits=body.limits,
            address=services_of(request).forwarded.address(request.scope),
        )
        response.headers["Cache-Control"] = "no-store"
        return schemas.TokenCreated(token=text, info=schemas.TokenInfo.model_validate(token))


def _revoke_many(routes: APIRouter) -> None:
    @routes.post(
        "/tokens/revoke",
        operation_id="revokeTokens",
        summary="End all live tokens of one person, or of everybody, and their browser sessions",
        response_model=schemas.Revoked,
        responses=errors(400, 401, 403, 413, 422, 503),
    )
    async def revoke_many(request: Request, body: schemas.RevokeAsk, caller: Anyone) -> schemas.Revoked:
        count = await services_of(request).token_service.revoke_many(caller, body.subject)
        return schemas.Revoked(revoked=count)


def _rotate(routes: APIRouter) -> None:
    @routes.post(
        "/tokens/{token_id}/rotate",
        operation_id="rotateToken",
        summary="A token like this one, which ends after an overlap; the new text is shown this once",
        status_code=201,
        response_model=schemas.TokenRotated,
        responses=errors(400, 401, 403, 404, 409, 413, 422, 429, 503),
    )
    async def rotate(
        request: Request, token_id: str, body: schemas.RotateAsk, caller: Anyone, response: Response
    ) -> schemas.TokenRotated:
        text, made, former = await services_of(request).token_service.rotate(
            caller,
            token_id,
            overlap=timedelta(hours=body.overlap_hours),
            address=services_of(request).forwarded.address(request.scope),
        )
        response.headers["Cache-Control"] = "no-store"
        info, old = (schemas.TokenInfo.model_validate(token) for token in (made, former))
        return schemas.TokenRotated(token=text, info=info, former=old)


def _revoke(routes: APIRouter) -> None:
    @routes.delete(
        "/tokens/{token_id}",
        operation_id="revokeToken",
        summary="End a token and the browser sessions that began with it",
        status_code=204,
        responses=errors(401, 403, 404, 503),
        response_class=Response,
    )
    async def revoke(request: Request, token_id: str, caller: Anyone) -> Response:
        await services_of(request).token_service.revoke(caller, token_id)
        return Response(status_code=204)


def _audit(routes: APIRouter) -> None:
    @routes.get(
        "/audit",
        operation_id="listAudit",
        summary="Who wrote what, newest first (admins)",
        response_model=schemas.AuditPage,
        responses=errors(401, 403, 422, 503),
    )
    async def audit(
        request: Request,
        caller: Annotated[Caller, Depends(AdminOnly())],
        before: Annotated[
            int | None, Query(ge=1, le=MAX_ID, description="`next` of the page before.")
        ] = None,
        subject: Annotated[str | None, Query(max_length=253, description="One person's.")] = None,
        limit: Annotated[int, Query(ge=1, le=500, description="Rows of a page.")] = 100,
    ) -> schemas.AuditPage:
        rows = await services_of(request).audit.page(before=before, subject=subject, limit=limit)
        following = rows[-1].id if len(rows) == limit else None
        return schemas.AuditPage.model_validate({"items": rows, "next": following})
