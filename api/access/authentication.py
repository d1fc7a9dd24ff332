"""From a request to a caller.

    Authorization: Bearer bb_…      a busbar token: one look-up by its SHA-256
    Authorization: Bearer <other>   a Kubernetes token: TokenReview with the audience `busbar-api`
    Cookie: busbar_session=…        a browser; writes must also carry the session's CSRF token

Headers that only claim a user name are never read. Reviews are cached: a positive answer for 60 s, a negative
one for 5 s. Wrong bearers in headers are counted (`wrong_bearers`); the login counts its own.
"""

from __future__ import annotations

from busbar.api.access.identity import Caller, CallerRole, Scope, Source
from busbar.api.access.sessions import Sessions
from busbar.api.access.tokens import Tokens, caller_of
from busbar.api.access.wrong_bearers import WrongBearers
from busbar.api.errors import Forbidden, Unauthenticated, Unavailable
from busbar.kube.contracts import auth
from busbar.kube.contracts.keys import TOKEN_PREFIX, digest_of

MAX_BEARER_CHARS = 16 * 1024
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Authenticator:
    """Identifies the caller of a request."""

    def __init__(
        self, reviews: auth.Reviewer, tokens: Tokens, sessions: Sessions, wrong: WrongBearers
    ) -> None:
        self._wrong = wrong
        self._reviews = reviews
        self._tokens = tokens
        self._sessions = sessions

    async def by_header(self, authorization: str, address: str) -> Caller:
        """The caller of an Authorization header.

        Args:
            address: the client's, for which a wrong bearer counts.

        Raises:
            Unauthenticated: not a bearer, or one that nobody vouches for.
            TooMany: too many wrong ones came from there.
        """
        scheme, _, bearer = authorization.partition(" ")
        bearer = bearer.strip()
        if scheme.lower() != "bearer" or not bearer or len(bearer) > MAX_BEARER_CHARS:
            raise Unauthenticated("send `Authorization: Bearer <token>`")
        self._wrong.check(bearer, address)
        try:
            caller = await self.by_bearer(bearer)
        except Unauthenticated as error:
            await self._wrong.refused(bearer, address, error)
            raise
        self._wrong.accepted(bearer)
        return caller

    async def by_bearer(self, bearer: str) -> Caller:
        """The caller of a busbar or Kubernetes token."""
        if bearer.startswith(TOKEN_PREFIX):
            token = await self._tokens.find(digest_of(bearer))
            if token is None:
                raise Unauthenticated("the token is unknown, expired or revoked; make a new one")
            await self._tokens.used(token)
            return caller_of(token)
        return await self.by_review(bearer)

    async def by_review(self, bearer: str) -> Caller:
        """The caller of a Kubernetes token made for the audience `busbar-api`."""
        try:
            known = await self._reviews.authenticate(bearer, auth.AUDIENCE_API)
        except auth.ReviewError as error:
            raise Unavailable(
                "Kubernetes does not answer, so tokens cannot be checked", retry_after_s=2
            ) from error
        if known is None or not known.username:
            raise Unauthenticated(
                f"Kubernetes does not accept this token for the audience {auth.AUDIENCE_API}; "
                f"make one with `kubectl create token NAME --audience {auth.AUDIENCE_API}`"
            )
        return Caller(
            subject=known.username,
            groups=tuple(sorted(known.groups)),
            role=CallerRole.USER,
            scopes=frozenset({Scope.REST}),
            source=Source.KUBERNETES,
            uid=known.uid,
            extra=known.extra,
        )

    async def by_cookie(self, cookie: str, method: str, csrf: str | None) -> Caller:
        """The caller of a session cookie.

        Raises:
            Unauthenticated: no such session.
            Forbidden: a write without the session's CSRF token.
        """
        caller = await self._sessions.find(cookie) if cookie else None
        if caller is None or caller.session is None:
            raise Unauthenticated("log in again: the session is over")
        if method not in SAFE_METHODS and not self._sessions.csrf_matches(caller.session, csrf or ""):
            raise Forbidden("the form's CSRF token is missing or stale; reload the page and repeat")
        return caller
