"""What each route requires of its caller. Every route has exactly one of these; a test checks all routes.

    Public       anybody (login, probes, static files); says why
    AnyCaller    anybody who proved who they are; the handler filters by what they may see
    InNamespace  one question to Kubernetes about the namespace in the path
    AdminOnly    who may change Tenants
    GatewayOnly  the gateway's service account, on the internal port

Instances are FastAPI dependencies: `caller: Annotated[Caller, Depends(AnyCaller())]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends, Request
from fastapi.security import APIKeyCookie, HTTPBearer

from busbar.api.access.identity import Caller, Scope, Source
from busbar.api.access.sessions import COOKIE
from busbar.api.errors import Forbidden, Unauthenticated
from busbar.kube.resources import PODS, Resource

if TYPE_CHECKING:
    from busbar.api.services import Services

CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf_token"
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")

# Both only describe the schemes in OpenAPI; `authenticate` reads the request itself.
_BEARER = HTTPBearer(
    auto_error=False,
    scheme_name="bearer",
    description="A busbar token (`bb_…`), or a Kubernetes token for the audience `busbar-api`.",
)
_COOKIE = APIKeyCookie(
    name=COOKIE,
    auto_error=False,
    scheme_name="session",
    description="A browser session; writes also need the X-CSRF-Token header.",
)


def services_of(request: Request) -> Services:
    """The application's services."""
    return cast("Services", request.app.state.services)


async def authenticate(request: Request, *, again: bool = False) -> Caller:
    """The caller of a request. The result is kept on the request; with `again` it is determined anew, for
    answers that last.

    Raises:
        Unauthenticated: nobody we know.
        TooMany: too many wrong bearers came from the client's address.
        Forbidden: a session's write without its CSRF token, or a token without the scope `rest`.
    """
    known = getattr(request.state, "caller", None)
    if isinstance(known, Caller) and not again:
        return known
    services = services_of(request)
    authenticator = services.authenticator
    if header := request.headers.get("Authorization"):
        caller = await authenticator.by_header(header, services.forwarded.address(request.scope))
    elif cookie := request.cookies.get(COOKIE):
        caller = await authenticator.by_cookie(cookie, request.method, await _csrf(request))
    else:
        raise Unauthenticated("log in, or send `Authorization: Bearer <token>`")
    if Scope.REST not in caller.scopes:
        raise Forbidden("this token is for inference only; make one with the scope rest")
    request.state.caller = caller
    return caller


async def _csrf(request: Request) -> str | None:
    if value := request.headers.get(CSRF_HEADER):
        return value
    if request.headers.get("content-type", "").startswith(_FORMS):
        field = (await request.form()).get(CSRF_FIELD)
        return field if isinstance(field, str) else None
    return None


async def _authenticated(
    request: Request,
    _bearer: Annotated[object, Depends(_BEARER)] = None,
    _cookie: Annotated[object, Depends(_COOKIE)] = None,
) -> Caller:
    return await authenticate(request)


Authenticated = Annotated[Caller, Depends(_authenticated)]
"""The caller, and in OpenAPI the two ways to prove it."""


class Permission:
    """Base; subclasses are called per request."""


class Public(Permission):
    """Open to anybody."""

    def __init__(self, why: str) -> None:
        self.why = why

    async def __call__(self) -> None:
        return None


class AnyCaller(Permission):
    """Open to every caller with the scope `rest`; the handler filters by what each may see."""

    async def __call__(self, caller: Authenticated) -> Caller:
        return caller


class InNamespace(Permission):
    """Open to callers who may do `verb` to `resource` in the namespace of the path."""

    def __init__(
        self, verb: str, resource: Resource, subresource: str = "", of: Resource | None = None
    ) -> None:
        self.verb = verb
        self.resource = resource
        self.subresource = subresource
        self.of = of

    async def __call__(self, request: Request, caller: Authenticated) -> Caller:
        await services_of(request).authorizer.require(
            caller,
            self.verb,
            self.resource,
            request.path_params["namespace"],
            subresource=self.subresource,
            name=request.path_params.get("name", ""),
            subject_of=self.of,
        )
        return caller


class AdminOnly(Permission):
    """Open to callers who may change Tenants, and so decide what others may do."""

    async def __call__(self, request: Request, caller: Authenticated) -> Caller:
        if not await services_of(request).authorizer.administers(caller):
            raise Forbidden("this is for admins")
        return caller


class GatewayOnly(Permission):
    """Open to the gateway's service account."""

    async def __call__(self, request: Request, _bearer: Annotated[object, Depends(_BEARER)] = None) -> Caller:
        services = services_of(request)
        header = request.headers.get("Authorization")
        if not header:
            raise Unauthenticated("send the service account's token for the audience busbar-api")
        address = services.forwarded.address(request.scope)
        caller = await services.authenticator.by_header(header, address)
        if caller.source is not Source.KUBERNETES or caller.subject != services.settings.gateway_subject:
            raise Forbidden(f"{caller.subject} is not the gateway")
        return caller


def read_pod_log(resource: Resource) -> InNamespace:
    """May read the pods' logs of a kind."""
    return InNamespace("get", PODS, "log", of=resource)


__all__ = [
    "AdminOnly",
    "AnyCaller",
    "GatewayOnly",
    "InNamespace",
    "Permission",
    "Public",
    "authenticate",
    "read_pod_log",
    "services_of",
]
