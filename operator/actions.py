"""What a reconcile wants done: plain data, carried out by ``writer.py`` in the order given.

Every action is harmless when done twice: a create whose name exists is done, a delete names the uid that it
means, a gate is lifted under a test, an apply says the whole of what we own.
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
    """Take our scheduling gate off a pod that was born pinned."""

    key: Key
    uid: str
    gate_index: int


@dataclass(frozen=True)
class LetGo:
    """Pin another controller's gated pod to a node and take our gate off, in one write."""

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
class Ask:
    """POST to a workload's port (checkpoint, drain); the answer comes back as an event."""

    key: Key
    uid: str
    path: str
    timeout_s: float


Action = Create | Delete | LiftGate | LetGo | Patch | Apply | Ask
