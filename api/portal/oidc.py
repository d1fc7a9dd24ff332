"""Login through OpenID Connect: authorization code with PKCE (S256) and nonce, by Authlib.

Loaded only where it is configured. The state is kept in a short-lived signed cookie; a forged or expired
state answers 400.
"""

from typing import Annotated, Any

from authlib.integrations.base_client import OAuthError
from authlib.integrations.starlette_client import OAuth
from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import Response
from joserfc.errors import JoseError
from starlette.middleware.sessions import SessionMiddleware

from busbar.api.access.identity import Caller, CallerRole, Source, check_subject, foreign_groups
from busbar.api.access.throttle import of_address, of_subject
from busbar.api.dependencies import Public, services_of
from busbar.api.errors import BadRequest, Invalid, Unavailable
from busbar.api.portal.login import begin, local, refused
from busbar.api.services import Services
from busbar.api.settings import Oidc

STATE_COOKIE = "busbar_oidc"
STATE_S = 600
NEXT = "busbar_next"

Anybody = Annotated[None, Depends(Public("who is not logged in must be able to log in"))]


def install(app: FastAPI, services: Services) -> None:
    """The two routes of the flow, and the cookie that carries its state."""
    settings = services.settings
    oidc = settings.oidc
    assert oidc is not None
    app.add_middleware(
        SessionMiddleware,
        secret_key=settings.session_secret,
        session_cookie=STATE_COOKIE,
        max_age=STATE_S,
        same_site="lax",
        https_only=services.forwarded.always_https,
    )
    provider = OAuth().register(
        name="oidc",
        client_id=oidc.client_id,
        client_secret=oidc.client_secret,
        server_metadata_url=oidc.issuer.rstrip("/") + "/.well-known/openid-configuration",
        client_kwargs={"scope": "openid email profile groups", "code_challenge_method": "S256"},
    )

    @app.get("/login/oidc", include_in_schema=False)
    async def start(
        request: Request, _: Anybody, after: Annotated[str, Query(alias="next", max_length=2000)] = "/"
    ) -> Response:
        request.session[NEXT] = local(after)
        back = (settings.public_url or str(request.base_url)).rstrip("/") + "/login/oidc/callback"
        with _provider_errors():
            response: Response = await provider.authorize_redirect(request, back)
        return response

    @app.get("/login/oidc/callback", include_in_schema=False)
    async def callback(request: Request, _: Anybody) -> Response:
        built = services_of(request)
        address = built.forwarded.address(request.scope)
        built.login_throttle.take([of_address(address)])
        try:
            with _provider_errors():
                token = await provider.authorize_access_token(request)
            caller = caller_of(token.get("userinfo") or {}, oidc)
        except BadRequest as error:
            await refused(built, "", address, error, Source.OIDC)
            raise
        except Unavailable:
            built.login_throttle.give_back([of_address(address)])
            raise
        built.login_throttle.give_back([of_address(address)])
        built.login_throttle.take([of_subject(caller.subject)])
        await built.audit.note(
            caller.subject, "login", "Session", "", caller.subject, "Done", "", caller.source
        )
        after = local(str(request.session.pop(NEXT, "/")))
        return await begin(request, caller, after)


def caller_of(claims: dict[str, Any], oidc: Oidc) -> Caller:
    """The caller that verified claims describe.

    Raises:
        BadRequest: the provider sent no name, an unverified address, or a name that is reserved.
    """
    name = claims.get(oidc.username_claim)
    if not isinstance(name, str) or not name:
        raise BadRequest(f"the provider sent no claim {oidc.username_claim}, which names the person")
    if oidc.username_claim == "email" and claims.get("email_verified") is False:
        raise BadRequest("the provider has not verified this e-mail address")
    try:
        check_subject(name)
    except Invalid as error:
        raise BadRequest(error.message) from error
    groups = claims.get(oidc.groups_claim) or []
    held = foreign_groups([g for g in groups if isinstance(g, str)] if isinstance(groups, list) else [])
    admin = bool(oidc.admin_group) and oidc.admin_group in held
    return Caller(
        subject=name, groups=held, role=CallerRole.ADMIN if admin else CallerRole.USER, source=Source.OIDC
    )


class _provider_errors:
    """Errors of the browser or the provider as errors of the API."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import httpx2

        if isinstance(error, OAuthError | JoseError):
            raise BadRequest("the login was not begun here, or took too long; start again") from error
        if isinstance(error, httpx2.HTTPError):
            raise Unavailable("the login provider does not answer; try again") from error
