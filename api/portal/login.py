"""Logging in and out: by pasting a token, or through OpenID Connect where it is set up."""

from datetime import timedelta
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Form, Query, Request
from fastapi.responses import RedirectResponse, Response

from busbar.api.errors import Forbidden, Unauthenticated
from busbar.api.identity import Caller, Scope, Source
from busbar.api.permissions import Known, Public, services_of
from busbar.api.portal.render import html
from busbar.api.services import Services
from busbar.api.sessions import COOKIE

KUBERNETES_SESSION = timedelta(hours=1)
"""A session that began with a Kubernetes token is short: we cannot hear when that token is revoked."""

Anybody = Annotated[None, Depends(Public("who is not logged in must be able to log in"))]


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/login")
    async def form(
        request: Request, _: Anybody, after: Annotated[str, Query(alias="next", max_length=2000)] = "/"
    ) -> Response:
        return _page(request, after, "")

    @routes.post("/login")
    async def submit(
        request: Request,
        _: Anybody,
        token: Annotated[str, Form(max_length=16_384)],
        after: Annotated[str, Form(alias="next", max_length=2000)] = "/",
    ) -> Response:
        same_origin(request)
        services = services_of(request)
        try:
            caller = await services.authenticator.by_bearer(token.strip())
        except Unauthenticated as error:
            return _page(request, after, error.message, 401)
        if Scope.REST not in caller.scopes:
            return _page(
                request, after, "This token is for inference only; use one with the scope rest.", 403
            )
        await services.audit.note(
            caller.subject, "login", "Session", "", caller.subject, "Done", "", caller.source
        )
        lifetime = KUBERNETES_SESSION if caller.source is Source.KUBERNETES else None
        return await begin(services, caller, after, lifetime)

    @routes.post("/logout")
    async def logout(request: Request, caller: Annotated[Caller, Depends(Known())]) -> Response:
        if caller.session is not None:
            await services_of(request).sessions.close(caller.session)
        response = RedirectResponse("/login", status_code=303)
        response.delete_cookie(COOKIE, path="/")
        return response

    return routes


async def begin(
    services: Services, caller: Caller, after: str, lifetime: timedelta | None = None
) -> Response:
    """Open a session and go where the person wanted to."""
    cookie = await services.sessions.open(caller, lifetime)
    response = RedirectResponse(local(after), status_code=303)
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=int((lifetime or services.sessions.lifetime).total_seconds()),
        httponly=True,
        samesite="lax",
        secure=services.settings.secure_cookies,
        path="/",
    )
    return response


def local(target: str) -> str:
    """The target if it is a path of ours; `/` otherwise, so that a link cannot lead elsewhere."""
    parts = urlsplit(target)
    plain = target.startswith("/") and not target.startswith(("//", "/\\")) and "\\" not in target
    return target if plain and not parts.scheme and not parts.netloc else "/"


def same_origin(request: Request) -> None:
    """Refuse a login form that another site submitted (there is no session yet to hold a CSRF token).

    Raises:
        Forbidden: the Origin header names another host.
    """
    origin = request.headers.get("Origin")
    if origin not in (None, "null") and urlsplit(str(origin)).netloc != request.headers.get("Host"):
        raise Forbidden("this form was sent from another site")
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("this form was sent from another site")


def _page(request: Request, after: str, problem: str, status: int = 200) -> Response:
    oidc = services_of(request).settings.oidc is not None
    return html("login.html", {"next": local(after), "problem": problem, "oidc": oidc}, status)
