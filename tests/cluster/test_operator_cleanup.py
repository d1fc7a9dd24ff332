"""What must be gone when its reason is gone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster
from tests.cluster.tenancy import becomes, bindings, employ

from busbar.kube.resources import NAMESPACES, TENANTS

# Killed clients and servers leave half-open sockets behind; that is the point, not a leak of the product.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


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
        await becomes(labels, lambda found: "busbar.dev/tenant" not in found)
