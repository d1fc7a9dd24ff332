"""REST for tokens and the audit trail."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from busbar.api.identity import Caller
from busbar.api.permissions import AdminOnly, Known, services_of
from busbar.api.routes import schemas
from busbar.api.routes.schemas import errors

Anyone = Annotated[Caller, Depends(Known())]


def router() -> APIRouter:
    """Both."""
    routes = APIRouter(tags=["Callers"])
    _tokens(routes)
    _audit(routes)
    return routes


def _tokens(routes: APIRouter) -> None:
    @routes.get(
        "/tokens",
        operation_id="listTokens",
        summary="One's own tokens; everybody's for admins",
        response_model=schemas.TokenList,
        responses=errors(401, 403, 503),
    )
    async def tokens(request: Request, caller: Anyone) -> schemas.TokenList:
        return schemas.TokenList.model_validate({"items": await services_of(request).desk.listing(caller)})

    @routes.post(
        "/tokens",
        operation_id="createToken",
        summary="A new token; its text is shown this once",
        status_code=201,
        response_model=schemas.TokenCreated,
        responses=errors(400, 401, 403, 413, 422, 503),
    )
    async def create(
        request: Request, body: schemas.TokenAsk, caller: Anyone, response: Response
    ) -> schemas.TokenCreated:
        lifetime = timedelta(days=body.expires_in_days) if body.expires_in_days is not None else None
        text, token = await services_of(request).desk.create(
            caller,
            scopes=body.scopes,
            role=body.role,
            subject=body.subject,
            tenant=body.tenant,
            description=body.description,
            lifetime=lifetime,
        )
        response.headers["Cache-Control"] = "no-store"
        return schemas.TokenCreated(token=text, info=schemas.TokenInfo.model_validate(token))

    @routes.delete(
        "/tokens/{token_id}",
        operation_id="revokeToken",
        summary="End a token and the browser sessions that began with it",
        status_code=204,
        responses=errors(401, 403, 404, 503),
        response_class=Response,
    )
    async def revoke(request: Request, token_id: str, caller: Anyone) -> Response:
        await services_of(request).desk.revoke(caller, token_id)
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
        before: Annotated[int | None, Query(ge=1)] = None,
        subject: Annotated[str | None, Query(max_length=253)] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> schemas.AuditPage:
        rows = await services_of(request).audit.page(before=before, subject=subject, limit=limit)
        following = rows[-1].id if len(rows) == limit else None
        return schemas.AuditPage.model_validate({"items": rows, "next": following})
