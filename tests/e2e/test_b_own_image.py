"""Your own image and command: a plain PyTorch script over a gang of two pods."""

from __future__ import annotations

import pytest
from tests.e2e.instance import ROOT, Cluster

pytestmark = pytest.mark.node


def test_a_plain_pytorch_script_runs_over_two_pods(cluster: Cluster) -> None:
    cluster.kube("-n", "demo", "apply", "-f", str(ROOT / "examples" / "pytorch-two-pods.yaml"))
    name = "two-pods"
    cluster.wait("both pods", lambda: cluster.phase("trainingjob", name) in ("Running", "Succeeded"))
    pods = cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={name}")["items"]
    assert sorted(p["metadata"]["name"] for p in pods) == [f"{name}-1-0", f"{name}-1-1"]
    cluster.wait("the end of the job", lambda: cluster.phase("trainingjob", name) == "Succeeded", 180)
    log = cluster.kube("-n", "demo", "logs", f"{name}-1-0")
    assert "rank 0 of 2: done" in log, log[-500:]
    cluster.kube("-n", "demo", "delete", "trainingjob", name, "--wait=true")
    cluster.wait(
        "the pods' end",
        lambda: not cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={name}")["items"],
    )
