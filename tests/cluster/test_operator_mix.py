"""A service over three types on the real API server, while quota, prices, pools and nodes change under it.

The demand and the seconds come from the test, as in `test_operator_promise.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster
from tests.cluster.kubelet import add_node
from tests.cluster.test_operator_kill import reviving
from tests.cluster.test_operator_promise import Load, begun, replica

from busbar.kube.resources import ACCELERATOR_POOLS, MODEL_SERVICES, NODES, PODS, TENANTS

PRICES = {"b": 1.0, "c": 2.0}
"""Of further types; the one of the cluster's own pool costs 3.6."""
GATEWAY = {"gateway_url": "http://127.0.0.1:1", "usage_period_s": 0.2}


async def over_types(cluster: Cluster, load: Load) -> tuple[str, ...]:
    """Pools of the further types, with room for four replicas on two nodes each, and with the speed that was measured."""
    names = tuple(f"{cluster.namespace}-{kind}" for kind in PRICES)
    for name, (kind, price) in zip(names, PRICES.items(), strict=True):
        for i in range(2):
            add_node(cluster.server, f"{name}-{i}", labels={"pool": name}, cpu="2")
        spec = {
            "accelerator": f"cpu-{kind}",
            "resourceName": "cpu",
            "nodeSelector": {"pool": name},
            "pricePerHour": price,
        }
        await cluster.create({"kind": "AcceleratorPool", "metadata": {"name": name}, "spec": spec})
    [line] = (await cluster.status(MODEL_SERVICES, "web"))["measured"]
    lines = [line, *(line | {"accelerator": f"cpu-{kind}"} for kind in PRICES)]
    measured = {"status": {"measured": lines}}
    await cluster.client.patch(MODEL_SERVICES, "web", measured, cluster.namespace, subresource="status")
    await load.until(1.0, lambda s: len(s["measured"]) == len(lines))
    for name in names:
        await cluster.until(ACCELERATOR_POOLS, name, lambda s: s.get("capacity") == 4)
    load.now_s += 60  # the speeds are read again
    return names


def ready(status: dict[str, Any]) -> dict[str, int]:
    """Replicas that take requests, by the last letter of their pool; "own" is the cluster's."""
    known = {row["pool"].rpartition("-")[2]: row.get("ready", 0) for row in status.get("pools") or ()}
    return {kind if kind in PRICES else "own": count for kind, count in known.items() if count}


def settled(wanted: Callable[[dict[str, int]], bool]) -> Callable[[dict[str, Any]], bool]:
    return lambda s: s.get("readyReplicas") == s["desiredReplicas"] == s["replicas"] and wanted(ready(s))


def is_continuous(status: dict[str, Any]) -> bool:
    history = status["scalingHistory"]
    return all(before["desired"] == after["previous"] for before, after in itertools.pairwise(history))


async def test_a_service_over_three_types_follows_quota_prices_cordons_drains_and_a_dead_node(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=replica, cpu="4") as cluster:
        load = await begun(cluster, maxReplicas=12)
        b, c = await over_types(cluster, load)
        each, tenant = load.each, f"tenant-{cluster.namespace}"

        async def quota(**ceilings: int) -> None:
            rows = [{"accelerator": kind.replace("_", "-"), "ceiling": n} for kind, n in ceilings.items()]
            await cluster.client.patch(TENANTS, tenant, {"spec": {"quota": rows or None}})

        await quota(cpu=2)
        low, words = {"own": 2, "b": 4, "c": 4}, "held back by the tenant's quota of cpu"
        await load.until(11 * each, settled(lambda found: found == low))
        await load.until(11 * each, lambda s: words in s["slo"].get("message", ""))
        await quota()
        full = await load.until(11 * each, settled(lambda found: found == {"own": 4, "b": 4, "c": 4}))
        assert is_continuous(full)

        await quota(cpu_b=1)  # below what runs: nothing is taken away, and nothing is added there
        status = await load.until(2.2 * each, settled(lambda found: sum(found.values()) <= 4), seconds=5.0)
        assert ready(status).get("own", 0) == 0, "the dearest left first"
        await quota()
        await cluster.client.patch(ACCELERATOR_POOLS, b, {"spec": {"pricePerHour": 9.0}})
        status = await load.until(2.2 * each, settled(lambda found: found == {"c": 3}), seconds=5.0)
        assert "Switch" in [entry["cause"] for entry in status["scalingHistory"]]

        for i in range(2):  # what runs there stays, and what is added comes elsewhere
            await cluster.client.patch(NODES, f"{c}-{i}", {"spec": {"unschedulable": True}})
        there = ready(status)["c"]
        status = await load.until(7 * each, settled(lambda found: sum(found.values()) >= 7))
        assert ready(status)["c"] == there
        drained = [
            name for name, pod in (await cluster.pods()).items() if pod["spec"]["nodeName"].startswith(c)
        ]
        assert len(drained) == there
        for name in drained:
            await cluster.client.delete(PODS, name, cluster.namespace)
        status = await load.until(7 * each, settled(lambda found: found == {"own": 4, "b": 4}))
        shortage = [cond["status"] for cond in status["conditions"] if cond["type"] == "NodeShortage"]
        # A replica has waited for the cordoned nodes, or was asked for elsewhere at once.
        assert shortage in ([], ["False"])

        for i in range(2):
            await cluster.client.patch(NODES, f"{c}-{i}", {"spec": {"unschedulable": None}})
        long_ago = dict.fromkeys(("lastTransitionTime", "lastHeartbeatTime"), "2026-01-01T00:00:00Z")
        dead = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", **long_ago}]
        node = f"{cluster.namespace}-node-0"
        await cluster.client.patch(NODES, node, {"status": {"conditions": dead}}, subresource="status")
        status = await load.until(7 * each, settled(lambda found: found == {"b": 4, "c": 4}))
        assert is_continuous(status)


async def test_an_operator_that_dies_at_every_write_starts_no_replica_twice_and_forgets_no_change(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=replica, cpu="4") as cluster:
        load = await begun(cluster, maxReplicas=12)
        await over_types(cluster, load)
        cluster.proxy.kill_each("after")
        most = 0

        async def until(
            rate: float, wanted: Callable[[dict[str, Any]], bool], seconds: float
        ) -> dict[str, Any]:
            nonlocal most
            for _ in range(2000):
                if cluster.operator is not None and cluster.operator is not load.operator:
                    load.operator = cluster.operator
                    load.begin()
                load.tick(rate * load.each, seconds)
                most = max(most, len(await cluster.pods()))
                status = await cluster.status(MODEL_SERVICES, "web")
                if wanted(status):
                    return status
                await asyncio.sleep(0.02)
            raise AssertionError(status)

        async with reviving(cluster, **GATEWAY) as deaths:
            status = await until(7, settled(lambda found: sum(found.values()) >= 7), 1.0)
            assert set(ready(status)) >= {"b", "c"}
            status = await until(1.5, settled(lambda found: sum(found.values()) <= 3), 5.0)
            assert len(deaths) >= 10
        assert is_continuous(status)
        assert most <= max(entry["desired"] for entry in status["scalingHistory"])
