"""Pages about people: usage, tokens, and the audit trail for admins."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Form, Query, Request
from fastapi.responses import RedirectResponse, Response

from busbar.api.errors import ApiError, Unauthenticated
from busbar.api.identity import Caller, Role, Scope
from busbar.api.ledger import By
from busbar.api.permissions import AdminOnly, Known, services_of
from busbar.api.portal.drafts import whole_or_none
from busbar.api.portal.render import frame, html
from busbar.api.portal.words import money, number
from busbar.api.preview import span
from busbar.api.usage import usage_for

PAGE = 100
Anyone = Annotated[Caller, Depends(Known())]


def router() -> APIRouter:
    routes = APIRouter()
    _usage(routes)
    _token_pages(routes)
    _audit(routes)
    return routes


def _usage(routes: APIRouter) -> None:
    @routes.get("/usage")
    async def usage(
        request: Request,
        caller: Anyone,
        by: By = By.TENANT,
        days: Annotated[int, Query(ge=1, le=366)] = 30,
    ) -> Response:
        services = services_of(request)
        now = services.clock()
        report = await usage_for(services, caller, by, now - timedelta(days=days), now)
        context = {
            "report": report,
            "by": by,
            "days": days,
            "choices": list(By),
            "number": number,
            "money": money,
        }
        return html("usage.html", {**await frame(request, caller, "usage"), **context})


def _token_pages(routes: APIRouter) -> None:
    @routes.get("/tokens")
    async def tokens(request: Request, caller: Anyone) -> Response:
        return await _tokens(request, caller, None, None)

    @routes.post("/tokens")
    async def create(
        request: Request,
        caller: Anyone,
        description: Annotated[str, Form(max_length=200)] = "",
        scope: Annotated[list[Scope] | None, Form()] = None,
        tenant: Annotated[str, Form(max_length=253)] = "",
        days: Annotated[str, Form(max_length=5)] = "",
    ) -> Response:
        try:
            good_for = whole_or_none(days, "days", "until it is revoked", least=1)
            text, _ = await services_of(request).desk.create(
                caller,
                scopes=scope or [Scope.REST],
                role=Role.USER,
                tenant=tenant or None,
                description=description,
                lifetime=timedelta(days=good_for) if good_for is not None else None,
            )
        except Unauthenticated:
            raise
        except ApiError as error:
            return await _tokens(request, caller, None, error, error.status)
        return await _tokens(request, caller, text, None, 201)

    @routes.post("/tokens/{token_id}/revoke")
    async def revoke(request: Request, token_id: str, caller: Anyone) -> Response:
        await services_of(request).desk.revoke(caller, token_id)
        return RedirectResponse("/tokens", status_code=303)


def _audit(routes: APIRouter) -> None:
    @routes.get("/audit")
    async def audit(
        request: Request,
        caller: Annotated[Caller, Depends(AdminOnly())],
        before: Annotated[int | None, Query(ge=1)] = None,
    ) -> Response:
        rows = await services_of(request).audit.page(before=before, limit=PAGE)
        following = rows[-1].id if len(rows) == PAGE else None
        context = {"rows": rows, "next": following}
        return html("audit.html", {**await frame(request, caller, "audit"), **context})


async def _tokens(
    request: Request, caller: Caller, made: str | None, problem: ApiError | None, status: int = 200
) -> Response:
    services = services_of(request)
    now = services.clock()
    rows = [
        {
            "token": token,
            "age": span((now - token.created_at).total_seconds()),
            "used": span((now - token.last_used_at).total_seconds()) if token.last_used_at else "",
            "live": token.revoked_at is None and (token.expires_at is None or token.expires_at > now),
            "own": token.subject == caller.subject,
        }
        for token in await services.desk.listing(caller)
    ]
    tenants = [m.tenant for m in services.tenancy.memberships(caller) if m.may_write]
    context = {
        "rows": rows,
        "made": made,
        "problem": problem,
        "tenants": tenants,
        "may_infer": Scope.INFERENCE in caller.scopes,
    }
    return html("tokens.html", {**await frame(request, caller, "tokens"), **context}, status)
