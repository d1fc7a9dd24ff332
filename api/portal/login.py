"""Logging in and out: by pasting a token, or through OpenID Connect where it is set up."""

from datetime import timedelta
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Form, Query, Request
from fastapi.responses import RedirectResponse, Response

from busbar.api.access.identity import Caller, Scope, Source
from busbar.api.access.sessions import COOKIE
from busbar.api.access.throttle import of_address, of_subject
from busbar.api.dependencies import AnyCaller, Public, services_of
from busbar.api.errors import ApiError, Forbidden, TooMany, Unauthenticated
from busbar.api.portal.render import html
from busbar.api.services import Services

KUBERNETES_SESSION = timedelta(hours=1)
"""A session that began with a Kubernetes token is short, because its revocation cannot be noticed."""

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
        address = services.forwarded.address(request.scope)
        try:
            caller = await _known(services, address, token.strip())
            if Scope.REST not in caller.scopes:
                raise Forbidden("This token is for inference only; use one with the scope rest.")
        except (Unauthenticated, TooMany) as error:
            return _page(request, after, error.message, error.status, error.retry_after_s)
        except Forbidden as error:
            await refused(services, caller.subject, address, error, caller.source)
            return _page(request, after, error.message, error.status)
        await services.audit.note(
            caller.subject, "login", "Session", "", caller.subject, "Done", "", caller.source
        )
        lifetime = KUBERNETES_SESSION if caller.source is Source.KUBERNETES else None
        return await begin(request, caller, after, lifetime)

    @routes.post("/logout")
    async def logout(request: Request, caller: Annotated[Caller, Depends(AnyCaller())]) -> Response:
        if caller.session is not None:
            await services_of(request).sessions.close(caller.session)
        response = RedirectResponse("/login", status_code=303)
        response.delete_cookie(COOKIE, path="/")
        return response

    return routes


async def _known(services: Services, address: str, bearer: str) -> Caller:
    """The caller of a bearer. A wrong one counts for the address, a right one for its subject, so that people
    behind one address do not use up each other's logins.

    Raises:
        Unauthenticated: nobody vouches for it; this is audited.
        TooMany: too many wrong ones came from this address, or too many right ones of this person.
    """
    services.login_throttle.take([of_address(address)])
    try:
        caller = await services.authenticator.by_bearer(bearer)
    except Unauthenticated as error:
        await refused(services, "", address, error, "portal")
        raise
    services.login_throttle.give_back([of_address(address)])
    services.login_throttle.take([of_subject(caller.subject)])
    return caller


async def refused(services: Services, subject: str, address: str, error: ApiError, source: str) -> None:
    """Write a refused login to the audit trail; the subject is empty where nobody vouches for one."""
    await services.audit.note(subject, "login", "Session", "", address, error.code, error.message, source)


async def begin(request: Request, caller: Caller, after: str, lifetime: timedelta | None = None) -> Response:
    """Open a session and go where the person wanted to. The cookie is Secure where the browser speaks TLS."""
    services = services_of(request)
    cookie = await services.sessions.open(caller, lifetime)
    response = RedirectResponse(local(after), status_code=303)
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=int((lifetime or services.sessions.lifetime).total_seconds()),
        httponly=True,
        samesite="lax",
        secure=services.forwarded.is_https(request.scope),
        path="/",
    )
    return response


def local(target: str) -> str:
    """The target if it is a path of ours; `/` otherwise, so that a link cannot lead elsewhere."""
    if not target.startswith("/") or target.startswith("//") or "\\" in target:
        return "/"
    parts = urlsplit(target)
    return target if not parts.scheme and not parts.netloc else "/"


def same_origin(request: Request) -> None:
    """Refuse a login form that another site submitted (there is no session yet to hold a CSRF token).

    Raises:
        Forbidden: the Origin header names another host, or hides it (`null`: a sandboxed frame, a redirect).
    """
    origin, host = request.headers.get("Origin"), request.headers.get("Host")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        raise Forbidden("this form was sent from another site")
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden("this form was sent from another site")


def _page(
    request: Request, after: str, problem: str, status: int = 200, retry_after_s: int | None = None
) -> Response:
    oidc = services_of(request).settings.oidc is not None
    response = html("login.html", {"next": local(after), "problem": problem, "oidc": oidc}, status)
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(retry_after_s)
    return response
