"""Who is asking.

A caller is one Kubernetes subject (user and groups), however they proved it: a busbar token, a Kubernetes
token, or a browser session that began with one of these or with OpenID Connect. Kubernetes' own
authorization then decides what that subject may do, so that kubectl, REST and the portal never disagree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from busbar.api.errors import Invalid

ADMIN_GROUP = "busbar:admins"
"""The group that the chart binds to the ClusterRole `busbar-admin`; admin tokens and sessions carry it."""
AUTHENTICATED_GROUP = "system:authenticated"

_SUBJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+:-]{0,252}")


class CallerRole(StrEnum):
    """What a token grants its owner beyond their own rights."""

    ADMIN = "admin"
    USER = "user"


class Scope(StrEnum):
    """What a token may be used for."""

    REST = "rest"
    INFERENCE = "inference"


class Source(StrEnum):
    """How the caller proved who they are."""

    TOKEN = "token"
    KUBERNETES = "kubernetes"
    OIDC = "oidc"


@dataclass(frozen=True)
class Caller:
    """An authenticated subject."""

    subject: str
    groups: tuple[str, ...] = ()
    role: CallerRole = CallerRole.USER
    scopes: frozenset[Scope] = frozenset({Scope.REST, Scope.INFERENCE})
    source: Source = Source.TOKEN
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()
    token_id: str | None = None
    tenant: str | None = None
    """Tenant that the caller's inference counts for, when the token names one."""
    session: str | None = field(default=None, repr=False)
    """The session cookie's SHA-256, for browser callers."""

    @property
    def review_groups(self) -> tuple[str, ...]:
        """The groups that access reviews are asked with."""
        extra = (
            (ADMIN_GROUP,) if self.role is CallerRole.ADMIN and self.source is not Source.KUBERNETES else ()
        )
        return tuple(sorted({*self.groups, AUTHENTICATED_GROUP, *extra}))


def check_subject(name: str, field_name: str = "subject") -> str:
    """The name, if it may own tokens. Names of Kubernetes' own subjects are refused: a token must never
    make its owner `system:masters` or a service account.

    Raises:
        Invalid: the name is empty, too long, or reserved.
    """
    if not _SUBJECT.fullmatch(name):
        raise Invalid(
            f"{name!r} is not a subject; use letters, digits and . _ @ + : - (at most 253)", field=field_name
        )
    if name.startswith(("system:", "busbar:")):
        raise Invalid(
            f"{name!r} is reserved for Kubernetes; people's names do not begin so", field=field_name
        )
    return name


def foreign_groups(groups: list[str]) -> tuple[str, ...]:
    """Groups that an identity provider may assert: everything but Kubernetes' and Busbar's own."""
    return tuple(sorted({g for g in groups if not g.startswith(("system:", "busbar:"))}))
