"""Power domains on the real API server: the tree, the nodes, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import QUICK, Cluster, with_the_charts_rights
from tests.cluster.kubelet import Script, add_node
from tests.cluster.tenancy import becomes
from tests.free_port import free_port

from busbar.kube.client import Object
from busbar.kube.contracts.power import SIMULATED_LABEL
from busbar.kube.resources import EVENTS, NODES, PODS, POWER_DOMAINS
from busbar.operator.agent.meters import Node as AgentNode
from busbar.operator.agent.server import Agent
from busbar.operator.agent.settings import Settings as AgentSettings
from busbar.operator.agent.simulated import SimulatedBoards


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


HOME = "power-home"
"""The platform's namespace here."""
KEY = b"fedcba9876543210fedcba9876543210"


@contextlib.asynccontextmanager
async def simulator(folder: Path, *nodes: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A process of the agent that plays these nodes with two boards each; gives its address."""
    port = free_port()
    (folder / "power-key").write_bytes(KEY)
    agent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "busbar.operator.agent.main",
        env={
            **os.environ,
            "PYTHONPATH": ".src",
            "BUSBAR_POWER_KEY_FILE": str(folder / "power-key"),
            "BUSBAR_AGENT_BACKEND": "simulated",
            "BUSBAR_AGENT_SIMULATED_NODES": ",".join(nodes),
            "BUSBAR_AGENT_SIMULATED_BOARDS": "2",
            "BUSBAR_AGENT_SIMULATED_HOST_WATTS": "100",
            "BUSBAR_AGENT_HOST": "127.0.0.1",
            "BUSBAR_AGENT_PORT": str(port),
            "BUSBAR_AGENT_LOG_LEVEL": "error",
        },
    )
    try:
        yield f"http://127.0.0.1:{port}", agent
    finally:
        if agent.returncode is None:
            agent.kill()
        await agent.wait()


@contextlib.asynccontextmanager
async def agents(cluster: Cluster, *nodes: str) -> AsyncIterator[dict[str, Agent]]:
    """The chart's agents: a pod on each of these nodes, and at its address an agent with boards of its own."""
    running: dict[str, Agent] = {}
    tasks = []
    for name in nodes:
        pod_name = f"busbar-agent-{name}"
        pod: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": pod_name,
                "ownerReferences": [
                    {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "busbar-agent", "uid": "u", "controller": True}
                ],
            },
            "spec": {"nodeName": name, "containers": [{"name": "agent", "image": "registry.test/agent:1"}]},
        }  # fmt: skip
        await cluster.client.create(PODS, pod, HOME)

        async def address(pod_name: str = pod_name) -> str:
            seen = await cluster.client.get(PODS, pod_name, HOME)
            return str((seen.get("status") or {}).get("podIP") or "")

        ip = await becomes(address, bool)
        settings = AgentSettings(node=name, key=KEY, host=ip)
        node = AgentNode(name, f"epoch-of-{name}", SimulatedBoards(name, 2), None, (), {}, 0.0)
        running[name] = Agent(settings, [node])
        await running[name].start()
        tasks.append(asyncio.create_task(running[name].run()))
    try:
        yield running
    finally:
        for task in tasks:
            task.cancel()
        for agent in running.values():
            await agent.stop()


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())}


def has(**wanted: tuple[str, str]) -> Callable[[dict[str, Any]], bool]:
    """A test of a status: these conditions have this status and reason."""
    return lambda status: wanted.items() <= conditions(status).items()


FRESH = {"TelemetryFresh": ("True", "AllReport")}
SILENT = {"TelemetryFresh": ("False", "NodesSilent")}


async def test_two_feeds_are_measured_and_a_killed_agent_is_seen(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    """`red` is played by the simulator's process, `blue` has an agent on each node; `row` feeds both."""
    settings = replace(QUICK, namespace=HOME, power_key=KEY, power_status_s=0.5)
    await asyncio.to_thread(apiserver.make_namespace, HOME)
    async with (
        Cluster(apiserver, settings=settings, script=lambda pod: Script()) as cluster,
        simulator(tmp_path, "red-0", "red-1", "blue-0") as (url, process),
    ):
        await add_racks(cluster, apiserver, red=2, blue=2)
        for name in ("red-0", "red-1"):
            await cluster.client.patch(NODES, name, {"metadata": {"labels": {SIMULATED_LABEL: ""}}})
        await cluster.create(feed("row", 20_000))
        await cluster.create(feed("red", 1_900, "row", rack="red"))
        await cluster.create(feed("blue", 1_700, "row", rack="blue"))
        async with agents(cluster, "blue-0", "blue-1") as running:
            operator = await cluster.start(power_simulator_url=url)
            within = {**FRESH, "WithinBudget": ("True", "WithinBudget")}
            for name in ("red", "blue", "row"):
                await cluster.until(POWER_DOMAINS, name, has(**within))
            status = await cluster.status(POWER_DOMAINS, "row")
            # Two boards of 100 to 400 W on each node; the simulator's nodes have hosts of 100 W.
            assert (status["floorWatts"], status["nameplateWatts"]) == (1000, 3400)
            assert 200 < status["drawWatts"] <= 3400
            assert status["headroomWatts"] == pytest.approx(19_800 - status["drawWatts"], abs=0.2)
            assert status["simulatedNodes"] == 4, "a simulated board is one wherever it is"

            await cluster.client.patch(POWER_DOMAINS, "blue", {"spec": {"budgetWatts": 1}})
            over = {**FRESH, "WithinBudget": ("False", "OverBudget")}
            await cluster.until(
                POWER_DOMAINS, "blue", lambda s: has(**over)(s) and s["lastOverrun"]["seconds"] >= 1
            )
            await cluster.client.patch(POWER_DOMAINS, "blue", {"spec": {"budgetWatts": 1_700}})
            status = await cluster.until(POWER_DOMAINS, "blue", has(**within))
            assert status["lastOverrun"]["worstWatts"] > 100
            operator.handlers.power.show()
            sample = operator.metrics.registry.get_sample_value
            assert (sample("busbar_power_overrun_seconds_total", {"domain": "blue"}) or 0) >= 1
            assert sample("busbar_power_overrun_seconds_total", {"domain": "red"}) == 0
            assert sample("busbar_power_domain_watts", {"domain": "red", "kind": "budget"}) == 1900
            assert sample("busbar_power_nodes", {"backend": "simulated"}) == 4
            assert sample("busbar_power_board_watts", {"node": "red-0", "uuid": "SIMULATED-red-0-1"})

            process.kill()
            status = await cluster.until(POWER_DOMAINS, "red", has(**SILENT))
            assert (status["silentNodes"], status["assumedWatts"]) == (2, 1800)
            assert conditions(status)["WithinBudget"][0] == "True", "the nameplates are within the budget"
            status = await cluster.until(POWER_DOMAINS, "row", has(**SILENT))
            assert status["silentNodes"] == 2
            await cluster.until(POWER_DOMAINS, "blue", has(**within))

            await running["blue-1"].stop()
            status = await cluster.until(POWER_DOMAINS, "blue", has(**SILENT))
            assert status["silentNodes"] == 1
            row = await cluster.until(POWER_DOMAINS, "row", lambda s: s["silentNodes"] == 3)
            assert "drawWatts" in row
            await running["blue-1"].start()
            await cluster.until(POWER_DOMAINS, "blue", has(**FRESH))

            events, _ = await cluster.client.list(EVENTS)
            told = [e["reason"] for e in events if e["involvedObject"]["name"] == "blue"]
            assert {"OverBudget", "WithinBudget", "NodesSilent", "AllReport"} <= set(told)


async def test_a_meter_is_called_where_meters_are_and_with_secrets_that_the_chart_names(
    platform: ApiServer,
) -> None:
    """With the rights that the chart gives: none to read a Secret."""

    def says(reason: str, text: str) -> Callable[[dict[str, Any]], bool]:
        def holds(status: dict[str, Any]) -> bool:
            told = [c for c in status.get("conditions", ()) if c["type"] == "MeterRead"]
            return [c["reason"] for c in told] == [reason] and text in told[0]["message"]

        return holds

    async with with_the_charts_rights(platform) as cluster:
        await add_racks(cluster, platform, red=1, blue=1)
        for rack, meter in (
            ("red", {"redfish": {"url": "http://127.0.0.1:9/redfish/v1/Chassis/1/EnvironmentMetrics"}}),
            (
                "blue",
                {"redfish": {"url": "https://pdu.invalid/redfish/v1"}, "secretName": "busbar-power-key"},
            ),
        ):
            made = feed(rack, 3000, rack=rack)
            made["spec"]["meter"] = meter
            await cluster.create(made)
        await cluster.start()
        refused = says("MeterAddressRefused", "No meter can have the address of 127.0.0.1")
        await cluster.until(POWER_DOMAINS, "red", refused)
        hidden = says("MeterRefused", "name it in the chart's value power.meterSecrets")
        await cluster.until(POWER_DOMAINS, "blue", hidden)
        await cluster.until(POWER_DOMAINS, "red", is_ready("Observing", 1))
