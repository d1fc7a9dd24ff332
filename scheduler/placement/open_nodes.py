"""Whether a node takes new pods: it is ready, not cordoned, and its taints are tolerated."""

from __future__ import annotations

from collections.abc import Iterable

from ..model.snapshot import Node, Toleration


def _tolerated(node: Node, tolerations: Iterable[Toleration]) -> bool:
    """Whether a pod with these tolerations may run on the node, given its taints."""
    tolerations = tuple(tolerations)
    for taint in node.taints:
        if taint.effect not in ("NoSchedule", "NoExecute"):
            continue
        if not any(_tolerates(t, taint.key, taint.value, taint.effect) for t in tolerations):
            return False
    return True


def why_closed(node: Node, tolerations: Iterable[Toleration]) -> str:
    """Why nothing new is placed on the node; "": it is open."""
    if node.cordoned:
        return "cordoned"
    if not node.ready:
        return "not ready"
    return "" if _tolerated(node, tolerations) else "tainted"


def _tolerates(toleration: Toleration, key: str, value: str, effect: str) -> bool:
    if toleration.effect and toleration.effect != effect:
        return False
    if toleration.operator == "Exists":
        return toleration.key in ("", key)
    return toleration.key == key and toleration.value == value
