"""The main job, as ``make demo`` runs it: it checks its own claims and exits 0 only when all of them are true."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.e2e.instance import ROOT, Cluster

pytestmark = pytest.mark.node

SIMULATED = ("sim-language", "sim-research", "sim-speech", "sim-vision")


def test_the_demo_trains_kills_resumes_serves_scales_and_tells(cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--name", cluster.name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    print(done.stdout[-6000:], done.stderr[-3000:])
    assert done.returncode == 0, done.stderr[-2000:]
    assert "bit for bit" in done.stdout
    assert "0 failures" in done.stdout
    assert "the second of two jobs started at 50 % of its boards' limit" in done.stdout


def test_the_finished_job_says_what_happened_in_every_place(cluster: Cluster) -> None:
    status = cluster.status("trainingjob", "python-stdlib")
    assert status["phase"] == "Succeeded"
    assert status["restarts"] >= 1
    assert status["lostWork"]["steps"] > 0
    assert status["usage"]["acceleratorSeconds"] > 60
    table = cluster.kube("-n", "demo", "get", "trainingjobs")
    assert "REASON" in table.splitlines()[0]
    assert "Succeeded" in table
    described = cluster.kube("-n", "demo", "describe", "trainingjob", "python-stdlib")
    assert "Admitted" in described
    assert "Events:" in described


def test_kubectl_explains_our_kinds(cluster: Cluster) -> None:
    for path in ("trainingjob.spec.engine.optimizer", "modelservice.spec.scaling", "tenant.spec.quota"):
        text = cluster.kube("explain", path)
        assert "DESCRIPTION" in text
        assert "<no description>" not in text
    assert "Reason" in cluster.kube("explain", "trainingjob.status") or "reason" in cluster.kube(
        "explain", "trainingjob.status"
    )


def test_simulated_tenants_queue_and_run_on_simulated_pools(cluster: Cluster) -> None:
    pools = {p["spec"]["accelerator"]: p for p in cluster.get("acceleratorpools")["items"]}
    assert {"H100", "A100", "L4", "V100", "cpu"} <= set(pools)
    jobs = [j for j in cluster.get("-A", "trainingjobs")["items"] if j["metadata"]["namespace"] in SIMULATED]
    assert jobs, "the simulated tenants submit nothing"
    waiting = [j for j in jobs if j.get("status", {}).get("phase") == "Queued"]
    assert all(j["status"].get("message") for j in waiting), "a waiting job does not say why"
    pods = cluster.get("-A", "pods", "-l", "busbar.dev/job")["items"]
    real = {n["metadata"]["name"] for n in cluster.get("nodes")["items"] if "kwok" not in str(n["metadata"])}
    simulated = [p for p in pods if p["metadata"]["namespace"] in SIMULATED]
    assert simulated
    assert not [p for p in simulated if p["spec"].get("nodeName") in real], "simulated work on the real node"
