"""What a caller may do. Kubernetes decides (SubjectAccessReview); its answers are cached briefly.

A positive answer is cached for 60 seconds and a negative one for 5 (`busbar.kube.contracts.auth`): a removed
member loses access within a minute, and a new one gains it almost at once. A list costs one question about
the whole cluster; a caller who may not see everything sees the namespaces of their own tenants. A refused
read answers "does not exist", so that nobody learns whether another tenant's object exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from busbar.api.access.identity import Caller
from busbar.api.access.tenancy import Tenancy
from busbar.api.errors import Forbidden, NotFound, Unavailable
from busbar.api.kubernetes.client import KubeApi
from busbar.kube.contracts import auth
from busbar.kube.errors import KubeError
from busbar.kube.resources import TENANTS, Resource

LOOK_AGAIN_S = 60.0
"""An answer that lasts, as a log that is followed, asks for its reader again after this time, because tokens are revoked and
roles change."""
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True)
class Reach:
    """Which namespaces a caller's lists cover."""

    everything: bool
    namespaces: frozenset[str] = frozenset()

    def __contains__(self, namespace: object) -> bool:
        return self.everything or namespace in self.namespaces


def reviewer(kube: KubeApi) -> auth.Reviewer:
    """The reviewer of `busbar.kube.contracts.auth`, which asks through this process's client."""

    async def post(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return await kube.call("POST", path, body=body)
        except KubeError as error:
            raise auth.ReviewError(f"the API server could not be asked (POST {path}): {error}") from error

    return auth.Reviewer(post)


class Authorizer:
    """Asks Kubernetes on behalf of callers."""

    def __init__(self, reviews: auth.Reviewer, tenancy: Tenancy) -> None:
        self._reviews = reviews
        self._tenancy = tenancy

    async def allowed(
        self, caller: Caller, verb: str, resource: Resource, namespace: str = "", subresource: str = ""
    ) -> bool:
        """Whether Kubernetes would let the caller do this; `namespace` empty asks about the whole cluster."""
        access = auth.Access(
            verb, resource.group, resource.plural, namespace or None, None, subresource or None
        )
        asked = auth.Caller(caller.subject, caller.uid, caller.review_groups, caller.extra)
        try:
            return await self._reviews.is_allowed(asked, access)
        except auth.ReviewError as error:
            raise Unavailable(
                "Kubernetes does not answer, so permissions cannot be checked; try again in a moment",
                retry_after_s=2,
            ) from error

    async def require(
        self,
        caller: Caller,
        verb: str,
        resource: Resource,
        namespace: str,
        *,
        subresource: str = "",
        name: str = "",
        subject_of: Resource | None = None,
    ) -> None:
        """Raise unless the caller may do this in the namespace.

        Args:
            subject_of: the kind to name in the refusal, where `resource` is only a means (events, pod logs).

        Raises:
            NotFound: they may not even look there; same words whether it exists or not.
            Forbidden: they may look, but not do this.
        """
        # Both become parts of paths and selectors. Nothing can exist under an invalid name, so Kubernetes is not asked.
        if not _LABEL.fullmatch(namespace) or (name and not _NAME.fullmatch(name)):
            raise NotFound(not_found(subject_of or resource, namespace, name))
        if await self.allowed(caller, verb, resource, namespace, subresource):
            return
        looked_at = subject_of or resource
        may_look = (verb not in ("get", "list", "watch") or subject_of is not None) and await self.allowed(
            caller, "get", looked_at, namespace
        )
        if may_look:
            what = f"{resource.plural}/{subresource}" if subresource else resource.plural
            raise Forbidden(
                f"{caller.subject} may not {verb} {what} in namespace {namespace}; ask its tenant's admin"
            )
        raise NotFound(not_found(looked_at, namespace, name))

    async def reach(self, caller: Caller, resource: Resource) -> Reach:
        """The namespaces that the caller's lists of this kind cover: one question to Kubernetes, at most."""
        if await self.allowed(caller, "list", resource):
            return Reach(everything=True)
        spaces = {space for m in self._tenancy.memberships(caller) for space in m.namespaces}
        return Reach(everything=False, namespaces=frozenset(spaces))

    async def is_admin(self, caller: Caller) -> bool:
        """Whether the caller may list Tenants, and so see every tenant."""
        return await self.allowed(caller, "list", TENANTS)

    async def administers(self, caller: Caller) -> bool:
        """Whether the caller may change Tenants, and so decide who may do what. Making tokens for other
        people needs this; seeing all tenants is not enough."""
        return await self.allowed(caller, "update", TENANTS)


def not_found(resource: Resource, namespace: str, name: str = "") -> str:
    """The sentence for an object that does not exist or belongs to another tenant: the same for both."""
    if not name:
        return f"namespace {namespace} does not exist"
    return f"{resource.kind} {namespace}/{name} does not exist"
