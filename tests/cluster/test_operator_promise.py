"""A service whose latency target decides: up, panic, down, and a gateway that is away, on the real API server.

The demand comes as the gateway would report it, and the seconds by which services are scaled pass when the test says
so: nothing here waits for a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster
from tests.cluster.kubelet import Script, add_node
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.contracts.demand import Demand, ServiceDemand, SizeCount, Totals, WindowDemand
from busbar.kube.contracts.service_plan import ServicePlanRequest
from busbar.kube.contracts.service_series import SeriesSpan
from busbar.kube.errors import Invalid
from busbar.kube.informer import Key
from busbar.kube.resources import ACCELERATOR_POOLS, MODEL_SERVICES
from busbar.operator.app import Operator

STEP = {
    "secondsPerStep": 0.02, "secondsPerSequence": 0.001, "secondsPerThousandContextTokens": 0.0005,
    "secondsPerPromptToken": 0.0001, "rmsErrorSeconds": 0.001, "steps": 500,
}  # fmt: skip
REPORT = {
    "class": "serve-x", "accelerator": "cpu", "kvBytes": 2**30, "kvBytesPerToken": 2**12,
    "decodeTokensPerSecond": 50.0, "stepModel": STEP,
}  # fmt: skip


def replica(pod: Object) -> Script:
    def status(seconds: float) -> dict[str, Any]:
        return {"kind": "serving", "ready": True, "running": 0, "waiting": 0, "report": REPORT}

    return Script(status=status)


@dataclass
class Load:
    """The service's clients, its gateway, and the operator's clock."""

    cluster: Cluster
    operator: Operator
    now_s: float = 10_000.0
    counted_s: float = 1000.0
    answered: int = 0
    each: float = 0.0
    """Requests per second of one replica, as the status says."""

    def begin(self) -> None:
        self.operator.demand.clock = self.operator.handlers.targets.clock = lambda: self.now_s

    def tick(self, rate: float, seconds: float = 1.0) -> None:
        """Some time, and the gateway's answer after it."""
        self.now_s, self.counted_s = self.now_s + seconds, self.counted_s + seconds
        self.answered += round(rate * seconds)
        windows = []
        for seconds in (10, 180):
            count = round(rate * seconds)
            size = {"count": count, "prompt_tokens": 400 * count, "output_tokens": 200 * count}
            sizes = [SizeCount(prompt=2, output=3, **size)] if count else []
            windows.append(WindowDemand(seconds=seconds, arrivals=count, sizes=sizes))
        said = ServiceDemand(
            namespace=self.cluster.namespace, name="web", arrivals=self.answered, last_request_age_seconds=0.0,
            windows=windows, totals=Totals(answered=self.answered, within=self.answered),
        )  # fmt: skip
        self.operator.demand.take(
            Demand(services=[said], as_of=datetime.now(UTC), counted_seconds=self.counted_s)
        )

    async def until(self, rate: float, wanted: Any, seconds: float = 1.0) -> dict[str, Any]:
        """Answers of the gateway, so far apart, until the status is as wanted."""

        async def after_next() -> dict[str, Any]:
            self.tick(rate, seconds)
            return await self.cluster.status(MODEL_SERVICES, "web")

        found: dict[str, Any] = await becomes(after_next, wanted)
        return found


def running(count: int) -> Any:
    return lambda s: s.get("readyReplicas") == count == s.get("desiredReplicas")


async def begun(cluster: Cluster, settings: dict[str, Any] | None = None, **spec: Any) -> Load:
    """A service with a latency target, one replica, and a measured speed."""
    operator = await cluster.start(
        **{"gateway_url": "http://127.0.0.1:1", "usage_period_s": 0.2, **(settings or {})}
    )
    load = Load(cluster, operator)
    load.begin()
    slo = {"ttftMilliseconds": 2000, "tpotMilliseconds": 100}
    body = {"model": {"uri": "pvc://claim/model"}, "slo": slo, "maxReplicas": 6, "drainSeconds": 0, **spec}
    await cluster.create({"kind": "ModelService", "metadata": {"name": "web"}, "spec": body})
    status = await load.until(1.0, lambda s: (s.get("slo") or {}).get("scaledBy") == "Promise")
    assert status["desiredReplicas"] == 1
    status = await load.until(1.0, lambda s: s["pools"][0].get("requestsPerSecond"))
    load.each = status["pools"][0]["requestsPerSecond"]
    return load


async def test_a_latency_target_adds_replicas_at_once_and_takes_them_away_after_the_window(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=replica) as cluster:
        load = await begun(cluster)
        operator, rate = load.operator, load.each
        status = await load.until(2.5 * rate, running(3))
        entry = status["scalingHistory"][0]
        assert (entry["previous"], entry["desired"], entry["cause"]) == (1, 3, "Panic")
        assert status["pools"][0]["desired"] == 3
        await operator.series.sample()
        load.tick(2.5 * rate)
        await operator.series.sample()
        series = operator.series.of(Key(cluster.namespace, "web"), SeriesSpan.HOUR)
        [mine] = series.pools
        assert (mine.pool, mine.accelerator) == (cluster.namespace, "cpu")
        assert all(
            numbers[-1]
            for numbers in (series.requests_per_second, mine.ready_replicas, mine.capacity_per_second)
        )

        before = len(status["scalingHistory"])
        load.now_s += (
            60  # the gateway is away: nothing is heard for a minute, then it answers that it has just started
        )
        operator.controller.add("ModelService", Key(cluster.namespace, "web"))
        away = await becomes(
            lambda: cluster.status(MODEL_SERVICES, "web"),
            lambda s: "gateway says nothing" in (s["slo"].get("message") or ""),
        )
        assert away["desiredReplicas"] == 3
        load.counted_s = 0.0
        for _ in range(9):
            load.tick(0.0)
        status = await load.until(
            2.5 * rate, lambda s: s["slo"]["scaledBy"] == "Promise" and s.get("forecast")
        )
        assert len(status["scalingHistory"]) == before, "nothing was scaled while it was away"

        status = await load.until(0.1 * rate, running(1), seconds=5.0)
        idle = [e for e in status["scalingHistory"] if e["cause"] == "Idle"]
        assert idle
        assert all(e["desired"] < e["previous"] for e in idle)
        assert load.now_s > 10_300, "not before the window has passed"
        assert status["slo"]["attainmentHour"] == 1.0


async def test_an_operator_that_is_killed_goes_on_with_the_target_that_the_status_has(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=replica) as cluster:
        load = await begun(cluster)
        before = await load.until(2.5 * load.each, running(3))
        await cluster.kill()
        load.operator = await cluster.start(gateway_url="http://127.0.0.1:1", usage_period_s=0.2)
        load.begin()
        low = await load.until(0.1 * load.each, lambda s: s["forecast"]["now"] < load.each)
        for _ in range(60):
            load.tick(0.1 * load.each)
        status = await load.until(0.1 * load.each, lambda s: s["lastUsageTime"] > low["lastUsageTime"])
        assert (status["desiredReplicas"], status["slo"]["scaledBy"]) == (3, "Promise")
        assert status["scalingHistory"] == before["scalingHistory"]


async def test_of_two_types_the_cheaper_is_claimed_and_where_it_has_no_room_the_other(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=replica) as cluster:
        other = f"{cluster.namespace}-b"
        add_node(apiserver, f"{other}-node", labels={"pool": other}, cpu="2")
        pool = {
            "accelerator": "cpu-b",
            "resourceName": "cpu",
            "nodeSelector": {"pool": other},
            "pricePerHour": 1.0,
        }
        load = await begun(cluster, accelerators=["cpu", "cpu-b"])
        await cluster.create({"kind": "AcceleratorPool", "metadata": {"name": other}, "spec": pool})
        [line] = (await cluster.status(MODEL_SERVICES, "web"))["measured"]
        measured = {"status": {"measured": [line, line | {"accelerator": "cpu-b"}]}}
        await cluster.client.patch(MODEL_SERVICES, "web", measured, cluster.namespace, subresource="status")
        await load.until(1.0, lambda s: len(s["measured"]) == 2)
        await cluster.until(ACCELERATOR_POOLS, other, lambda s: s.get("capacity") == 2)
        load.now_s += 60  # the speeds are read again
        status = await load.until(
            3.6 * load.each,
            lambda s: s.get("readyReplicas") == s.get("desiredReplicas") and s["replicas"] >= 4,
        )
        rows = {row["pool"]: row for row in status["pools"]}
        assert (rows[other]["desired"], rows[other]["ready"], rows[other]["accelerator"]) == (2, 2, "cpu-b")
        assert rows[cluster.namespace]["ready"] >= 2
        asked = ServicePlanRequest(namespace=cluster.namespace, name="web", rate=1.5 * load.each)
        plan = await load.operator.handlers.targets.service_plan(asked)
        assert plan.possible, plan.reason
        assert {pool.pool for pool in plan.pools} == {cluster.namespace, other}
        assert sum(pool.replicas for pool in plan.pools) >= 2
        uid = load.operator.caches.services.items[Key(cluster.namespace, "web")].metadata.uid
        shares = load.operator.handlers.targets.shares_of(uid)[2]
        assert (set(shares), round(sum(shares.values()), 6)) == ({cluster.namespace, other}, 1.0)
        target = {"spec": {"scaling": {"external": {cluster.namespace: 1, other: 1}}}}
        await cluster.client.patch(MODEL_SERVICES, "web", target, cluster.namespace)
        status = await load.until(
            3.6 * load.each,
            lambda s: (
                {row["pool"]: row["replicas"] for row in s["pools"]} == {cluster.namespace: 1, other: 1}
            ),
        )
        assert status["desiredReplicas"] == 2
        [scaled] = [c for c in status["conditions"] if c["type"] == "ExternallyScaled"]
        assert (scaled["status"], scaled["reason"]) == ("True", "ExternalTarget")
        both = {"spec": {"replicas": 3}}
        with pytest.raises(Invalid, match="each decide the number of replicas"):
            await cluster.client.patch(MODEL_SERVICES, "web", both, cluster.namespace)
