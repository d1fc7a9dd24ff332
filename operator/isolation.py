"""Who may connect to the pods that we make: one NetworkPolicy in each of a tenant's namespaces.

Our engines' port asks for a bearer, but a user's own image may open any port, and ranks of a gang meet at one that
asks for nothing. Where the cluster enforces NetworkPolicy, these answer only pods of the same tenant and the
platform's own (the operator's probes, the gateway's requests). Kubelets reach the pods of their node anyway.

Level-triggered like everything: deleted, edited or without our label, the policy is put back; policies of other
names are people's own, and may open more, for example to a Prometheus. ``platform`` empty means that no policies
are kept: those that stand are removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from busbar.kube.client import Object
from busbar.kube.informer import Key
from busbar.kube.resources import NETWORK_POLICIES
from busbar.kube.types.meta import LABEL_KIND, LABEL_TENANT
from busbar.operator.actions import Action, Apply, Delete

NAME = "busbar-tenant"
MANAGED = {"app.kubernetes.io/managed-by": "busbar", "app.kubernetes.io/component": "tenant"}
_NAMESPACE_NAME = (
    "kubernetes.io/metadata.name"  # the API server sets it on every namespace, and nobody can change it
)


@dataclass(frozen=True, slots=True)
class PolicySeen:
    """What we keep of a NetworkPolicy with our label: the parts of its spec that we write."""

    key: Key
    uid: str
    spec: Mapping[str, Any]


def project_policy(obj: Object) -> PolicySeen:
    """The policy's projection; what others may add beside our fields is not ours to compare."""
    meta, spec = obj["metadata"], obj.get("spec") or {}
    ours = {field: spec.get(field) for field in ("podSelector", "policyTypes", "ingress")}
    return PolicySeen(Key(meta["namespace"], meta["name"]), meta.get("uid", ""), ours)


def keep(tenant: str, platform: str, namespaces: Iterable[str], seen: Iterable[PolicySeen]) -> list[Action]:
    """The policy in each of these namespaces of the tenant, as it should be."""
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
    """Takes our policy out of a namespace that no tenant owns, or out of any when none are kept."""
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
