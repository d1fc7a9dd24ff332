"""What must be gone when its reason is gone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster
from tests.cluster.test_operator_tenancy import becomes

from busbar.kube.resources import NAMESPACES, ROLE_BINDINGS, TENANTS

# Killed clients and servers leave half-open sockets behind; that is the point, not a leak of the product.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("away", [False, True], ids=["at work", "away"])
async def test_members_of_a_deleted_tenant_keep_no_rights(apiserver: ApiServer, away: bool) -> None:
    async with Cluster(apiserver) as cluster:
        await cluster.start()
        tenant = f"tenant-{cluster.namespace}"
        members = [{"subject": {"kind": "User", "name": "ann"}, "role": "member"}]
        await cluster.client.patch(TENANTS, tenant, {"spec": {"members": members}})

        async def bindings() -> list[str]:
            items, _ = await cluster.client.list(ROLE_BINDINGS, cluster.namespace)
            return [b["metadata"]["name"] for b in items]

        async def labels() -> Any:
            return (await cluster.client.get(NAMESPACES, cluster.namespace))["metadata"].get("labels", {})

        await becomes(bindings, lambda names: names == [f"busbar-{tenant}-member"])
        if away:
            await cluster.kill()
        await cluster.client.delete(TENANTS, tenant)
        if away:
            await cluster.start()
        await becomes(bindings, lambda names: names == [])
        await becomes(labels, lambda found: "busbar.dev/tenant" not in found)
