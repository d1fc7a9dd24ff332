"""What a reconcile wants done: plain data, carried out by ``writer.py`` in the order given.

Every action is harmless when done twice: a create whose name exists is done, a delete names the uid that it
means, a gate is removed only if it is still there, and an apply contains every field that we own.
"""

from __future__ import annotations

from collections.abc import Mapping
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
class TaintNode:
    """Put one taint on a node, or take it away; other taints stay as they are."""

    node: str
    taint: dict[str, str]
    index: int = -1
    """Where the taint is among the node's, to take it away; -1: put it there."""
    is_first: bool = False
    """The node has no taint yet."""

    @property
    def key(self) -> Key:
        return Key("", self.node)

    @property
    def patch(self) -> list[dict[str, Any]]:
        """A JSON patch that the API server refuses if the node's taints are other ones."""
        path = "/spec/taints"
        if self.index >= 0:
            at = f"{path}/{self.index}"
            key = {"op": "test", "path": f"{at}/key", "value": self.taint["key"]}
            return [key, {"op": "remove", "path": at}]
        if self.is_first:
            none = {"op": "test", "path": path, "value": None}
            return [none, {"op": "add", "path": path, "value": [self.taint]}]
        return [{"op": "add", "path": f"{path}/-", "value": self.taint}]


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
    repeats: bool = False  # it may be asked again after its answer; else once in the pod's life
    peers: tuple[Key, ...] = ()  # pods whose addresses it is told, to go on there with what runs
    body: Mapping[str, Any] | None = None  # what else it is told


Action = Create | Delete | LiftGate | PinAndUngate | Patch | TaintNode | Apply | PostToPod
