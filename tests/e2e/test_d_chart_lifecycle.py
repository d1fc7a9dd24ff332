"""Upgrade and uninstall of the platform keep people's objects; a new installation finds them again."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime

import pytest
from tests.e2e.instance import BUSBAR, ROOT, Cluster, small_job

pytestmark = pytest.mark.node

SYSTEM = "busbar-system"


def test_an_upgrade_keeps_the_workload_key_and_the_objects(cluster: Cluster) -> None:
    before = cluster.get("-n", SYSTEM, "secret", "busbar-workload-key")["data"]
    jobs = {j["metadata"]["uid"] for j in cluster.get("-n", "demo", "trainingjobs")["items"]}
    cluster.run(
        cluster.helm,
        "upgrade",
        "busbar",
        str(ROOT / "charts" / "busbar"),
        "-n",
        SYSTEM,
        "--reuse-values",
        "--wait",
    )
    assert cluster.get("-n", SYSTEM, "secret", "busbar-workload-key")["data"] == before
    assert jobs <= {j["metadata"]["uid"] for j in cluster.get("-n", "demo", "trainingjobs")["items"]}


def test_uninstall_keeps_peoples_objects_and_running_pods_and_reinstall_adopts_them(cluster: Cluster) -> None:
    name = "outlives-the-platform"
    cluster.submit(small_job(name, steps=700))
    cluster.wait("running", lambda: cluster.phase("trainingjob", name) == "Running", 240)
    pod = cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={name}")["items"][0]["metadata"]["uid"]
    cluster.run(cluster.helm, "uninstall", "busbar", "-n", SYSTEM, "--wait")
    assert cluster.get("-n", "demo", "trainingjob", name)["metadata"]["name"] == name
    assert cluster.get("tenants")["items"]
    cluster.up()
    cluster.wait("the end of the job", lambda: cluster.phase("trainingjob", name) == "Succeeded", 600)
    pods = cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={name}")["items"]
    assert [p["metadata"]["uid"] for p in pods] in ([pod], []), "the running pod was replaced"
    assert cluster.status("trainingjob", name)["attempt"] == 1


def test_a_stopped_cluster_comes_back_with_its_objects_and_its_platform(cluster: Cluster) -> None:
    listed = ("-n", "demo", "get", "trainingjobs,modelservices,tenants,acceleratorpools", "-o", "name")
    before = set(cluster.kube(*listed).split())
    assert before
    platform = cluster.kube("-n", SYSTEM, "get", "deployments", "-o", "name").split()
    assert len(platform) == 4, "operator, API, gateway, and the player of the simulated nodes' power"
    subprocess.run([*BUSBAR, "down", "--name", cluster.name], check=True)
    stopped = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    cluster.up()
    assert before <= set(cluster.kube(*listed).split())
    started = "jsonpath={.items[*].status.containerStatuses[*].state.running.startedAt}"
    ready = "jsonpath={.items[*].status.readyReplicas}"

    def is_back() -> bool:
        """The stored status is that from before the stop until the kubelet and a controller have written it again."""
        times = cluster.kube("-n", SYSTEM, "get", "pods", "-o", started).split()
        counts = cluster.kube("-n", SYSTEM, "get", "deployments", "-o", ready).split()
        return len(times) == 4 and min(times) >= stopped and counts == ["1"] * 4

    cluster.wait("the platform's return", is_back)
