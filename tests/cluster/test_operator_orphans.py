"""Pods that lost their owner are deleted on a real API server; those of a living job are not."""

from __future__ import annotations

from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.resources import PODS, TENANTS, TRAINING_JOBS


async def until_running(cluster: Cluster, name: str) -> None:
    await cluster.until(TRAINING_JOBS, name, lambda s: s.get("phase") == "Running")


async def orphaned(cluster: Cluster) -> list[str]:
    return [e["message"] for e in await cluster.events() if e["reason"] == "OrphanDeleted"]


async def test_a_stripped_pod_is_deleted_and_its_living_neighbour_stays(apiserver: ApiServer) -> None:
    """Orphans are also found at the start, when the owner reference and the job were deleted while no operator ran."""
    async with Cluster(apiserver, script=lambda pod: Script(), cpu="8") as cluster:
        await cluster.start()
        for name in ("stripped", "living"):
            await cluster.create(gang_job(name, 1))
            await until_running(cluster, name)
        before = await cluster.pods()
        await cluster.stop()
        patch: Object = {"metadata": {"ownerReferences": None}}
        await cluster.client.patch(PODS, "stripped-1-0", patch, cluster.namespace)
        await cluster.client.delete(TRAINING_JOBS, "stripped", cluster.namespace)
        await cluster.start()
        await becomes(cluster.pods, lambda pods: set(pods) == {"living-1-0"})
        said = await becomes(lambda: orphaned(cluster), bool)
        assert said == ["This pod is deleted: it has no owner reference, so no TrainingJob accounts for it."]
        assert (await cluster.pods())["living-1-0"]["metadata"]["uid"] == before["living-1-0"]["metadata"][
            "uid"
        ]


async def test_a_job_that_a_finalizer_holds_in_deletion_gives_its_place_back(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=lambda pod: Script(), cpu="1") as cluster:
        await cluster.start(orphan_grace_s=0.1)
        held = gang_job("held", 1)
        held["metadata"]["finalizers"] = ["example.com/hold"]
        await cluster.create(held)
        await until_running(cluster, "held")
        await cluster.client.delete(TRAINING_JOBS, "held", cluster.namespace)
        try:
            await becomes(cluster.pods, lambda pods: pods == {})
        finally:
            await cluster.client.patch(
                TRAINING_JOBS, "held", {"metadata": {"finalizers": None}}, cluster.namespace
            )


async def test_an_orphan_is_charged_to_its_tenant_until_it_is_gone(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=lambda pod: Script(), cpu="2") as cluster:
        await cluster.start(orphan_grace_s=600.0)
        await cluster.create(gang_job("gone", 1))
        await until_running(cluster, "gone")
        await cluster.client.delete(TRAINING_JOBS, "gone", cluster.namespace)

        def charged(status: dict[str, Any]) -> bool:
            held = [{"accelerator": "cpu", "count": 1}]
            return status.get("running") == 1 and status.get("allocated") == held

        tenant = f"tenant-{cluster.namespace}"
        await becomes(lambda: cluster.status(TRAINING_JOBS, "gone"), lambda status: status == {})
        await cluster.create(gang_job("next", 2))
        await cluster.until(TRAINING_JOBS, "next", lambda s: s.get("phase") == "Queued")
        await cluster.until(TENANTS, tenant, charged)
        assert set(await cluster.pods()) == {"gone-1-0"}
