"""The operator is killed ten times while real pods run: the job ends as if nothing had happened."""

from __future__ import annotations

import json
import time

import pytest
from tests.e2e.instance import Cluster, small_job

pytestmark = pytest.mark.node

SYSTEM = "busbar-system"


def kill_operator(cluster: Cluster) -> None:
    """End the operator's pod at once, without grace."""
    cluster.kube(
        "-n", SYSTEM, "delete", "pod", "-l", "app.kubernetes.io/component=operator",
        "--grace-period=0", "--force", "--wait=false",
    )  # fmt: skip


def test_ten_kills_of_the_operator_change_nothing(cluster: Cluster) -> None:
    name = "survives-kills"
    cluster.kube("apply", "-f", "-", stdin=json.dumps(small_job(name, steps=400)))
    seen: set[str] = set()
    for _ in range(10):
        kill_operator(cluster)
        until = time.monotonic() + 6
        while time.monotonic() < until:
            pods = cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={name}")["items"]
            seen |= {p["metadata"]["uid"] for p in pods}
            time.sleep(1)
    cluster.wait("the job's success", lambda: cluster.phase("trainingjob", name) == "Succeeded", 240)
    status = cluster.status("trainingjob", name)
    assert len(seen) == 1, f"{len(seen)} pods were made for one attempt"
    assert status["attempt"] == 1
    assert status.get("restarts", 0) == 0
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == 400


def test_a_suspended_job_saves_and_frees_its_place_and_goes_on(cluster: Cluster) -> None:
    name = "pauses"
    cluster.kube("apply", "-f", "-", stdin=json.dumps(small_job(name, steps=600)))
    cluster.wait(
        "some progress",
        lambda: (cluster.status("trainingjob", name).get("progress") or {}).get("step", 0) > 20,
        150,
    )
    patch = json.dumps({"spec": {"suspend": True}})
    cluster.kube("-n", "demo", "patch", "trainingjob", name, "--type=merge", "-p", patch)
    cluster.wait("the pause", lambda: cluster.phase("trainingjob", name) == "Suspended", 90)
    pods = cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={name}")["items"]
    assert not [p for p in pods if p["status"]["phase"] in ("Pending", "Running")], "its place is still held"
    saved = cluster.status("trainingjob", name)["checkpoint"]["step"]
    assert saved > 0
    patch = json.dumps({"spec": {"suspend": False}})
    cluster.kube("-n", "demo", "patch", "trainingjob", name, "--type=merge", "-p", patch)
    cluster.wait("the end", lambda: cluster.phase("trainingjob", name) == "Succeeded", 240)
    status = cluster.status("trainingjob", name)
    assert status["attempt"] == 2
    assert status["lostWork"]["steps"] == 0, "a pause that was announced lost work"


def test_deleting_a_running_job_leaves_nothing(cluster: Cluster) -> None:
    name = "short-lived"
    cluster.kube("apply", "-f", "-", stdin=json.dumps(small_job(name, steps=5000)))
    cluster.wait(
        "a pod", lambda: cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={name}")["items"], 60
    )
    cluster.kube("-n", "demo", "delete", "trainingjob", name, "--wait=true")
    left = ("get", "-n", "demo", "pods,services,configmaps", "-l", f"busbar.dev/job={name}", "-o", "name")
    cluster.wait("nothing left", lambda: not cluster.kube(*left).strip(), 90)
