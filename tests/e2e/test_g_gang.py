"""A gang of the training engine on a real cluster: a pod of two is killed, and the bits are those of one pod."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tests.e2e.instance import Cluster, small_job

pytestmark = pytest.mark.node

STEPS = 200


def job_of(name: str, pods: int) -> dict[str, Any]:
    """A job that adds up gradients in an order that is the same on any number of pods."""
    shape = {"minPods": pods, "maxPods": pods, "acceleratorsPerPod": 1, "memory": "1500Mi"}
    job = small_job(name, STEPS, shape=shape)
    job["spec"]["engine"] |= {
        "batch": {"sequences": 4, "microBatch": 2},
        "parallelism": {"order": "fixed"},
    }
    return job


def test_a_gang_of_the_engine_that_lost_a_pod_ends_with_the_bits_of_one_pod(cluster: Cluster) -> None:
    gang, alone = "two-ranks", "one-rank"
    cluster.submit(job_of(gang, 2))
    cluster.wait(
        "a checkpoint of two ranks",
        lambda: cluster.status("trainingjob", gang).get("checkpoint", {}).get("step", 0) >= 10,
        240,
    )
    pods = cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={gang}")["items"]
    assert sorted(p["metadata"]["name"] for p in pods) == [f"{gang}-1-0", f"{gang}-1-1"]
    cluster.kube("-n", "demo", "delete", "pod", f"{gang}-1-1", "--grace-period=0", "--force")
    cluster.submit(job_of(alone, 1))
    for name in (gang, alone):
        cluster.wait(f"the end of {name}", partial(ended, cluster, name), 300)
    together, single = (cluster.status("trainingjob", name) for name in (gang, alone))
    assert (together["phase"], single["phase"]) == ("Succeeded", "Succeeded"), (together, single)
    assert (together["attempt"], single["attempt"]) == (2, 1)
    assert together["fingerprint"]
    assert together["fingerprint"] == single["fingerprint"]
    for name in (gang, alone):
        cluster.kube("-n", "demo", "delete", "trainingjob", name, "--wait=true")


def ended(cluster: Cluster, name: str) -> bool:
    """Whether the job came to an end, good or bad."""
    return cluster.phase("trainingjob", name) in ("Succeeded", "Failed")
