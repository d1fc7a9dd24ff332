"""Domains and nodes for the tests of power."""

from __future__ import annotations

from typing import Any

from busbar.kube.contracts.power import AgentReport
from busbar.kube.types import PowerDomain
from busbar.operator.power.readings import Reading, read
from busbar.operator.watch.projections import Node


def domain(
    name: str,
    budget_w: float = 1000.0,
    parent: str | None = None,
    policy: str = "Observe",
    host_w: float | None = None,
    **labels: str,
) -> PowerDomain:
    """A domain that selects nodes with these labels; without labels, none."""
    spec: dict[str, Any] = {"budgetWatts": budget_w, "nodeSelector": labels or None}
    spec |= {"policy": policy, "hostWatts": host_w}
    if parent is not None:
        spec["parent"] = parent
    return PowerDomain.model_validate(
        {"metadata": {"name": name, "generation": 1}, "kind": "PowerDomain", "spec": spec}
    )


def node(name: str, **labels: str) -> Node:
    return Node(name, tuple(sorted(labels.items())), (), 8000, 32_000, 0, (), True)


def told(
    node: str = "n1", clock_s: float = 1.0, *, epoch: str = "e1", backend: str = "simulated", **boards: Any
) -> AgentReport:
    """A report: for each board (watts, joules), of 400 W with a lowest limit of 100 W; `host` is a meter of 1,000 W."""
    meters = {
        name: {
            "uuid": name,
            "watts": numbers[0],
            "joules": numbers[1],
            "floorWatts": 1000.0 if name == "host" else 100.0,
            "nameplateWatts": 1000.0 if name == "host" else 400.0,
        }
        for name, numbers in boards.items()
    }
    host = meters.pop("host", None)
    return AgentReport.model_validate(
        {
            "node": node,
            "epoch": epoch,
            "clockS": clock_s,
            "boardsFrom": backend,
            "hostFrom": backend if host else "none",
            "boards": list(meters.values()),
            "host": host,
        }
    )


def reading(node: str, watts: float, at_s: float = 0.0, boards: int = 1) -> Reading:
    """A reading of a node with boards of 400 W that share these watts."""
    meters: dict[str, Any] = {f"b{i}": (watts / boards, 0.0) for i in range(boards)}
    found = read(None, told(node, **meters), at_s)
    assert isinstance(found, Reading)
    return found
