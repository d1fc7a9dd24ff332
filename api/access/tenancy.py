"""Which tenant a namespace belongs to, and which tenants a caller is a member of.

A namespace belongs to one tenant. Membership is `Tenant.spec.members`; the operator renders it into
RoleBindings, which Kubernetes enforces. Here it only narrows lists and names the tenant of a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from busbar.api.access.identity import Caller
from busbar.api.kubernetes.store import Store
from busbar.kube.types import Tenant
from busbar.kube.types.inference import InferenceLimits
from busbar.kube.types.tenant import Role, Subject, SubjectKind


@dataclass(frozen=True)
class Membership:
    """A caller's role in one tenant."""

    tenant: str
    role: str
    namespaces: tuple[str, ...]

    @property
    def may_write(self) -> bool:
        return self.role in ("admin", "member")


class Tenancy:
    """Answers questions about tenants from the store; has no state of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def tenants(self) -> list[Tenant]:
        return sorted(self._store.all(Tenant), key=lambda t: t.metadata.name)

    def tenant_of(self, namespace: str) -> str:
        """The tenant that owns a namespace; empty when none does."""
        for tenant in self._store.all(Tenant):
            if namespace in (tenant.spec.namespaces or ()):
                return tenant.metadata.name
        return ""

    def namespaces_of(self, tenant: str) -> tuple[str, ...]:
        found = self._store.find(Tenant, tenant)
        return tuple(found.spec.namespaces or ()) if found is not None else ()

    def inference_limits(self, tenant: str) -> InferenceLimits | None:
        """What all keys of a tenant together may use; None: without limits."""
        found = self._store.find(Tenant, tenant)
        return found.spec.inference if found is not None else None

    def memberships(self, caller: Caller) -> list[Membership]:
        """The caller's tenants, sorted by name. Where several members match the caller, the strongest role
        counts."""
        return self.memberships_of(caller.subject, caller.groups)

    def memberships_of(self, subject: str, groups: Iterable[str]) -> list[Membership]:
        """The same for a name and its groups."""
        held = tuple(groups)
        return [m for m in (membership(tenant, subject, held) for tenant in self.tenants()) if m]

    def membership(self, tenant: str, subject: str, groups: Iterable[str]) -> Membership | None:
        found = self._store.find(Tenant, tenant)
        return membership(found, subject, groups) if found else None


_RANK = {Role.VIEWER: 0, Role.MEMBER: 1, Role.ADMIN: 2}


def membership(tenant: Tenant, subject: str, groups: Iterable[str]) -> Membership | None:
    """The subject's role in a tenant, by `spec.members`; None when they are not a member."""
    held = set(groups)
    roles = [row.role for row in tenant.spec.members or () if _names(row.subject, subject, held)]
    if not roles:
        return None
    role = max(roles, key=_RANK.__getitem__)
    return Membership(tenant.metadata.name, role.value, tuple(tenant.spec.namespaces or ()))


def _names(row: Subject, subject: str, groups: set[str]) -> bool:
    if row.kind is SubjectKind.GROUP:
        return row.name in groups
    if row.kind is SubjectKind.SERVICE_ACCOUNT:
        return subject == f"system:serviceaccount:{row.namespace}:{row.name}"
    return row.name == subject
