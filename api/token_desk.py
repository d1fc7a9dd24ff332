"""Making and ending tokens for callers: nobody gives away more than they have."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from busbar.api.audit import Audit
from busbar.api.authorization import Authorizer
from busbar.api.errors import Forbidden
from busbar.api.identity import Caller, Role, Scope
from busbar.api.keys import Keys
from busbar.api.tokens import Token, Tokens


class TokenDesk:
    """Tokens over REST and in the portal."""

    def __init__(self, tokens: Tokens, keys: Keys, authorizer: Authorizer, audit: Audit) -> None:
        self._tokens = tokens
        self._keys = keys
        self._authorizer = authorizer
        self._audit = audit

    async def create(
        self,
        caller: Caller,
        *,
        scopes: Sequence[Scope],
        role: Role = Role.USER,
        subject: str | None = None,
        tenant: str | None = None,
        description: str = "",
        lifetime: timedelta | None = None,
    ) -> tuple[str, Token]:
        """A token for the caller, or (admins) for somebody else.

        Raises:
            Forbidden: more than the caller has: another subject, the admin role, a missing scope.
            Invalid: the tenant is not clear, or the name is reserved.
        """
        owner = subject or caller.subject
        async with self._audit.write(caller.subject, "create", "Token", name=owner, source=caller.source):
            admin = await self._authorizer.administers(caller)
            if owner != caller.subject and not admin:
                raise Forbidden("only admins make tokens for other people", field="subject")
            if role is Role.ADMIN and not admin:
                raise Forbidden("only admins make admin tokens", field="role")
            missing = [s.value for s in scopes if s not in caller.scopes and not admin]
            if missing:
                raise Forbidden(f"you do not have the scope {missing[0]} yourself", field="scopes")
            if Scope.INFERENCE in scopes and owner == caller.subject and not (admin and tenant is None):
                tenant = self._keys.tenant_for(caller, tenant)
            return await self._tokens.create(
                owner,
                created_by=caller.subject,
                role=role,
                scopes=scopes,
                tenant=tenant,
                description=description,
                lifetime=lifetime,
            )

    async def listing(self, caller: Caller) -> list[Token]:
        """One's own tokens; everybody's for admins."""
        admin = await self._authorizer.administers(caller)
        return await self._tokens.listing(None if admin else caller.subject)

    async def revoke(self, caller: Caller, token_id: str) -> None:
        """End a token of one's own, or (admins) anybody's."""
        async with self._audit.write(caller.subject, "revoke", "Token", name=token_id, source=caller.source):
            admin = await self._authorizer.administers(caller)
            await self._tokens.revoke(token_id, owner=None if admin else caller.subject)
