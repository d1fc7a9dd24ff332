"""What a reconcile wants done: plain data, carried out by ``writer.py`` in the order given.

Every action is harmless when done twice: a create whose name exists is done, a delete names the uid that it
means, a gate is removed only if it is still there, and an apply contains every field that we own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from busbar.kube.informer import Key
from busbar.kube.resources import Resource


@dataclass(frozen=True)
class Create:
    """Make an object under its deterministic name."""

    resource: Resource
    key: Key
    body: dict[str, Any]


@dataclass(frozen=True)
class Delete:
    """Delete exactly the object with this uid."""

    resource: Resource
    key: Key
    uid: str
    grace_s: int | None = None
    propagation: str | None = "Background"


@dataclass(frozen=True)
class LiftGate:
    """Remove our scheduling gate from a pod that was created pinned."""

    key: Key
    uid: str
    gate_index: int


@dataclass(frozen=True)
class PinAndUngate:
    """Pin another controller's gated pod to a node and remove our gate, in one write."""

    key: Key
    uid: str
    gate_index: int
    hostname: str  # value of the node's kubernetes.io/hostname label
    admission: str
    has_selector: bool


@dataclass(frozen=True)
class Patch:
    """A JSON merge patch of one object, guarded by its uid where given."""

    resource: Resource
    key: Key
    patch: dict[str, Any]
    uid: str = ""


@dataclass(frozen=True)
class Apply:
    """Server-side apply of fields that only we own."""

    resource: Resource
    body: dict[str, Any]

    @property
    def key(self) -> Key:
        meta = self.body["metadata"]
        return Key(meta.get("namespace", ""), meta["name"])


@dataclass(frozen=True)
class PostToPod:
    """POST to a workload's port (checkpoint, drain); when it is answered, the pod's owner is reconciled again."""

    key: Key
    uid: str
    path: str
    timeout_s: float


Action = Create | Delete | LiftGate | PinAndUngate | Patch | Apply | PostToPod
