"""What runs loses its ground: its node, its pool, its namespace. Nothing is doubled, and what is free is given to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.resources import ACCELERATOR_POOLS, NAMESPACES, NODES, PODS, TRAINING_JOBS


def runs(pod: Object) -> Script:
    return Script()


def phase(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda status: status.get("phase") == name


async def test_a_gang_whose_node_is_lost_starts_whole_elsewhere_once_its_end_is_certain(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, nodes=3, cpu="1", script=runs) as cluster:
        await cluster.start(unschedulable_s=0.5)
        await cluster.create(gang_job("gang", 2))
        await cluster.until(TRAINING_JOBS, "gang", phase("Running"))
        first = await cluster.pods()
        lost = first["gang-1-0"]["spec"]["nodeName"]
        cluster.kubelet.skips = lambda pod: pod["spec"].get("nodeName") == lost
        conditions = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
        await cluster.client.patch(NODES, lost, {"status": {"conditions": conditions}}, subresource="status")
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
