"""Replicas for which a feed has too few watts run under a power cap, and without it once it has more: real operator, agent
and guard, simulated boards. The demand and the seconds come from the test, as in `test_operator_promise.py`.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.racks import is_running, racked
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_leases import NAMES as RED
from tests.cluster.test_operator_leases import Rack
from tests.cluster.test_operator_promise import STEP, begun, replica, running

from busbar.kube.client import Object
from busbar.kube.resources import MODEL_SERVICES, PERFORMANCE_PROFILES, POWER_DOMAINS, TRAINING_JOBS

HOME = "capped-home"
NAMES = tuple(f"red-{i}" for i in range(4))
BUDGET_W = 1450.0
FEED: Object = {
    "kind": "PowerDomain",
    "metadata": {"name": "red"},
    "spec": {"budgetWatts": BUDGET_W, "policy": "Lease", "hostWatts": 100, "nodeSelector": {"rack": "red"}},
}
"""Four hosts of 100 W and as many A100, which draw 63 W while they idle: 783 W are left after the margin. A replica adds 337 W,
and 257 W where its board is limited to 80 %: two without caps, three under that one."""


async def profiled(cluster: Cluster) -> None:
    """What replicas of the class do on an A100, and what limits cost them, as if other services had measured it."""
    meta, spec = {"name": "serve-x"}, {"workloadClass": "serve-x"}
    await cluster.create({"kind": "PerformanceProfile", "metadata": meta, "spec": spec})
    cell = {
        "accelerator": "A100", "accelerators": 1, "tokensPerSecond": 50, "source": "Measured", "kvTokens": 200_000,
        "stepModel": STEP,
    }  # fmt: skip
    curves = [
        {
            "accelerator": "A100",
            "phase": phase,
            "comparisons": [
                {
                    "percent": low,
                    "againstPercent": high,
                    "logSlower": round(math.log(slower), 4),
                    "seconds": 2000,
                }
                for low, high, slower in ((80, 100, 1.02), (60, 80, 1.1))
            ],
        }
        for phase in ("Prefill", "Decode")
    ]
    status = {"status": {"cells": [cell], "powerCurves": curves}}
    await cluster.client.patch(PERFORMANCE_PROFILES, "serve-x", status, subresource="status")


def caps(status: dict[str, Any]) -> list[int | None]:
    return [row.get("powerCapPercent") for row in status.get("pools") or ()]


async def test_replicas_run_under_a_cap_where_the_feed_has_too_few_watts_and_without_it_when_it_has_more(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    rack = Rack(tmp_path, NAMES, boards=1)
    async with racked(apiserver, rack, HOME, FEED, replica) as cluster, rack.watched():
        await profiled(cluster)
        load = await begun(cluster, {"power_simulator_url": rack.url}, accelerators=["A100"])
        await cluster.until(POWER_DOMAINS, "red", lambda s: s.get("boardsLimited") is True)
        await rack.has(lambda watts: watts <= BUDGET_W)
        rack.most_w = BUDGET_W
        load.now_s += 60  # the speeds are read again
        rate = 2.4 * load.each
        status = await load.until(rate, lambda s: running(3)(s) and caps(s) == [80])
        [row] = status["pools"]
        assert row["requestsPerSecond"] < load.each
        causes = [entry["cause"] for entry in status["scalingHistory"]]
        assert "Power" in causes
        assert any("limited to 80 % of their watts" in entry["reason"] for entry in status["scalingHistory"])
        pods = (await cluster.pods()).values()
        boards = [f"SIMULATED-{pod['spec']['nodeName']}-0" for pod in pods]
        assert len(set(boards)) == 3

        async def limits() -> list[float]:
            return [rack.limits.get(uuid, 400.0) for uuid in boards]

        await becomes(limits, lambda found: max(found) <= 320.0)
        for _ in range(10):
            await asyncio.sleep(0.1)
            assert max(await limits()) <= 320.0

        rack.most_w = 2 * BUDGET_W
        more = {"spec": {"budgetWatts": rack.most_w}}
        await cluster.client.patch(POWER_DOMAINS, "red", more)
        lowered_s = load.now_s
        status = await load.until(rate, lambda s: caps(s) == [None], seconds=5.0)
        assert status["readyReplicas"] == 3
        assert load.now_s - lowered_s > 250, "not soon after it was lowered"
        assert "no power cap any more" in status["scalingHistory"][-1]["reason"]
        await becomes(limits, lambda found: min(found) > 320.0)
        there = {pod["metadata"]["uid"] for pod in (await cluster.pods()).values()}
        assert there >= {pod["metadata"]["uid"] for pod in pods}, "nothing was restarted"
        await cluster.until(
            MODEL_SERVICES, "web", lambda s: s["pools"][0]["requestsPerSecond"] >= 0.9 * load.each
        )
    assert rack.overruns == []


SHARED_W = 1100.0
"""A host of 100 W and four A100 are 352 W while they idle, so 737 W are left after the margin. A training job of one A100 adds
337 W; the 400 W that are left then are enough for one replica without a cap, and for two with 60 %, which add 177 W each."""


def served_or_trained(pod: Object) -> Script:
    is_ours = pod["metadata"]["labels"].get("busbar.dev/kind") == "modelservice"
    return replica(pod) if is_ours else Script(run_s=None)


async def test_replicas_under_a_cap_share_a_node_with_a_job_that_has_none(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    rack = Rack(tmp_path, RED[:1], boards=4)
    feed: Object = {**FEED, "spec": {**FEED["spec"], "budgetWatts": SHARED_W}}
    async with racked(apiserver, rack, "shared-home", feed, served_or_trained) as cluster, rack.watched():
        await profiled(cluster)
        await cluster.create(gang_job("trains", 1, accelerators=["A100"]))
        settings = {"power_simulator_url": rack.url}
        load = await begun(cluster, settings, accelerators=["A100"], maxReplicas=2)
        await cluster.until(POWER_DOMAINS, "red", lambda s: s.get("boardsLimited") is True)
        await cluster.until(TRAINING_JOBS, "trains", is_running)
        await rack.has(lambda watts: watts <= SHARED_W)
        rack.most_w = SHARED_W
        load.now_s += 60
        rate = 1.6 * load.each
        status = await load.until(rate, lambda s: running(2)(s) and caps(s) == [60])
        pods = (await cluster.pods()).values()
        assert {pod["spec"]["nodeName"] for pod in pods} == {RED[0]}
        by_age = sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        assert "trains" in by_age[0]["metadata"]["name"]

        async def limits() -> list[float]:
            """The oldest pod has the first board; nobody has the last."""
            return [rack.limits.get(f"SIMULATED-{RED[0]}-{i}", 400.0) for i in range(4)]

        def apart(found: list[float]) -> bool:
            return max(found[1:3]) <= 240.0 < min(found[0], found[3])

        await becomes(limits, apart)
        for _ in range(10):
            await asyncio.sleep(0.1)
            assert max((await limits())[1:3]) <= 240.0

        rack.most_w = 2 * SHARED_W
        await cluster.client.patch(POWER_DOMAINS, "red", {"spec": {"budgetWatts": rack.most_w}})
        status = await load.until(rate, lambda s: caps(s) == [None], seconds=5.0)
        assert status["readyReplicas"] == 2
        await becomes(limits, lambda found: min(found) > 240.0)
        there = {pod["metadata"]["uid"] for pod in (await cluster.pods()).values()}
        assert there >= {pod["metadata"]["uid"] for pod in pods}, "nothing was restarted"
        assert is_running(await cluster.status(TRAINING_JOBS, "trains"))
    assert rack.overruns == []
