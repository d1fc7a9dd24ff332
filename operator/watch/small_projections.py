"""The projections of Namespaces, RoleBindings, NetworkPolicies, ResourceQuotas, PersistentVolumeClaims and opted-in Jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from busbar.kube.client import Object
from busbar.kube.informer import Key
from busbar.kube.types import quantity


@dataclass(frozen=True, slots=True)
class NamespaceSeen:
    """What we keep of a Namespace."""

    name: str
    labels: tuple[tuple[str, str], ...]
    deleting: bool
    uid: str = ""


@dataclass(frozen=True, slots=True)
class BindingSeen:
    """What we keep of a RoleBinding that we rendered."""

    key: Key
    uid: str
    role: str
    subjects: tuple[tuple[str, str, str], ...]  # kind, name, namespace


@dataclass(frozen=True, slots=True)
class BatchJobSeen:
    """What we keep of an opted-in ``batch/v1`` Job."""

    key: Key
    uid: str
    suspended: bool
    finished: bool


@dataclass(frozen=True, slots=True)
class PolicySeen:
    """What we keep of a NetworkPolicy with our label: the parts of its spec that we write."""

    key: Key
    uid: str
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class QuotaSeen:
    """What we keep of a ResourceQuota with our label. Numbers, because the API server writes 1000 as ``1k``."""

    key: Key
    uid: str
    hard: Mapping[str, Decimal]
    used: Mapping[str, Decimal]
    scoped: bool = False  # it has scopes, which we never write: then it counts only some objects

    @property
    def limits(self) -> tuple[object, ...]:
        """What it limits, without what is used."""
        return self.uid, self.hard, self.scoped


@dataclass(frozen=True, slots=True)
class VolumeClaimSeen:
    """What we keep of a PersistentVolumeClaim: that it exists."""

    uid: str


def project_namespace(obj: Object) -> NamespaceSeen:
    meta = obj["metadata"]
    return NamespaceSeen(
        meta["name"],
        tuple(sorted((meta.get("labels") or {}).items())),
        bool(meta.get("deletionTimestamp")),
        meta.get("uid", ""),
    )


def project_binding(obj: Object) -> BindingSeen:
    meta = obj["metadata"]
    return BindingSeen(
        key=Key(meta["namespace"], meta["name"]),
        uid=meta.get("uid", ""),
        role=str((obj.get("roleRef") or {}).get("name", "")),
        subjects=tuple(
            sorted(
                (s.get("kind", ""), s.get("name", ""), s.get("namespace", ""))
                for s in obj.get("subjects") or ()
            )
        ),
    )


def project_volume_claim(obj: Object) -> VolumeClaimSeen:
    return VolumeClaimSeen(obj["metadata"].get("uid", ""))


def project_batch_job(obj: Object) -> BatchJobSeen:
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    done = any(
        c.get("type") in ("Complete", "Failed") and c.get("status") == "True"
        for c in status.get("conditions") or ()
    )
    return BatchJobSeen(
        Key(meta["namespace"], meta["name"]), meta.get("uid", ""), bool(spec.get("suspend")), done
    )


def project_policy(obj: Object) -> PolicySeen:
    """The policy's projection; fields that others add are left out, so they are not compared."""
    meta, spec = obj["metadata"], obj.get("spec") or {}
    ours = {field: spec.get(field) for field in ("podSelector", "policyTypes", "ingress")}
    return PolicySeen(Key(meta["namespace"], meta["name"]), meta.get("uid", ""), ours)


def project_quota(obj: Object) -> QuotaSeen:
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    return QuotaSeen(
        Key(meta["namespace"], meta["name"]),
        meta.get("uid", ""),
        hard={name: quantity.parse(value) for name, value in (spec.get("hard") or {}).items()},
        used={name: quantity.parse(value) for name, value in (status.get("used") or {}).items()},
        scoped=bool(spec.get("scopes") or spec.get("scopeSelector")),
    )
