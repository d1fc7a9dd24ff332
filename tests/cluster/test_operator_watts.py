"""Watts hold a job back on the real API server, and a larger budget starts it."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script, add_node

from busbar.kube.client import Object
from busbar.kube.resources import POWER_DOMAINS, TRAINING_JOBS

POOL: Object = {
    "apiVersion": "busbar.dev/v1alpha1",
    "kind": "AcceleratorPool",
    "metadata": {"name": "watts"},
    "spec": {"accelerator": "A100", "resourceName": "nvidia.com/gpu", "nodeSelector": {"pool": "watts"}},
}
FEED: Object = {
    "kind": "PowerDomain",
    "metadata": {"name": "rack-red"},
    "spec": {"budgetWatts": 5000, "policy": "Static", "hostWatts": 500, "nodeSelector": {"rack": "red"}},
}
"""Two hosts, sixteen idle A100 (63 W each) and one job on eight (337 W more each) are 4,704 W of the 4,950 W that are
left after the margin."""


def is_short(status: dict[str, Any]) -> bool:
    return status.get("reason") == "InsufficientPower"


async def test_a_job_waits_for_watts_until_the_budget_is_raised(apiserver: ApiServer) -> None:
    shape = {"minPods": 1, "maxPods": 1, "acceleratorsPerPod": 8}
    async with Cluster(apiserver, nodes=0, script=lambda pod: Script(run_s=None)) as cluster:
        for i in range(2):
            labels = {"rack": "red", "pool": "watts"}
            await asyncio.to_thread(add_node, apiserver, f"watts-{i}", labels=labels, gpus=8)
        await asyncio.to_thread(lambda: apiserver.admin.create(POOL).expect())
        await cluster.create(FEED)
        await cluster.start()
        for name in ("first", "second"):
            await cluster.create(gang_job(name, 1, shape=shape, accelerators=["A100"]))
            if name == "first":
                await cluster.until(TRAINING_JOBS, name, lambda s: s.get("phase") == "Running")
        status = await cluster.until(TRAINING_JOBS, "second", is_short)
        assert status["message"].startswith(
            "Needs 2,696 W on the power domain rack-red, and 246 W of the 2,942 W that it has for jobs are free. "
            "It would start now with 2,450 W more there."
        )
        assert status["waiting"]["domain"] == "rack-red"

        await cluster.client.patch(POWER_DOMAINS, "rack-red", {"spec": {"budgetWatts": 7475}})
        await cluster.until(TRAINING_JOBS, "second", lambda s: s.get("phase") == "Running")
