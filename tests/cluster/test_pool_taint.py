"""The one-machine cluster's pool of cores, with a real kube-scheduler: what belongs on its node is bound, and a plain pod of
a tenant takes no cores past the queue."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.admission_rows import pod
from tests.cluster.apiserver import ApiServer, render_chart
from tests.cluster.harness import Cluster, gang_job, with_the_charts_rights
from tests.cluster.kubelet import add_node
from tests.cluster.rule_row import edited
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.errors import Invalid
from busbar.kube.resources import ACCELERATOR_POOLS, NAMESPACES, PODS
from busbar.local import simulated
from busbar.local.build import binary
from busbar.local.install import NAMESPACE, local_values
from busbar.local.instance import Instance

QUEUED = {"busbar.dev/queue": "true"}


@pytest.fixture
def scheduler(platform: ApiServer) -> Iterator[None]:
    """Kubernetes' own."""
    kubeconfig = platform.kubeconfig("system:kube-scheduler", ["system:masters"])
    command = [
        str(binary("kube-scheduler")),
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
    ]
    with (platform.directory / "kube-scheduler.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    yield
    process.kill()
    process.wait()


async def node_of(cluster: Cluster, name: str, namespace: str = "") -> str:
    found = await cluster.client.get(PODS, name, namespace or cluster.namespace)
    return str(found["spec"].get("nodeName") or "")


async def why_not(cluster: Cluster, name: str) -> str:
    """What kube-scheduler says of a pod that it does not bind."""
    found = await cluster.client.get(PODS, name, cluster.namespace)
    said = [c for c in found["status"].get("conditions") or () if c["type"] == "PodScheduled"]
    return str(said[0].get("message")) if said and said[0]["status"] == "False" else ""


def of_the_platform(tmp_path: Path) -> list[Object]:
    """The pods of the chart's Deployments, as `busbar up` installs it."""
    values = tmp_path / "values.json"
    values.write_text(json.dumps(local_values("127.0.0.1:5000", "abc", "http://portal", "http://gateway")))
    rendered = render_chart("busbar", "-f", str(values))
    return [
        {"apiVersion": "v1", "kind": "Pod", **d["spec"]["template"]}
        for d in rendered
        if d["kind"] == "Deployment"
    ]


async def make_machine(cluster: Cluster) -> str:
    """The machine's node and the demo's pool, for this cluster's tenant."""
    name = f"machine-{cluster.namespace}"
    await asyncio.to_thread(add_node, cluster.server, name, labels={"busbar.dev/accelerator": "cpu"})
    taint = {"spec": {"taints": [simulated.POOL_TAINT]}}
    node: Object = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    (await asyncio.to_thread(cluster.server.admin.merge, node, taint)).expect()
    made = simulated.demo(Instance("busbar", 77, 1, 2))
    pool: Any = next(o for o in made if o["kind"] == "AcceleratorPool")
    await cluster.create({**pool, "spec": {**pool["spec"], "tenants": [f"tenant-{cluster.namespace}"]}})
    return name


@pytest.mark.usefixtures("scheduler")
async def test_only_what_was_queued_and_the_platform_run_on_the_demos_node(
    platform: ApiServer, tmp_path: Path
) -> None:
    async with with_the_charts_rights(platform, nodes=0) as cluster:
        cluster.kubelet.skips = lambda pod: True  # the real scheduler binds, and nobody runs anything
        await cluster.client.delete(ACCELERATOR_POOLS, cluster.namespace)
        machine = await make_machine(cluster)
        await cluster.start()

        async def labels() -> dict[str, str]:
            found = await cluster.client.get(NAMESPACES, cluster.namespace)
            return dict(found["metadata"].get("labels") or {})

        await becomes(labels, lambda found: "busbar.dev/tenant" in found)
        plain = pod(cluster.namespace, "plain")
        await cluster.client.create(PODS, plain, cluster.namespace)
        assert "untolerated taint" in await becomes(lambda: why_not(cluster, "plain"), bool)

        own = simulated.tolerating(simulated.POOL_TAINT)
        jumping = edited(plain, {"metadata/name": "jumping", "spec/tolerations": [own]})
        with pytest.raises(Invalid, match="tolerates a taint of AcceleratorPool cpu without waiting"):
            await cluster.client.create(PODS, jumping, cluster.namespace)

        await cluster.create(gang_job("one", 1))
        await becomes(cluster.pods, lambda found: "one-1-0" in found)
        assert await becomes(lambda: node_of(cluster, "one-1-0"), bool) == machine

        cores = {"spec/containers/0/resources": {"requests": {"cpu": "500m"}}, "metadata/labels": QUEUED}
        for name, tolerations in (("lacks", {}), ("queues", {"spec/tolerations": [own]})):
            queued = edited(plain, {**cores, "metadata/name": name, **tolerations})
            await cluster.client.create(PODS, _gated(queued), cluster.namespace)
        assert await becomes(lambda: node_of(cluster, "queues"), bool) == machine

        async def told() -> list[str]:
            events = await cluster.events()
            return [e["message"] for e in events if e["involvedObject"]["name"] == "lacks"]

        assert "does not tolerate the taint busbar.dev/pool" in (await becomes(told, bool))[0]
        assert (await cluster.pods())["lacks"]["spec"]["schedulingGates"], "it holds no place"

        platforms = of_the_platform(tmp_path)
        assert len(platforms) == 4, "operator, API, gateway, and the player of the simulated nodes' power"
        assert all(own in one["spec"]["tolerations"] for one in platforms)
        operator = next(o for o in platforms if o["spec"]["serviceAccountName"] == "busbar-operator")
        await cluster.client.create(PODS, edited(operator, {"metadata/name": "as-the-operator"}), NAMESPACE)
        assert await becomes(lambda: node_of(cluster, "as-the-operator", NAMESPACE), bool) == machine
        await cluster.client.delete(PODS, "as-the-operator", NAMESPACE, grace_s=0)


def _gated(one: Object) -> Object:
    """As the admission policy leaves it where MutatingAdmissionPolicy is served."""
    return edited(one, {"spec/schedulingGates": [{"name": "busbar.dev/admission"}]})
