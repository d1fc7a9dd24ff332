"""The limits of a tenant on the real API server: its quota refuses, is restored, goes with the limits; gangs wait whole.

No controller runs beside the API server, so the test writes what the quota controller would have counted.
"""

from __future__ import annotations

from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, engine_job, gang_job, with_the_charts_rights
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.errors import Forbidden
from busbar.kube.resources import RESOURCE_QUOTAS, TENANTS, TRAINING_JOBS

NAME = "busbar-tenant-limits"


class Limited:
    """The tenant of a cluster, and its quota."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.tenant = cluster, f"tenant-{cluster.namespace}"

    async def limit(self, limits: dict[str, Any] | None) -> None:
        await self.cluster.client.patch(TENANTS, self.tenant, {"spec": {"limits": limits}})

    async def quotas(self) -> dict[str, Object]:
        items, _ = await self.cluster.client.list(RESOURCE_QUOTAS, self.cluster.namespace)
        return {q["metadata"]["name"]: q for q in items}

    async def quota(self, hard: dict[str, str], other_than: str = "") -> Object:
        def stands(found: dict[str, Object]) -> bool:
            quota = found.get(NAME)
            return (
                quota is not None and quota["spec"]["hard"] == hard and quota["metadata"]["uid"] != other_than
            )

        return dict((await becomes(self.quotas, stands))[NAME])

    async def count(self, **used: str) -> None:
        """What the quota controller writes."""
        hard = (await self.quotas())[NAME]["spec"]["hard"]
        counted = {name: used.get(name.replace("/", "_").split(".")[0], "0") for name in hard}
        status = {"status": {"hard": hard, "used": counted}}
        await self.cluster.client.patch(
            RESOURCE_QUOTAS, NAME, status, self.cluster.namespace, subresource="status"
        )


async def test_the_quota_refuses_with_a_sentence_is_restored_and_goes_with_the_limits(
    platform: ApiServer,
) -> None:
    async with with_the_charts_rights(platform, script=lambda pod: Script(run_s=None)) as cluster:
        await cluster.start()
        mine, home, client = Limited(cluster), cluster.namespace, cluster.client
        hard = {"count/trainingjobs.busbar.dev": "1", "requests.storage": "1Ti"}
        await mine.limit({"trainingJobs": 1, "storageGib": 1024})
        first = await mine.quota(hard)
        assert first["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "busbar"

        await mine.count()
        await cluster.create(engine_job("one"))

        async def second() -> str:
            try:
                await cluster.create(engine_job("two"))
            except Forbidden as error:
                return error.message
            await client.delete(TRAINING_JOBS, "two", home)
            return ""

        refusal = await becomes(second, lambda text: "exceeded quota" in text)
        assert f"exceeded quota: {NAME}" in refusal
        assert "limited: count/trainingjobs.busbar.dev=1" in refusal

        await client.patch(RESOURCE_QUOTAS, NAME, {"spec": {"hard": {"requests.storage": "9Ti"}}}, home)
        await mine.quota(hard)
        await client.patch(RESOURCE_QUOTAS, NAME, {"spec": {"hard": {"services": "9"}}}, home)
        again = await mine.quota(hard)
        await client.delete(RESOURCE_QUOTAS, NAME, home)
        again = await mine.quota(hard, other_than=again["metadata"]["uid"])
        await mine.count(count_trainingjobs="1")
        told = await cluster.until(TENANTS, mine.tenant, lambda s: bool(s.get("limitUse")))
        assert told["limitUse"] == [{"namespace": home, "trainingJobs": 1, "storageGib": 0.0}]

        await mine.limit({"trainingJobs": None, "storageGib": None, "pods": 3})
        await mine.quota({"pods": "3"}, other_than=again["metadata"]["uid"])
        await mine.limit(None)
        await becomes(mine.quotas, lambda found: NAME not in found)
        await cluster.until(TENANTS, mine.tenant, lambda s: "limitUse" not in s)


async def test_a_gang_that_the_limit_cannot_hold_says_so_and_makes_no_pod(platform: ApiServer) -> None:
    async with with_the_charts_rights(platform, script=lambda pod: Script(run_s=None)) as cluster:
        await cluster.start()
        mine = Limited(cluster)
        await mine.limit({"pods": 2})
        await mine.quota({"pods": "2"})
        await mine.count()
        await cluster.create(gang_job("wide", 3))
        told = await cluster.until(TRAINING_JOBS, "wide", lambda s: s.get("reason") == "PodLimit")
        assert told["phase"] == "Queued"
        assert "It needs 3 pods, and 2 of the 2 are left" in told["message"]
        assert told.get("admission") is None
        assert await cluster.pods() == {}
        await cluster.create(gang_job("fits", 2))
        await cluster.until(TRAINING_JOBS, "fits", lambda s: s.get("phase") == "Running")
        assert sorted(await cluster.pods()) == ["fits-1-0", "fits-1-1"]
