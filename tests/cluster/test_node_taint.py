"""The taint on nodes that should be limited and are not: what the operator may write on a node, and what it does there.

A server of its own, with the chart as it is where agents set limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver import JSON, ApiServer, render_chart
from tests.cluster.attempts import eventually_accepted, refused
from tests.cluster.harness import QUICK, with_the_charts_rights
from tests.cluster.kubelet import Script, add_node
from tests.cluster.racks import is_running
from tests.cluster.rights import SYSTEM, wait_for_bindings
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_leases import NAMES, Rack
from tests.cluster.test_operator_power import KEY
from tests.cluster.test_operator_preemptions import FEED, one_board
from tests.cluster.test_operator_watts import POOL
from tests.operator.agent.lease_keys import KEY as SIGNING

from busbar.kube.contracts.power import SIMULATED_LABEL
from busbar.kube.resources import NODES, POWER_DOMAINS, TRAINING_JOBS

pytestmark = pytest.mark.apiserver
OURS = {"key": "busbar.dev/power-not-ready", "effect": "NoSchedule"}
OTHER = {"key": "example.com/kept", "effect": "PreferNoSchedule"}


@pytest.fixture(scope="module")
def limited() -> Iterator[ApiServer]:
    with ApiServer.start() as server:
        server.install_crds()
        server.make_namespace(SYSTEM)
        documents = render_chart(
            "busbar", "--set", "power.agent.enabled=true", "--set", "power.agent.setLimits=true"
        )
        for document in documents:
            server.admin.apply(document).expect()
        wait_for_bindings(server, documents)
        yield server


def node(name: str, *taints: JSON) -> JSON:
    spec = {"taints": [*taints], "providerID": "x://y"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"a": "b"}},
        "spec": spec,
    }


REFUSED: tuple[tuple[str, JSON], ...] = (
    ("a label", {"metadata": {"labels": {"a": "c"}}}),
    ("another label", {"metadata": {"labels": {"new": "x"}}}),
    ("an annotation", {"metadata": {"annotations": {"new": "x"}}}),
    ("a finalizer", {"metadata": {"finalizers": ["example.com/x"]}}),
    ("a cordon", {"spec": {"unschedulable": True}}),
    ("an address range", {"spec": {"podCIDR": "10.0.0.0/24", "podCIDRs": ["10.0.0.0/24"]}}),
)
TAINTED: tuple[tuple[str, list[JSON]], ...] = (
    ("no taint", []),
    ("only its own", [OURS]),
    ("another", [OTHER, {"key": "example.com/more", "effect": "NoSchedule"}]),
    ("a stronger one of others", [{**OTHER, "effect": "NoExecute"}]),
    ("one that stops pods", [OTHER, {**OURS, "effect": "NoExecute"}]),
    ("one with a value", [OTHER, {**OURS, "value": "x"}]),
)


def test_the_operator_writes_nothing_on_a_node_but_its_taint(limited: ApiServer) -> None:
    made = node("kept", OTHER)
    limited.admin.create(made).expect()
    limited.admin.merge(made, {"spec": {"taints": [OTHER]}}).expect()  # the server adds one to new nodes
    operator = limited.service_account(SYSTEM, "busbar-operator")
    for _, change in REFUSED:
        refused(lambda c=change, **p: operator.merge(made, c, **p), "changes nothing of a node but its taint")
    for _, taints in TAINTED:
        change = {"spec": {"taints": taints}}
        refused(
            lambda c=change, **p: operator.merge(made, c, **p), "puts the taint busbar.dev/power-not-ready"
        )
    for taints in ([OTHER, OURS], [OTHER]):
        eventually_accepted(lambda t=taints, **p: operator.merge(made, {"spec": {"taints": t}}, **p))
    assert operator.merge(made, {"status": {"phase": "Running"}}, subresource="/status").status == 403
    assert operator.request("DELETE", "/api/v1/nodes/kept").status == 403
    limited.admin.delete(made).expect()


async def test_a_node_is_tainted_until_its_boards_are_limited_and_when_its_agent_is_lost(
    limited: ApiServer, tmp_path: Path
) -> None:
    settings = replace(
        QUICK, power_key=KEY, power_lease_key=SIGNING, power_lease_s=4.0, power_taint_nodes=True
    )
    rack = Rack(tmp_path)
    async with with_the_charts_rights(
        limited, settings, nodes=0, script=lambda _: Script(run_s=None)
    ) as cluster:

        async def taints() -> list[list[dict[str, Any]]]:
            found = [await cluster.client.get(NODES, name) for name in NAMES]
            return [each["spec"].get("taints") or [] for each in found]

        for name in NAMES:
            labels = {"rack": "red", "pool": "watts", SIMULATED_LABEL: ""}
            await asyncio.to_thread(add_node, limited, name, labels=labels, gpus=2)
        await cluster.client.patch(NODES, NAMES[1], {"spec": {"taints": [OTHER]}})
        await asyncio.to_thread(lambda: limited.admin.create(POOL).expect())
        await cluster.create({**FEED, "spec": {**FEED["spec"], "enforcement": "Cap"}})
        await cluster.start(power_simulator_url=rack.url)
        await becomes(taints, lambda found: found == [[OURS], [OTHER, OURS]])
        await cluster.create(one_board("waits"))
        told = await cluster.until(
            TRAINING_JOBS, "waits", lambda s: bool((s.get("waiting") or {}).get("closed"))
        )
        assert told["waiting"]["closed"] == [{"why": "tainted", "nodes": 2}]

        async with rack.process("guard"), rack.process():
            await becomes(taints, lambda found: found == [[], [OTHER]])
            await cluster.until(TRAINING_JOBS, "waits", is_running)
        await becomes(taints, lambda found: found == [[OURS], [OTHER, OURS]])
        assert (await cluster.status(TRAINING_JOBS, "waits"))["phase"] == "Running", "what runs goes on"

        await cluster.client.delete(POWER_DOMAINS, "red")
        await becomes(taints, lambda found: found == [[], [OTHER]])
