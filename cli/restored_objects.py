"""Which part of an object a backup keeps, and what is written when it is restored. Pure.

An object is created under `suspend: true` and with the annotation `busbar.dev/restoring`, gets its status, and only then
its own `suspend` back; the annotation goes in the same write. So an ended job is known to have ended before it could
start, and a restore that was interrupted can tell its own objects from others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from busbar.kube.resources import (
    ACCELERATOR_POOLS,
    MODEL_SERVICES,
    PERFORMANCE_PROFILES,
    POWER_DOMAINS,
    TENANTS,
    TRAINING_JOBS,
    Resource,
)

Document = dict[str, Any]
RESTORING = "busbar.dev/restoring"
"""Annotation of an object that is being restored; its value is the uid in the backup."""
ORDER = (ACCELERATOR_POOLS, POWER_DOMAINS, TENANTS, PERFORMANCE_PROFILES, TRAINING_JOBS, MODEL_SERVICES)
ENDED = frozenset({"Succeeded", "Failed"})

_RUN = (
    "attempt", "workloadClass", "progress", "model", "adapters", "memory", "checkpoint", "lostWork", "fingerprint",
    "preemptions", "restarts", "lastMoveTime", "evaluation", "usage", "startTime", "outputUri",
)  # fmt: skip
"""What a job that has not ended keeps of its status: what it did, not where it was or waited."""
_TENANT = ("usage", "decayed", "users", "budgets")
_FEED = ("energyJoules", "unassignedJoules")


@dataclass(frozen=True)
class Stored:
    """One object of a backup."""

    resource: Resource
    document: Document

    @property
    def namespace(self) -> str | None:
        return self.document["metadata"].get("namespace") if self.resource.namespaced else None

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.document["metadata"]["uid"])

    @property
    def reference(self) -> str:
        place = f"{self.namespace}/" if self.namespace else ""
        return f"{self.resource.kind} {place}{self.name}"

    @property
    def can_suspend(self) -> bool:
        return self.resource in (TRAINING_JOBS, MODEL_SERVICES)

    def as_new(self) -> Document:
        """The object to create: suspended where it can be, marked, without what the server sets."""
        meta, spec = self.document["metadata"], dict(self.document["spec"])
        if self.can_suspend:
            spec["suspend"] = True
        metadata = {
            "name": self.name,
            "labels": meta.get("labels") or {},
            "annotations": {**(meta.get("annotations") or {}), RESTORING: self.uid},
        }
        if self.namespace is not None:
            metadata["namespace"] = self.namespace
        kind = {"apiVersion": self.resource.api_version, "kind": self.resource.kind}
        return {**kind, "metadata": metadata, "spec": spec}

    def finishing(self) -> Document:
        """The merge patch that ends the restore: its own `suspend`, and no mark."""
        patch: Document = {"metadata": {"annotations": {RESTORING: None}}}
        if self.can_suspend:
            patch["spec"] = {"suspend": bool(self.document["spec"].get("suspend", False))}
        return patch

    def status(self, uids: Mapping[str, str]) -> Document:
        """The status to write; empty for one that the operator observes anew."""
        status = self.document.get("status") or {}
        if self.resource is TRAINING_JOBS:
            return status if status.get("phase") in ENDED else _only(status, _RUN)
        if self.resource is MODEL_SERVICES:
            return _only(status, ("usage",))
        if self.resource is TENANTS:
            return _idle(_only(status, _TENANT))
        if self.resource is POWER_DOMAINS:
            return _only(status, _FEED)
        if self.resource is PERFORMANCE_PROFILES:
            return _with_runs(status, uids)
        return {}


def kept(resource: Resource, found: Document) -> Document:
    """The part of an object that goes into a backup."""
    meta = found["metadata"]
    names = ("name", "namespace", "uid", "creationTimestamp", "labels", "annotations")
    document = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {name: meta[name] for name in names if meta.get(name)},
        "spec": found.get("spec") or {},
    }
    return {**document, "status": found["status"]} if found.get("status") else document


def stored(document: Document) -> Stored:
    """An object of a backup. Raises ValueError for one of another kind or without a name."""
    kinds = {resource.kind: resource for resource in ORDER}
    try:
        resource = kinds[document["kind"]]
        meta = document["metadata"]
        if document["apiVersion"] != resource.api_version or not meta["name"] or not meta["uid"]:
            raise ValueError(f"{document['kind']} is of another version, or has no name")
        if resource.namespaced and not meta["namespace"]:
            raise ValueError(f"{document['kind']} {meta['name']} has no namespace")
        if not isinstance(document["spec"], dict):
            raise ValueError(f"{document['kind']} {meta['name']} has no spec")
    except (KeyError, TypeError) as error:
        raise ValueError("an object lacks kind, apiVersion, name, uid, namespace or spec") from error
    return Stored(resource, document)


def _only(status: Document, names: tuple[str, ...]) -> Document:
    return {name: status[name] for name in names if name in status}


def _idle(status: Document) -> Document:
    """A tenant that holds nothing: the time between backup and restore counts for nobody."""
    if "decayed" in status:
        status["decayed"] = {**status["decayed"], "rate": 0}
    if "users" in status:
        status["users"] = [{**user, "rate": 0} for user in status["users"]]
    return status


def _with_runs(status: Document, uids: Mapping[str, str]) -> Document:
    """The runs that a profile has counted, under the new uids of their jobs, so that none is counted again."""
    counted = status.get("counted") or {}
    if not counted.get("runs"):
        return status
    runs = []
    for run in counted["runs"]:
        uid, _, attempt = run.rpartition("-")
        runs.append(f"{uids.get(uid, uid)}-{attempt}")
    return {**status, "counted": {**counted, "runs": runs}}
