"""Objects that the operator deletes when the reason for them is gone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes, bindings, employ

from busbar.kube.resources import NAMESPACES, TENANTS, TRAINING_JOBS


async def test_work_of_a_deleted_tenant_stops_and_goes_on_with_the_next_one(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=lambda pod: Script()) as cluster:
        await cluster.start()
        tenant = f"tenant-{cluster.namespace}"
        await cluster.create(gang_job("orphaned", 1))
        await cluster.until(TRAINING_JOBS, "orphaned", lambda s: s.get("phase") == "Running")
        await cluster.until(TENANTS, tenant, lambda s: s.get("runningIn") == [cluster.namespace])
        await cluster.client.delete(TENANTS, tenant)
        await cluster.until(
            TRAINING_JOBS,
            "orphaned",
            lambda s: (s.get("phase"), s.get("reason")) == ("Suspended", "TenantGone"),
        )
        assert await cluster.pods() == {}
        await cluster.create(
            {"kind": "Tenant", "metadata": {"name": "next"}, "spec": {"namespaces": [cluster.namespace]}}
        )
        await cluster.until(TRAINING_JOBS, "orphaned", lambda s: s.get("phase") == "Running")


@pytest.mark.parametrize("away", [False, True], ids=["at work", "away"])
async def test_members_of_a_deleted_tenant_keep_no_rights(apiserver: ApiServer, away: bool) -> None:
    async with Cluster(apiserver) as cluster:
        await cluster.start()
        tenant = await employ(cluster, "ann")

        async def labels() -> Any:
            return (await cluster.client.get(NAMESPACES, cluster.namespace))["metadata"].get("labels", {})

        await becomes(lambda: bindings(cluster), lambda names: names == [f"busbar-{tenant}-member"])
        if away:
            await cluster.kill()
        await cluster.client.delete(TENANTS, tenant)
        if away:
            await cluster.start()
        await becomes(lambda: bindings(cluster), lambda names: names == [])
        found = await becomes(labels, lambda found: "busbar.dev/tenant" not in found)
        assert found["busbar.dev/released"] == tenant
        assert found["pod-security.kubernetes.io/enforce"] == "restricted"
