"""Domains and nodes for the tests of power."""

from __future__ import annotations

from typing import Any

from busbar.kube.types import PowerDomain
from busbar.operator.watch.projections import Node


def domain(name: str, budget_w: float = 1000.0, parent: str | None = None, **labels: str) -> PowerDomain:
    """A domain that selects nodes with these labels; without labels, none."""
    spec: dict[str, Any] = {"budgetWatts": budget_w, "nodeSelector": labels or None}
    if parent is not None:
        spec["parent"] = parent
    return PowerDomain.model_validate(
        {"metadata": {"name": name, "generation": 1}, "kind": "PowerDomain", "spec": spec}
    )


def node(name: str, **labels: str) -> Node:
    return Node(name, tuple(sorted(labels.items())), (), 8000, 32_000, 0, (), True)
