"""How many objects a tenant may have: ``spec.limits`` as one ResourceQuota in each of the tenant's namespaces.

Kubernetes counts and refuses; nothing that exists is removed when a limit is lowered. Level-triggered: a quota that was
deleted, edited or lost our label is applied again, and it is deleted when nothing is limited any more. Quotas of other
names belong to administrators.

Nothing in Kubernetes counts waiting jobs: the admission policy ``busbar-waiting-jobs`` refuses new ones by
``status.waitingJobs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from busbar.kube.informer import Key
from busbar.kube.resources import RESOURCE_QUOTAS
from busbar.kube.types import quantity
from busbar.kube.types.limits import QUOTA, Limits, LimitUse
from busbar.operator.tenancy.network_policy import MANAGED
from busbar.operator.watch.small_projections import QuotaSeen
from busbar.operator.write.actions import Action, Apply, Delete

_JOBS, _SERVICES = "count/trainingjobs.busbar.dev", "count/modelservices.busbar.dev"
_PODS, _CLAIMS, _STORAGE = "pods", "persistentvolumeclaims", "requests.storage"
_GIB = 2**30


def keep(
    limits: Limits | None, own: Iterable[str], present: Iterable[str], seen: Iterable[QuotaSeen]
) -> list[Action]:
    """Applies the quota in each of these namespaces where it is missing or differs, or deletes it without limits.

    Args:
        own: the tenant's namespaces; present: those of them that exist and are not being deleted.
    """
    owned = set(own)
    stored = {q.key.namespace: q for q in seen if q.key.name == QUOTA and q.key.namespace in owned}
    hard = _hard(limits)
    if not hard:
        return [Delete(RESOURCE_QUOTAS, q.key, q.uid) for q in stored.values()]
    actions: list[Action] = []
    for namespace in sorted(present):
        quota = stored.get(namespace)
        if quota is not None and (quota.scoped or not quota.hard.keys() <= hard.keys()):
            # An apply removes neither scopes nor what others wrote.
            actions.append(Delete(RESOURCE_QUOTAS, quota.key, quota.uid))
            quota = None
        if quota is None or dict(quota.hard) != _numbers(hard):
            actions.append(Apply(RESOURCE_QUOTAS, _quota(namespace, hard)))
    return actions


def remove(namespace: str, owner: str | None, seen: Iterable[QuotaSeen]) -> list[Action]:
    """Deletes our quota in a namespace that no tenant owns."""
    if owner is not None:
        return []
    return [Delete(RESOURCE_QUOTAS, q.key, q.uid) for q in seen if q.key == Key(namespace, QUOTA)]


def used(limits: Limits | None, namespaces: Iterable[str], seen: Iterable[QuotaSeen]) -> list[LimitUse]:
    """What Kubernetes counts in each namespace; a namespace whose quota was not counted yet is left out."""
    wanted, names = _hard(limits), set(namespaces)
    counted = sorted(
        (q for q in seen if q.key.name == QUOTA and q.key.namespace in names and q.used), key=lambda q: q.key
    )
    return [_use(q, wanted) for q in counted] if wanted else []


def _use(quota: QuotaSeen, wanted: Mapping[str, str]) -> LimitUse:
    def count(name: str) -> int | None:
        return int(quota.used[name]) if name in wanted and name in quota.used else None

    storage = quota.used.get(_STORAGE) if _STORAGE in wanted else None
    return LimitUse(
        namespace=quota.key.namespace,
        training_jobs=count(_JOBS),
        model_services=count(_SERVICES),
        pods=count(_PODS),
        persistent_volume_claims=count(_CLAIMS),
        storage_gib=round(float(storage / _GIB), 3) if storage is not None else None,
    )


def _hard(limits: Limits | None) -> dict[str, str]:
    """The quota's ``spec.hard``; empty where nothing is limited that Kubernetes counts."""
    if limits is None:
        return {}
    counts = {
        _JOBS: limits.training_jobs,
        _SERVICES: limits.model_services,
        _PODS: limits.pods,
        _CLAIMS: limits.persistent_volume_claims,
    }
    hard = {name: str(most) for name, most in counts.items() if most is not None}
    if limits.storage_gib is not None:
        hard[_STORAGE] = f"{limits.storage_gib}Gi"
    return hard


def _numbers(hard: Mapping[str, str]) -> dict[str, Decimal]:
    return {name: quantity.parse(value) for name, value in hard.items()}


def _quota(namespace: str, hard: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": RESOURCE_QUOTAS.api_version,
        "kind": RESOURCE_QUOTAS.kind,
        "metadata": {"name": QUOTA, "namespace": namespace, "labels": MANAGED},
        "spec": {"hard": dict(hard)},
    }
