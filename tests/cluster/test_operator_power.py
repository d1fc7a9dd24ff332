"""Power domains on the real API server: the tree, the nodes, and what goes wrong with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, with_the_charts_rights
from tests.cluster.kubelet import add_node

from busbar.kube.client import Object
from busbar.kube.resources import NODES, POWER_DOMAINS


def feed(name: str, watts: float, parent: str | None = None, **labels: str) -> Object:
    """A PowerDomain."""
    spec: dict[str, Any] = {"budgetWatts": watts}
    if labels:
        spec["nodeSelector"] = labels
    if parent is not None:
        spec["parent"] = parent
    return {"kind": "PowerDomain", "metadata": {"name": name}, "spec": spec}


def is_ready(reason: str, nodes: int) -> Callable[[dict[str, Any]], bool]:
    """A test of a status: the reason of its readiness, and how many nodes it has."""

    def holds(status: dict[str, Any]) -> bool:
        ready = [c for c in status.get("conditions", ()) if c["type"] == "Ready"]
        return [c["reason"] for c in ready] == [reason] and status["nodes"] == nodes

    return holds


async def add_racks(cluster: Cluster, server: ApiServer, **racks: int) -> None:
    """Nodes `<rack>-<i>` with the label rack."""
    for rack, count in racks.items():
        for i in range(count):
            await asyncio.to_thread(add_node, server, f"{rack}-{i}", labels={"rack": rack})


async def test_nodes_and_domains_come_change_and_go(platform: ApiServer) -> None:
    """With the rights that the chart gives."""
    async with with_the_charts_rights(platform) as cluster:
        await add_racks(cluster, platform, red=2, blue=1)
        await cluster.create(feed("row", 3000))
        await cluster.create(feed("red", 2000, "row", rack="red"))
        await cluster.start()
        await cluster.until(POWER_DOMAINS, "red", is_ready("Observing", 2))
        await cluster.until(POWER_DOMAINS, "row", is_ready("Observing", 2))
        await cluster.create(feed("blue", 2000, "row", rack="blue"))
        await cluster.until(POWER_DOMAINS, "row", is_ready("Observing", 3))

        moved = {"metadata": {"labels": {"rack": "blue"}}}
        await cluster.client.patch(NODES, "red-0", moved)
        await cluster.until(POWER_DOMAINS, "blue", is_ready("Observing", 2))
        await cluster.until(POWER_DOMAINS, "red", is_ready("Observing", 1))

        await cluster.client.patch(POWER_DOMAINS, "row", {"spec": {"budgetWatts": 1999}})
        for name, nodes in (("red", 1), ("blue", 2)):
            await cluster.until(POWER_DOMAINS, name, is_ready("ChildAboveParent", nodes))
        await cluster.until(POWER_DOMAINS, "row", is_ready("Observing", 3))

        await cluster.client.patch(POWER_DOMAINS, "row", {"spec": {"budgetWatts": 9000, "parent": "red"}})
        for name in ("row", "red", "blue"):
            await cluster.until(POWER_DOMAINS, name, is_ready("Cycle", 2 if name == "blue" else 3))
        await cluster.client.delete(POWER_DOMAINS, "row")
        for name, nodes in (("red", 1), ("blue", 2)):
            await cluster.until(POWER_DOMAINS, name, is_ready("UnknownParent", nodes))

        for name in ("red", "blue"):
            await cluster.client.patch(POWER_DOMAINS, name, {"spec": {"parent": None}})
        await cluster.create(feed("second", 1000, rack="blue"))
        for name, reason in (("blue", "NodeInTwoDomains"), ("second", "NodeInTwoDomains")):
            status = await cluster.until(POWER_DOMAINS, name, is_ready(reason, 2))
            assert "selected by blue, second" in status["conditions"][0]["message"]
        await cluster.client.delete(NODES, "red-1")
        await cluster.until(POWER_DOMAINS, "red", is_ready("NoNodes", 0))
