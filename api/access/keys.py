"""Inference keys: what the gateway asks about a token, and the short-lived keys behind the try-it box.

A token is valid for inference until it expires or is revoked, if it has the scope and its owner is still a
member or admin of the tenant it counts for. Viewers may not use inference: they would spend the tenant's
budget.
"""

from __future__ import annotations

from datetime import timedelta

from busbar.api.access.identity import Caller, CallerRole, Scope
from busbar.api.access.spending import Limited, Spending
from busbar.api.access.tenancy import Tenancy
from busbar.api.access.tokens import Token, Tokens
from busbar.api.errors import Forbidden, Invalid, NotFound
from busbar.kube.contracts.allowances import key_account, tenant_account
from busbar.kube.contracts.keys import KeyIdentity

TRY_IT_LIFETIME = timedelta(minutes=10)
TRY_IT = "portal try-it"


class Keys:
    """Looks up inference keys and makes those of the try-it box."""

    def __init__(self, tokens: Tokens, tenancy: Tenancy, spending: Spending) -> None:
        self._tokens = tokens
        self._tenancy = tenancy
        self._spending = spending

    async def lookup(self, sha256: str, gateway: str = "") -> KeyIdentity:
        """What a key currently allows. `gateway` is the name under which the caller delivers usage.

        Raises:
            NotFound: unknown, expired, revoked, without the scope, or its owner left the tenant.
        """
        token = await self._tokens.find(sha256)
        if token is None or Scope.INFERENCE not in token.scopes:
            raise NotFound("no such key")
        tenant = self._tenant_of(token)
        if tenant is None:
            raise NotFound("no such key")
        await self._tokens.used(token)
        accounts, through = await self._spending.accounts(self._limited(token, tenant), gateway)
        return KeyIdentity(
            key_id=token.id,
            subject=token.subject,
            tenant=tenant,
            namespaces=list(self._tenancy.namespaces_of(tenant)),
            scopes=[Scope.INFERENCE.value],
            expires_at=token.expires_at,
            accounts=accounts,
            counted_through=through,
        )

    def _limited(self, token: Token, tenant: str) -> list[Limited]:
        """The accounts that a token's requests count in, as far as they have limits."""
        accounts = (
            (key_account(token.id), token.limits),
            (tenant_account(tenant), self._tenancy.inference_limits(tenant)),
        )
        return [(name, limits) for name, limits in accounts if limits is not None]

    def tenant_for(self, caller: Caller, asked: str | None) -> str | None:
        """The tenant that a caller's new inference token counts for.

        Raises:
            Invalid: none was named and the caller has none or several.
            Forbidden: the caller may not spend for the one named.
        """
        mine = [m.tenant for m in self._tenancy.memberships(caller) if m.may_write]
        if asked is None:
            if len(mine) == 1:
                return mine[0]
            raise Invalid(
                f"name the tenant that inference counts for: {', '.join(mine)}"
                if mine
                else "you are a member of no tenant, so inference would count for nobody; ask an admin",
                field="tenant",
            )
        if asked not in mine and caller.role is not CallerRole.ADMIN:
            raise Forbidden(f"you may not spend for tenant {asked}", field="tenant")
        return asked

    async def try_it(self, caller: Caller, namespace: str) -> str:
        """A key for one completion from the portal, valid for ten minutes and never sent to the browser."""
        tenant = self._tenancy.tenant_of(namespace)
        membership = self._tenancy.membership(tenant, caller.subject, caller.groups) if tenant else None
        if not tenant or (caller.role is not CallerRole.ADMIN and not (membership and membership.may_write)):
            raise Forbidden(f"only members of the tenant of namespace {namespace} may ask its models")
        text, _ = await self._tokens.create(
            caller.subject,
            created_by=caller.subject,
            role=caller.role,
            scopes=[Scope.INFERENCE],
            tenant=tenant,
            description=TRY_IT,
            lifetime=TRY_IT_LIFETIME,
            hidden=True,
        )
        return text

    def _tenant_of(self, token: Token) -> str | None:
        """The tenant that a token's usage counts for; None when its owner may no longer use inference
        there."""
        if token.tenant is not None:
            found = self._tenancy.membership(token.tenant, token.subject, token.groups)
            if token.role is CallerRole.ADMIN or (found is not None and found.may_write):
                return token.tenant if self._tenancy.namespaces_of(token.tenant) else None
            return None
        mine = [m.tenant for m in self._tenancy.memberships_of(token.subject, token.groups) if m.may_write]
        return mine[0] if len(mine) == 1 else None
