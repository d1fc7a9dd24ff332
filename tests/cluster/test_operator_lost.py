"""What runs loses its ground: its node, its pool, its namespace. Nothing is doubled, and what is free is given to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, engine_job, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_kill import SIDES, Side, reviving

from busbar.kube.client import Object
from busbar.kube.resources import ACCELERATOR_POOLS, NAMESPACES, NODES, PODS, TRAINING_JOBS


def runs(pod: Object) -> Script:
    return Script()


def phase(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda status: status.get("phase") == name


async def falls_silent(cluster: Cluster, pod: str) -> str:
    """The name of the pod's node, whose kubelet does not answer any more."""
    name: str = (await cluster.pods())[pod]["spec"]["nodeName"]
    cluster.kubelet.skips = lambda pod: pod["spec"].get("nodeName") == name
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": "Ready",
        "status": "Unknown",
        "reason": "NodeStatusUnknown",
        "lastTransitionTime": moment,
    }
    await cluster.client.patch(NODES, name, {"status": {"conditions": [condition]}}, subresource="status")
    return name


async def test_a_job_of_the_platforms_engine_needs_nobody_to_go_on_when_its_node_is_lost(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, nodes=2, cpu="1", script=runs) as cluster:
        await cluster.start(node_lost_s=1.0)
        await cluster.create(engine_job("alone", shape={"cpu": "1", "memory": "64Mi"}))
        await cluster.until(TRAINING_JOBS, "alone", phase("Running"))
        lost = await falls_silent(cluster, "alone-1-0")
        status = await cluster.until(
            TRAINING_JOBS, "alone", lambda s: s.get("phase") == "Running" and s["attempt"] == 2
        )
        assert (status["restarts"], status["admission"]["nodes"] == [lost]) == (0, False)
        assert set(await cluster.pods()) == {"alone-2-0"}
        events = [e["reason"] for e in await cluster.events() if e["involvedObject"]["name"] == "alone"]
        assert "NodeLost" in events


async def test_beside_a_replica_whose_node_is_silent_another_one_starts_before_the_first_is_given_up(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, nodes=2, cpu="1", script=runs) as cluster:
        await cluster.start(node_lost_s=4.0)
        shape = {"cpu": "1", "memory": "64Mi"}
        spec = {"model": {"uri": "pvc://claim/model"}, "replicas": 1, "shape": shape}
        await cluster.create({"kind": "ModelService", "metadata": {"name": "web"}, "spec": spec})

        async def places() -> dict[str, str]:
            pods = await cluster.pods()
            return {name: pod["spec"]["nodeName"] for name, pod in pods.items() if "nodeName" in pod["spec"]}

        await becomes(places, lambda found: set(found) == {"web-0"})
        lost = await falls_silent(cluster, "web-0")
        both = await becomes(places, lambda found: len(found) == 2)
        assert (both["web-0"], both["web-1"] == lost) == (lost, False)
        await becomes(places, lambda found: set(found) == {"web-1"})
        await becomes(cluster.events, lambda events: "ReplicaReplaced" in {e["reason"] for e in events})


async def test_a_gang_with_copies_in_memory_runs_on_with_a_pod_on_another_node(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, nodes=4, cpu="1", script=runs) as cluster:
        await cluster.start(node_lost_s=1.0)
        shape = {"minPods": 3, "maxPods": 3, "cpu": "1", "memory": "64Mi"}
        await cluster.create(engine_job("gang", shape=shape, checkpoint={"memory": {}}))
        await cluster.until(TRAINING_JOBS, "gang", phase("Running"))
        first = (await cluster.status(TRAINING_JOBS, "gang"))["admission"]["nodes"]
        lost = await falls_silent(cluster, "gang-1-1")
        await cluster.until(
            TRAINING_JOBS,
            "gang",
            lambda s: (
                s.get("phase") == "Running" and (s["admission"].get("replaced") or [{}])[0].get("rank") == 1
            ),
        )
        status = await cluster.status(TRAINING_JOBS, "gang")
        assert (status["attempt"], status["restarts"]) == (1, 0)
        pods = await cluster.pods()
        assert {name: pod["metadata"]["uid"] for name, pod in pods.items()}.keys() == {
            "gang-1-0", "gang-1-1-r1", "gang-1-2",
        }  # fmt: skip
        every = {f"{cluster.namespace}-node-{i}" for i in range(4)}
        assert lost == first[1]
        assert status["admission"]["nodes"] == [first[0], *(every - {*first}), first[2]]


@pytest.mark.parametrize("side", SIDES)
async def test_such_a_gang_runs_on_though_the_operator_dies_at_every_write(
    apiserver: ApiServer, side: Side
) -> None:
    async with Cluster(apiserver, nodes=4, cpu="1", script=runs) as cluster:
        await cluster.start(node_lost_s=1.0)
        shape = {"minPods": 3, "maxPods": 3, "cpu": "1", "memory": "64Mi"}
        await cluster.create(engine_job("gang", shape=shape, checkpoint={"memory": {}}))
        first = (await cluster.until(TRAINING_JOBS, "gang", phase("Running")))["admission"]["nodes"]
        cluster.proxy.kill_each(side)
        async with reviving(cluster, node_lost_s=1.0):
            await falls_silent(cluster, "gang-1-1")
            status = await cluster.until(
                TRAINING_JOBS,
                "gang",
                lambda s: s.get("phase") == "Running" and s["admission"]["nodes"] != first,
            )
        assert (status["attempt"], status["restarts"]) == (1, 0)
        made = sorted(name.partition("/")[2] for name in cluster.kubelet.created.values())
        assert made == ["gang-1-0", "gang-1-1", "gang-1-1-r1", "gang-1-2"]
        assert sorted(await cluster.pods()) == ["gang-1-0", "gang-1-1-r1", "gang-1-2"]
        assert cluster.proxy.died_at >= 4


async def test_a_gang_whose_node_is_lost_starts_whole_elsewhere_once_its_end_is_certain(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, nodes=3, cpu="1", script=runs) as cluster:
        await cluster.start(unschedulable_s=0.5, node_lost_s=0.1)
        await cluster.create(gang_job("gang", 2))
        await cluster.until(TRAINING_JOBS, "gang", phase("Running"))
        first = await cluster.pods()
        lost = await falls_silent(cluster, "gang-1-0")
        await asyncio.sleep(0.5)
        assert set(await cluster.pods()) == set(first), "a node that is silent may come back"
        await cluster.client.delete(PODS, "gang-1-0", cluster.namespace, grace_s=1)  # evicted by its taint
        await cluster.until(
            TRAINING_JOBS, "gang", lambda s: s.get("reason") == "PodStuck" and lost in s["message"]
        )
        assert set(await cluster.pods()) == {"gang-1-0"}
        await cluster.client.delete(
            PODS, "gang-1-0", cluster.namespace, grace_s=0
        )  # a person knows that it is dead
        await cluster.until(
            TRAINING_JOBS, "gang", lambda s: s.get("phase") == "Running" and s["attempt"] == 2
        )
        again = await cluster.pods()
        assert {p["spec"]["nodeName"] for p in again.values()} == {
            n for n in (f"{cluster.namespace}-node-{i}" for i in range(3)) if n != lost
        }


async def test_jobs_of_a_pool_that_is_deleted_run_on_and_waiting_ones_say_what_is_missing(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, nodes=1, cpu="1", script=runs) as cluster:
        await cluster.start()
        await cluster.create(gang_job("first", 1))
        await cluster.until(TRAINING_JOBS, "first", phase("Running"))
        await cluster.create(gang_job("next", 1))
        await cluster.until(TRAINING_JOBS, "next", phase("Queued"))
        pool = await cluster.client.get(ACCELERATOR_POOLS, cluster.namespace)
        await cluster.client.delete(ACCELERATOR_POOLS, cluster.namespace)
        await cluster.until(TRAINING_JOBS, "next", lambda s: s.get("reason") == "NoMatchingAccelerator")
        assert (await cluster.status(TRAINING_JOBS, "first"))["phase"] == "Running"
        made = {k: pool[k] for k in ("kind", "spec")} | {"metadata": {"name": cluster.namespace}}
        await cluster.create(made)
        await cluster.client.delete(TRAINING_JOBS, "first", cluster.namespace)
        await cluster.client.delete(PODS, "first-1-0", cluster.namespace)
        await cluster.until(TRAINING_JOBS, "next", phase("Running"))


async def test_a_namespace_that_hangs_in_its_deletion_holds_no_place(apiserver: ApiServer) -> None:
    """Nothing can be made in it any more, and it hangs: no controller removes its finalizer here."""
    async with Cluster(apiserver, nodes=1, cpu="1", script=runs) as cluster:
        home = cluster.namespace
        other = f"{home}-other"
        await asyncio.to_thread(apiserver.make_namespace, other)
        await cluster.start()
        tenant = {"kind": "Tenant", "metadata": {"name": other}, "spec": {"namespaces": [other]}}
        await cluster.create(tenant)
        await cluster.create(gang_job("runs", 1))
        await cluster.until(TRAINING_JOBS, "runs", phase("Running"))
        await cluster.create(gang_job("waits", 1))
        await cluster.until(TRAINING_JOBS, "waits", phase("Queued"))
        await cluster.client.delete(NAMESPACES, home)
        await cluster.client.delete(TRAINING_JOBS, "runs", home)
        await cluster.client.delete(PODS, "runs-1-0", home)
        job = {"apiVersion": TRAINING_JOBS.api_version, **gang_job("elsewhere", 1)}
        await cluster.client.create(TRAINING_JOBS, job, other)

        async def elsewhere() -> str:
            status = (await cluster.client.get(TRAINING_JOBS, "elsewhere", other)).get("status") or {}
            return str(status.get("phase"))

        await becomes(elsewhere, lambda found: found == "Running")
        await cluster.until(TRAINING_JOBS, "waits", lambda s: s.get("reason") == "NamespaceEnding")
