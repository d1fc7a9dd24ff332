"""Which tenant a namespace belongs to, and which tenants a caller is a member of.

The namespace decides the tenant, always. Membership is `Tenant.spec.members`; the operator renders it into
RoleBindings, which Kubernetes checks. Here it only narrows lists and names the tenant of a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from busbar.api.identity import Caller
from busbar.api.kubernetes import Object
from busbar.api.store import Store
from busbar.kube.resources import TENANTS


@dataclass(frozen=True)
class Membership:
    """A caller's place in one tenant."""

    tenant: str
    role: str
    namespaces: tuple[str, ...]

    @property
    def may_write(self) -> bool:
        return self.role in ("admin", "member")


class Tenancy:
    """Reads the store's tenants; holds nothing itself."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def tenants(self) -> list[Object]:
        return sorted(self._store.all(TENANTS), key=lambda t: str(t["metadata"]["name"]))

    def tenant_of(self, namespace: str) -> str:
        """The tenant that owns a namespace; empty when none does."""
        for tenant in self._store.all(TENANTS):
            if namespace in (tenant.get("spec", {}).get("namespaces") or []):
                return str(tenant["metadata"]["name"])
        return ""

    def namespaces_of(self, tenant: str) -> tuple[str, ...]:
        found = self._store.find(TENANTS, tenant)
        return tuple((found or {}).get("spec", {}).get("namespaces") or ())

    def memberships(self, caller: Caller) -> list[Membership]:
        """The caller's tenants, by name; the strongest role where several rows name them."""
        return self.memberships_of(caller.subject, caller.groups)

    def memberships_of(self, subject: str, groups: Iterable[str]) -> list[Membership]:
        """The same for a name and its groups."""
        held = tuple(groups)
        return [m for m in (membership(tenant, subject, held) for tenant in self.tenants()) if m]

    def membership(self, tenant: str, subject: str, groups: Iterable[str]) -> Membership | None:
        found = self._store.find(TENANTS, tenant)
        return membership(found, subject, groups) if found else None


_RANK = {"viewer": 0, "member": 1, "admin": 2}


def membership(tenant: Object, subject: str, groups: Iterable[str]) -> Membership | None:
    """What a tenant's members say of a subject; None when nothing."""
    spec = tenant.get("spec") or {}
    held = set(groups)
    roles = [
        str(member.get("role") or "member")
        for member in spec.get("members") or []
        if _names(member.get("subject") or {}, subject, held)
    ]
    if not roles:
        return None
    role = max(roles, key=lambda r: _RANK.get(r, -1))
    return Membership(str(tenant["metadata"]["name"]), role, tuple(spec.get("namespaces") or ()))


def _names(row: Object, subject: str, groups: set[str]) -> bool:
    kind, name = row.get("kind", "User"), row.get("name", "")
    if kind == "Group":
        return name in groups
    if kind == "ServiceAccount":
        return subject == f"system:serviceaccount:{row.get('namespace', '')}:{name}"
    return bool(name == subject)
