"""Gangs of the training engine on a real cluster: a pod of two is lost, and the bits are those of one pod."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.instance import Cluster, small_job

pytestmark = pytest.mark.node

# A step takes some 30 ms and a job's status is 6 s old at most: a job is seen long before its end.
STEPS = 800


def job_of(name: str, pods: int, **checkpoint: Any) -> dict[str, Any]:
    """A job that adds up gradients in an order that is the same on any number of pods."""
    shape = {"minPods": pods, "maxPods": pods, "acceleratorsPerPod": 1, "memory": "1500Mi"}
    job = small_job(name, STEPS, shape=shape)
    job["spec"]["engine"] |= {
        "batch": {"sequences": 4, "microBatch": 2},
        "parallelism": {"order": "fixed"},
    }
    job["spec"]["checkpoint"] |= checkpoint
    return job


def test_a_gang_of_the_engine_that_lost_a_pod_ends_with_the_bits_of_one_pod(cluster: Cluster) -> None:
    gang, mended, alone = "two-ranks", "two-mirrors", "one-rank"
    cluster.submit(job_of(gang, 2))
    cluster.wait(
        "a checkpoint of two ranks",
        lambda: cluster.status("trainingjob", gang).get("checkpoint", {}).get("step", 0) >= 10,
        240,
    )
    assert pods_of(cluster, gang) == [f"{gang}-1-0", f"{gang}-1-1"]
    cluster.kube("-n", "demo", "delete", "pod", f"{gang}-1-1", "--grace-period=0", "--force")
    cluster.wait(f"the end of {gang}", partial(ended, cluster, gang), 300)

    cluster.submit(job_of(mended, 2, everySteps=STEPS, memory={"everySteps": 5}))
    cluster.wait("steps of two ranks", lambda: step_of(cluster, mended) >= 10, 240)
    kill(f"{mended}-1-1")
    cluster.wait("another pod", lambda: f"{mended}-1-1-r1" in pods_of(cluster, mended), 60)
    cluster.wait(f"the end of {mended}", partial(ended, cluster, mended), 300)

    cluster.submit(job_of(alone, 1))
    cluster.wait(f"the end of {alone}", partial(ended, cluster, alone), 300)
    together, memory, single = (cluster.status("trainingjob", name) for name in (gang, mended, alone))
    assert {each["phase"] for each in (together, memory, single)} == {"Succeeded"}, (together, memory, single)
    assert [each["attempt"] for each in (together, memory, single)] == [2, 1, 1]
    assert [(each["rank"], each["times"]) for each in memory["admission"]["replaced"]] == [(1, 1)]
    assert together["fingerprint"]
    assert together["fingerprint"] == memory["fingerprint"] == single["fingerprint"]
    for name in (gang, mended, alone):
        cluster.kube("-n", "demo", "delete", "trainingjob", name, "--wait=true")


def ended(cluster: Cluster, name: str) -> bool:
    """Whether the job came to an end, good or bad."""
    return cluster.phase("trainingjob", name) in ("Succeeded", "Failed")


def step_of(cluster: Cluster, name: str) -> int:
    return int(cluster.status("trainingjob", name).get("progress", {}).get("step") or 0)


def pods_of(cluster: Cluster, name: str) -> list[str]:
    pods = cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={name}")["items"]
    return sorted(p["metadata"]["name"] for p in pods)


def kill(hostname: str) -> None:
    """All processes of a pod on this machine, with SIGKILL: none of them can say or save anything."""
    killed = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"HOSTNAME={hostname}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
                killed += 1
    assert killed, f"no process of pod {hostname} was running any more"
