"""A reservation, on the real API server: written to the job's status, and kept by the next operator."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script

from busbar.kube.client import Object
from busbar.kube.resources import PODS, TRAINING_JOBS

# Killed clients and servers leave half-open sockets behind; that is the point, not a leak of the product.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def whole_nodes(name: str, pods: int, **spec: Any) -> Object:
    """A job whose pods take a whole node each."""
    return gang_job(name, pods, shape={"minPods": pods, "maxPods": pods, "acceleratorsPerPod": 8}, **spec)


def writes_of_place(cluster: Cluster) -> int:
    return sum(
        w.status == 200 and w.path.endswith("/gang/status") and "reservation" in w.body["status"]
        for w in cluster.proxy.writes
    )


async def test_a_place_and_its_since_survive_a_restart_of_the_operator(apiserver: ApiServer) -> None:
    def script(pod: Object) -> Script:
        return Script(run_s=0.2 if pod["metadata"]["name"].startswith("gang") else None)

    async with Cluster(apiserver, nodes=2, script=script) as cluster:
        await cluster.start()
        await cluster.create(whole_nodes("holder", 1, preemptible=False))
        await cluster.until(TRAINING_JOBS, "holder", lambda s: s.get("phase") == "Running")
        await cluster.create(whole_nodes("gang", 2, priority=500))
        status = await cluster.until(TRAINING_JOBS, "gang", lambda s: "reservation" in s)
        place = status["reservation"]
        assert (place["pool"], place["pods"], place["acceleratorsPerPod"]) == (cluster.namespace, 2, 8)
        assert sorted(n["name"] for n in place["nodes"]) == [
            f"{cluster.namespace}-node-{i}" for i in range(2)
        ]
        assert (place["collected"], place["needed"]) == (1, 2)
        assert "It is next" in status["message"]

        await cluster.stop()
        restarted = await cluster.start()
        await cluster.until(TRAINING_JOBS, "gang", lambda s: restarted.rounds.last is not None)
        assert restarted.rounds.last is not None
        [kept] = restarted.rounds.last[1].reservations
        assert list(kept.placement.nodes) == [n["name"] for n in place["nodes"]]
        assert kept.since_s == tuple(datetime.fromisoformat(n["since"]).timestamp() for n in place["nodes"])
        again = await cluster.status(TRAINING_JOBS, "gang")
        assert again["reservation"] == place
        assert writes_of_place(cluster) == 1

        await cluster.client.delete(TRAINING_JOBS, "holder", cluster.namespace)
        await cluster.client.delete(
            PODS, "holder-1-0", cluster.namespace
        )  # there is no garbage collector here
        status = await cluster.until(TRAINING_JOBS, "gang", lambda s: s.get("phase") == "Succeeded")
        assert "reservation" not in status
        assert sorted(status["admission"]["nodes"]) == sorted(n["name"] for n in place["nodes"])
