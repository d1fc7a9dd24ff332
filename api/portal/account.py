"""Pages about people: usage, tokens, and the audit trail for admins."""

from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Form, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import ValidationError

from busbar.api.access.audit import MAX_ID
from busbar.api.access.identity import Caller, CallerRole, Scope
from busbar.api.access.token_rules import DAY, OVERLAP_HOURS
from busbar.api.access.tokens import TokenState
from busbar.api.dependencies import AdminOnly, AnyCaller, services_of
from busbar.api.errors import ApiError, Invalid, Unauthenticated
from busbar.api.objects.budgets import budget_lines
from busbar.api.portal.drafts import whole_or_none
from busbar.api.portal.formatting import as_number, money, number
from busbar.api.portal.render import frame, html
from busbar.api.records.usage_export import Group
from busbar.api.records.usage_ledger import By
from busbar.kube.contracts.preview import span
from busbar.kube.types.budget import Period
from busbar.kube.types.inference import InferenceLimits

PAGE = 100
MAX_DAYS = 3650
Anyone = Annotated[Caller, Depends(AnyCaller())]


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
        report = await services.usage.report(caller, by, now - timedelta(days=days), now)
        context = {
            "report": report,
            "budgets": budget_lines(await services.cluster.tenants(caller)),
            "by": by,
            "days": days,
            "export": _export_of(by, report.since),
            "choices": list(By),
            "number": number,
            "money": money,
        }
        return html("usage.html", {**await frame(request, caller, "usage"), **context})


def _export_of(by: By, since: datetime) -> str:
    """Where the page's sums are as CSV; empty where there are none."""
    if by.value not in set(Group):
        return ""
    asked = {"by": by.value, "since": since.isoformat(), "format": "csv"}
    return f"/api/v1alpha1/usage/export?{urlencode(asked)}"


@dataclass(frozen=True)
class LimitsForm:
    """The form's fields about limits, as they were filled in."""

    requests_per_minute: str
    tokens_per_minute: str
    cost: str
    period: Period

    def read(self) -> InferenceLimits | None:
        """The limits; None where every field is empty. Raises Invalid."""
        budgets = None
        if self.cost.strip():
            amount = as_number(self.cost)
            if amount is None:
                raise Invalid("money must be a number, or empty for no limit", field="cost")
            budgets = [{"period": self.period, "cost": amount}]
        found = {
            "requestsPerMinute": whole_or_none(
                self.requests_per_minute, "requests_per_minute", "no limit", 1
            ),
            "tokensPerMinute": whole_or_none(self.tokens_per_minute, "tokens_per_minute", "no limit", 1),
            "budgets": budgets,
        }
        if not any(found.values()):
            return None
        try:
            return InferenceLimits.model_validate(found)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise Invalid(
                f"a limit is wrong: {wrong['msg']}", field=".".join(map(str, wrong["loc"]))
            ) from error


def limits_form(
    requests_per_minute: Annotated[str, Form(max_length=12)] = "",
    tokens_per_minute: Annotated[str, Form(max_length=12)] = "",
    cost: Annotated[str, Form(max_length=12)] = "",
    period: Annotated[Period, Form()] = Period.MONTH,
) -> LimitsForm:
    """The fields of the form."""
    return LimitsForm(requests_per_minute, tokens_per_minute, cost, period)


def limit_words(limits: InferenceLimits | None) -> str:
    """`50,000 tokens/min, 20 a day`; empty without limits."""
    if limits is None:
        return ""
    rates = ((limits.requests_per_minute, "requests/min"), (limits.tokens_per_minute, "tokens/min"))
    parts = [f"{most:,} {what}" for most, what in rates if most is not None]
    return ", ".join([*parts, *(f"{money(b.cost)} a {b.period.value}" for b in limits.budgets or ())])


def _token_pages(routes: APIRouter) -> None:
    @routes.get("/tokens")
    async def tokens(
        request: Request,
        caller: Anyone,
        subject: Annotated[str, Query(max_length=253)] = "",
        state: Literal["", "live", "ended"] = "",
        before: Annotated[str, Query(max_length=32)] = "",
    ) -> Response:
        return await _tokens(request, caller, shown=Shown(subject.strip(), state, before))

    @routes.post("/tokens")
    async def create(
        request: Request,
        caller: Anyone,
        limits: Annotated[LimitsForm, Depends(limits_form)],
        description: Annotated[str, Form(max_length=200)] = "",
        scope: Annotated[list[Scope] | None, Form()] = None,
        tenant: Annotated[str, Form(max_length=253)] = "",
        days: Annotated[str, Form(max_length=5)] = "",
    ) -> Response:
        async def make() -> str:
            good_for = whole_or_none(days, "days", "the usual lifetime", least=1)
            if good_for is not None and good_for > MAX_DAYS:
                raise Invalid(f"days must be at most {MAX_DAYS}", field="days")
            text, _ = await services_of(request).token_service.create(
                caller,
                scopes=scope or [Scope.REST],
                role=CallerRole.USER,
                tenant=tenant or None,
                description=description,
                lifetime=timedelta(days=good_for) if good_for is not None else None,
                limits=limits.read(),
                address=services_of(request).forwarded.address(request.scope),
            )
            return text

        return await _show_made(request, caller, make())

    @routes.post("/tokens/revoke")
    async def revoke_many(
        request: Request,
        caller: Anyone,
        subject: Annotated[str, Form(max_length=253)] = "",
        everyone: Annotated[bool, Form()] = False,
    ) -> Response:
        subject = subject.strip()
        if everyone == bool(subject):
            raise Invalid("name a person, or tick everybody, and not both", field="subject")
        await services_of(request).token_service.revoke_many(caller, subject or None)
        return RedirectResponse("/tokens", status_code=303)

    @routes.post("/tokens/{token_id}/rotate")
    async def rotate(request: Request, token_id: str, caller: Anyone) -> Response:
        async def make() -> str:
            text, _, _ = await services_of(request).token_service.rotate(
                caller,
                token_id,
                overlap=timedelta(hours=OVERLAP_HOURS),
                address=services_of(request).forwarded.address(request.scope),
            )
            return text

        return await _show_made(request, caller, make())

    @routes.post("/tokens/{token_id}/revoke")
    async def revoke(request: Request, token_id: str, caller: Anyone) -> Response:
        await services_of(request).token_service.revoke(caller, token_id)
        return RedirectResponse("/tokens", status_code=303)


def _audit(routes: APIRouter) -> None:
    @routes.get("/audit")
    async def audit(
        request: Request,
        caller: Annotated[Caller, Depends(AdminOnly())],
        before: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
    ) -> Response:
        rows = await services_of(request).audit.page(before=before, limit=PAGE)
        following = rows[-1].id if len(rows) == PAGE else None
        context = {"rows": rows, "next": following}
        return html("audit.html", {**await frame(request, caller, "audit"), **context})


@dataclass(frozen=True)
class Shown:
    """Which tokens the page shows; empty: all of them, from the newest."""

    subject: str = ""
    state: Literal["", "live", "ended"] = ""
    before: str = ""


async def _show_made(request: Request, caller: Caller, making: Awaitable[str]) -> Response:
    """The page with the new token, this once; or with what was wrong."""
    try:
        text = await making
    except Unauthenticated:
        raise
    except ApiError as error:
        return await _tokens(request, caller, problem=error, status=error.status)
    return await _tokens(request, caller, made=text, status=201)


async def _tokens(
    request: Request,
    caller: Caller,
    *,
    shown: Shown = Shown(),
    made: str | None = None,
    problem: ApiError | None = None,
    status: int = 200,
) -> Response:
    services = services_of(request)
    now = services.clock()
    found = await services.token_service.page(
        caller,
        subject=shown.subject or None,
        state=TokenState(shown.state) if shown.state else None,
        before=shown.before or None,
        limit=PAGE,
    )
    rows = [
        {
            "token": token,
            "age": span((now - token.created_at).total_seconds()),
            "used": span((now - token.last_used_at).total_seconds()) if token.last_used_at else "",
            "limits": limit_words(token.limits),
            "live": token.revoked_at is None and (token.expires_at is None or token.expires_at > now),
        }
        for token in found
    ]
    rules = services.token_service.rules
    older = {"subject": shown.subject, "state": shown.state, "before": found[-1].id if found else ""}
    context = {
        "rows": rows,
        "shown": shown,
        "states": list(TokenState),
        "older": urlencode(older) if len(found) == PAGE else "",
        "usual_days": f"{rules.default / DAY:g}",
        "most_days": f"{rules.longest / DAY:g}",
        "overlap_hours": f"{OVERLAP_HOURS:g}",
        "made": made,
        "problem": problem,
        "tenants": [m.tenant for m in services.tenancy.memberships(caller) if m.may_write],
        "periods": list(Period),
        "may_infer": Scope.INFERENCE in caller.scopes,
    }
    return html("tokens.html", {**await frame(request, caller, "tokens"), **context}, status)
