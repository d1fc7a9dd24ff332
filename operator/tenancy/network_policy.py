"""Who may connect to the pods that we make: one NetworkPolicy in each of a tenant's namespaces.

Our engines' port requires a bearer, but a user's own image may open any port, and the ranks of a gang meet at one
that requires nothing. Where the cluster enforces NetworkPolicy, these accept connections only from pods of the same
tenant and from the platform (the operator's probes, the gateway's requests). Kubelets reach the pods of their node
in any case.

Level-triggered: a policy that was deleted, edited or lost our label is applied again. Policies of other names belong
to users, and may allow more, for example a Prometheus. With an empty ``platform`` no policies are kept, and existing
ones are removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from busbar.kube.informer import Key
from busbar.kube.resources import NETWORK_POLICIES
from busbar.kube.types.meta import LABEL_KIND, LABEL_TENANT
from busbar.operator.watch.small_projections import PolicySeen
from busbar.operator.write.actions import Action, Apply, Delete

NAME = "busbar-tenant"
MANAGED = {"app.kubernetes.io/managed-by": "busbar", "app.kubernetes.io/component": "tenant"}
_NAMESPACE_NAME = (
    "kubernetes.io/metadata.name"  # the API server sets it on every namespace, and nobody can change it
)


def keep(tenant: str, platform: str, namespaces: Iterable[str], seen: Iterable[PolicySeen]) -> list[Action]:
    """Applies the policy in each of these namespaces of the tenant where it is missing or differs."""
    if not platform:
        return []
    standing = {p.key: p.spec for p in seen}
    wanted = _spec(tenant, platform)
    return [
        Apply(NETWORK_POLICIES, _policy(name, wanted))
        for name in sorted(namespaces)
        if standing.get(Key(name, NAME)) != wanted
    ]


def remove(namespace: str, owner: str | None, platform: str, seen: Iterable[PolicySeen]) -> list[Action]:
    """Deletes our policy in a namespace that no tenant owns, or in any namespace when none are kept."""
    if owner is not None and platform:
        return []
    ours = (p for p in seen if p.key == Key(namespace, NAME))
    return [Delete(NETWORK_POLICIES, p.key, p.uid) for p in ours]


def _spec(tenant: str, platform: str) -> dict[str, Any]:
    sources = ({LABEL_TENANT: tenant}, {_NAMESPACE_NAME: platform})
    return {
        "podSelector": {"matchExpressions": [{"key": LABEL_KIND, "operator": "Exists"}]},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"namespaceSelector": {"matchLabels": labels}} for labels in sources]}],
    }


def _policy(namespace: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": NETWORK_POLICIES.api_version,
        "kind": NETWORK_POLICIES.kind,
        "metadata": {"name": NAME, "namespace": namespace, "labels": MANAGED},
        "spec": spec,
    }
