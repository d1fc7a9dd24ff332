"""Creates, rotates and revokes tokens for callers. Nobody can create a token with more rights than their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from busbar.api.access.audit import Audit
from busbar.api.access.authorization import Authorizer
from busbar.api.access.identity import Caller, CallerRole, Scope
from busbar.api.access.keys import Keys
from busbar.api.access.throttle import Throttle, of_address, of_subject
from busbar.api.access.token_rules import TokenRules
from busbar.api.access.tokens import Token, Tokens, TokenState
from busbar.api.errors import Forbidden, Invalid
from busbar.kube.types.inference import InferenceLimits


class TokenService:
    """What REST and the portal call to manage tokens."""

    def __init__(
        self,
        tokens: Tokens,
        rules: TokenRules,
        throttle: Throttle,
        keys: Keys,
        authorizer: Authorizer,
        audit: Audit,
    ) -> None:
        self._tokens = tokens
        self.rules = rules
        self._throttle = throttle
        self._keys = keys
        self._authorizer = authorizer
        self._audit = audit

    async def create(
        self,
        caller: Caller,
        *,
        scopes: Sequence[Scope],
        role: CallerRole = CallerRole.USER,
        subject: str | None = None,
        tenant: str | None = None,
        description: str = "",
        lifetime: timedelta | None = None,
        limits: InferenceLimits | None = None,
        address: str,
    ) -> tuple[str, Token]:
        """A token for the caller, or (admins) for somebody else.

        Args:
            address: the client's, by which its requests are counted.

        Raises:
            TooMany: the caller or the address made too many a moment ago; this is not audited.
            Forbidden: more than the caller has: another subject, the admin role, a missing scope.
            Invalid: the tenant is not clear, the name is reserved, the lifetime is too long, or there are limits of
                inference without its scope.
            Conflict: the owner has as many live tokens as one person may have.
        """
        owner = subject or caller.subject
        self._throttle.take((of_address(address), of_subject(caller.subject)))
        async with self._audit.write(caller.subject, "create", "Token", name=owner, source=caller.source):
            admin = await self._authorizer.administers(caller)
            if owner != caller.subject and not admin:
                raise Forbidden("only admins make tokens for other people", field="subject")
            _check_rights(caller, admin, role, scopes)
            if limits is not None and Scope.INFERENCE not in scopes:
                raise Invalid("limits are of inference, and the token lacks that scope", field="limits")
            if Scope.INFERENCE in scopes and owner == caller.subject and not (admin and tenant is None):
                tenant = self._keys.tenant_for(caller, tenant)
            return await self._tokens.create(
                owner,
                created_by=caller.subject,
                role=role,
                scopes=scopes,
                tenant=tenant,
                description=description,
                lifetime=self.rules.lifetime(lifetime),
                limits=limits,
                limit=self.rules.per_person,
            )

    async def rotate(
        self, caller: Caller, token_id: str, *, overlap: timedelta, address: str
    ) -> tuple[str, Token, Token]:
        """A token like one of the caller's own, or (admins) like anybody's, which ends after `overlap`.

        The new one lives as long as the former was made for, or for the usual time where that had no end.

        Args:
            address: the client's, by which its requests are counted.

        Returns:
            The new token's text and record, and the former one's record.

        Raises:
            TooMany: the caller or the address made too many a moment ago; this is not audited.
            NotFound: no such token, or it is somebody else's.
            Forbidden: it has more rights than the caller.
            Conflict: it has ended, or its owner has as many live tokens as one person may have.
        """
        self._throttle.take((of_address(address), of_subject(caller.subject)))
        async with self._audit.write(
            caller.subject, "rotate", "Token", name=token_id, source=caller.source
        ) as record:
            admin = await self._authorizer.administers(caller)
            former = await self._tokens.get(token_id, owner=None if admin else caller.subject)
            _check_rights(caller, admin, former.role, list(former.scopes))
            was = former.expires_at - former.created_at if former.expires_at is not None else None
            text, made, former = await self._tokens.rotate(
                former,
                created_by=caller.subject,
                overlap=overlap,
                lifetime=self.rules.lifetime_again(was),
                limit=self.rules.per_person,
            )
            record.message = f"token {made.id} replaces it"
            return text, made, former

    async def page(
        self,
        caller: Caller,
        *,
        subject: str | None = None,
        state: TokenState | None = None,
        before: str | None = None,
        limit: int = 100,
    ) -> list[Token]:
        """One's own tokens, newest first; everybody's or one person's for admins.

        Raises:
            Forbidden: somebody else's, and the caller is no admin.
            Invalid: there is no token `before`.
        """
        if not await self._authorizer.administers(caller):
            if subject not in (None, caller.subject):
                raise Forbidden("only admins see other people's tokens", field="subject")
            subject = caller.subject
        return await self._tokens.page(subject=subject, state=state, before=before, limit=limit)

    async def revoke(self, caller: Caller, token_id: str) -> None:
        """Revoke one of the caller's own tokens, or (admins) anybody's."""
        async with self._audit.write(caller.subject, "revoke", "Token", name=token_id, source=caller.source):
            admin = await self._authorizer.administers(caller)
            await self._tokens.revoke(token_id, owner=None if admin else caller.subject)

    async def revoke_many(self, caller: Caller, subject: str | None) -> int:
        """Revoke all live tokens of one person, or (admins, `subject` None) of everybody, and end their browser
        sessions. The token and the session that the request came with stay.

        Returns:
            How many tokens were revoked.

        Raises:
            Forbidden: somebody else's, and the caller is no admin.
        """
        async with self._audit.write(
            caller.subject, "revoke", "Tokens", name=subject or "*", source=caller.source
        ) as record:
            if subject != caller.subject and not await self._authorizer.administers(caller):
                raise Forbidden("only admins revoke other people's tokens", field="subject")
            count = await self._tokens.revoke_many(
                subject, keep_token=caller.token_id, keep_session=caller.session
            )
            record.message = f"{count} live tokens"
        return count


def _check_rights(caller: Caller, admin: bool, role: CallerRole, scopes: Sequence[Scope]) -> None:
    """Refuses a token with more rights than the caller has.

    Raises:
        Forbidden: the admin role, or a scope, that the caller lacks.
    """
    if role is CallerRole.ADMIN and not admin:
        raise Forbidden("only admins make admin tokens", field="role")
    missing = [s.value for s in scopes if s not in caller.scopes and not admin]
    if missing:
        raise Forbidden(f"you do not have the scope {missing[0]} yourself", field="scopes")
