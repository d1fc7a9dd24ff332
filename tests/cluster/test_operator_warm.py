"""Replicas that sleep instead of leaving (`scaling.warm`), on the real API server, with engines that follow a script."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_kill import SIDES, Side, reviving
from tests.cluster.test_operator_serving import demand, scale, service

from busbar.kube.client import Object
from busbar.kube.resources import MODEL_SERVICES, TRAINING_JOBS


class Engines:
    """One script for each pod, by name: how many requests run there, and what it was asked."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.made: dict[str, Script] = {}

    def __call__(self, pod: Object) -> Script:
        name = pod["metadata"]["name"]

        def status(seconds: float) -> dict[str, Any]:
            return {"kind": "serving", "ready": True, "running": self.running.get(name, 0), "waiting": 0}

        return self.made.setdefault(name, Script(status=status if name.startswith("nap") else None))


def nap(**spec: Any) -> Object:
    scaling = {"idleSeconds": 1, "warm": {"replicas": 1}}
    return service("nap", **{"minReplicas": 0, "maxReplicas": 2, "scaling": scaling, **spec})


def sleeping(ready: int, asleep: int) -> Any:
    return lambda s: (s.get("readyReplicas") or 0, s.get("sleepingReplicas") or 0) == (ready, asleep)


def open_endpoints(cluster: Cluster) -> list[str]:
    """The replicas to which the gateway may send requests."""
    assert cluster.operator is not None
    assert cluster.operator.feed.current is not None
    [route] = cluster.operator.feed.current.services
    return [e.pod for e in route.endpoints if e.ready and not e.draining]


async def reasons(cluster: Cluster) -> set[str]:
    return {event["reason"] for event in await cluster.events()}


async def test_a_surplus_replica_sleeps_is_not_routed_to_and_wakes_before_another_starts(
    apiserver: ApiServer,
) -> None:
    engines = Engines()
    engines.running["nap-0"] = 2  # so that nap-1, with fewer, is the one that may go
    async with Cluster(apiserver, script=engines) as cluster:
        await cluster.start()
        await cluster.create(nap(replicas=2))
        await cluster.until(MODEL_SERVICES, "nap", sleeping(2, 0))
        engines.running["nap-1"] = 1
        await scale(cluster, "nap", 1)
        await becomes(cluster.pods, lambda pods: "Settling" in str(pods["nap-1"]["metadata"]["annotations"]))
        # the stream that runs there goes on, and no other comes once the operator has seen its own write
        await becomes(_endpoints(cluster), lambda found: found == ["nap-0"])
        assert engines.made["nap-1"].slept == []
        engines.running["nap-1"] = 0
        status = await cluster.until(MODEL_SERVICES, "nap", sleeping(1, 1))
        assert (engines.made["nap-1"].slept, engines.made["nap-1"].drained) == (["nap-1"], [])
        [row] = status["pools"]
        assert (row["replicas"], row["ready"], row["sleeping"]) == (2, 1, 1)
        assert open_endpoints(cluster) == ["nap-0"]
        before = (await cluster.pods())["nap-1"]["metadata"]["uid"]
        await scale(cluster, "nap", 2)
        status = await cluster.until(MODEL_SERVICES, "nap", sleeping(2, 0))
        assert (await cluster.pods())["nap-1"]["metadata"]["uid"] == before
        assert engines.made["nap-1"].woken == ["nap-1"]
        assert status["scalingHistory"][-1]["reason"].endswith("Sleeping replicas that wake: 1.")
        await becomes(lambda: reasons(cluster), lambda found: {"ReplicaAsleep", "ReplicaWoken"} <= found)


async def test_the_first_request_from_zero_wakes_also_under_another_operator(apiserver: ApiServer) -> None:
    engines = Engines()
    async with Cluster(apiserver, script=engines) as cluster:
        await cluster.start(gateway_url="http://127.0.0.1:1")
        await cluster.create(nap(replicas=0))
        demand(cluster, "nap", waiting=1, last_request_age_seconds=0.0)
        await cluster.until(MODEL_SERVICES, "nap", sleeping(1, 0))

        async def without_requests() -> dict[str, Any]:
            demand(cluster, "nap", last_request_age_seconds=30.0)
            return await cluster.status(MODEL_SERVICES, "nap")

        idle = await becomes(without_requests, lambda s: s.get("phase") == "Idle" and sleeping(0, 1)(s))
        assert idle["message"] == "No replica takes requests; a request wakes one of 1 that sleep."
        assert open_endpoints(cluster) == []
        await cluster.stop()
        await cluster.start(gateway_url="http://127.0.0.1:1")
        demand(cluster, "nap", waiting=1, last_request_age_seconds=0.0)
        await cluster.until(MODEL_SERVICES, "nap", sleeping(1, 0))
        assert engines.made["nap-0"].woken == ["nap-0"]
        assert len([key for key in cluster.kubelet.created.values() if "/nap-" in key]) == 1


async def test_a_waiting_job_takes_the_place_of_a_sleeping_replica_at_once(apiserver: ApiServer) -> None:
    engines = Engines()
    async with Cluster(apiserver, script=engines, cpu="4") as cluster:
        await cluster.start()
        two = {"acceleratorsPerPod": 2}
        await cluster.create(nap(replicas=1, shape=two))
        await cluster.until(MODEL_SERVICES, "nap", sleeping(1, 0))
        await scale(cluster, "nap", 0)
        await cluster.until(MODEL_SERVICES, "nap", sleeping(0, 1))
        await cluster.create(gang_job("small", 1, shape={**two, "minPods": 1, "maxPods": 1}))
        await cluster.until(TRAINING_JOBS, "small", lambda s: s.get("phase") == "Running")
        assert "nap-0" in await cluster.pods(), "there was room beside it"
        await cluster.create(gang_job("large", 1, shape={**two, "minPods": 1, "maxPods": 1}, priority=1))
        await cluster.until(TRAINING_JOBS, "large", lambda s: s.get("phase") == "Running")
        assert "nap-0" not in await cluster.pods()
        status = await cluster.until(MODEL_SERVICES, "nap", sleeping(0, 0))
        assert (status["phase"], status["desiredReplicas"]) == ("Idle", 0)


async def test_a_replica_that_does_not_wake_is_replaced_by_one_that_starts(apiserver: ApiServer) -> None:
    engines = Engines()
    async with Cluster(apiserver, script=engines) as cluster:
        await cluster.start(sleep_limit_s=2.0)
        await cluster.create(nap(replicas=1))
        await cluster.until(MODEL_SERVICES, "nap", sleeping(1, 0))
        await scale(cluster, "nap", 0)
        await cluster.until(MODEL_SERVICES, "nap", sleeping(0, 1))
        first = (await cluster.pods())["nap-0"]["metadata"]["uid"]
        engines.made["nap-0"].wakes = False
        await scale(cluster, "nap", 1)
        await becomes(
            cluster.pods,
            lambda pods: bool(pods) and first not in [p["metadata"]["uid"] for p in pods.values()],
        )
        await cluster.until(MODEL_SERVICES, "nap", sleeping(1, 0))
        await becomes(lambda: reasons(cluster), lambda found: "WakeFailed" in found)


async def test_a_replica_whose_container_restarts_asleep_leaves_and_the_next_one_starts(
    apiserver: ApiServer,
) -> None:
    engines = Engines()
    async with Cluster(apiserver, script=engines) as cluster:
        await cluster.start()
        await cluster.create(nap(replicas=1, drainSeconds=0))
        await cluster.until(MODEL_SERVICES, "nap", sleeping(1, 0))
        await scale(cluster, "nap", 0)
        await cluster.until(MODEL_SERVICES, "nap", sleeping(0, 1))
        await cluster.kubelet.restart((await cluster.pods())["nap-0"])
        await becomes(cluster.pods, lambda pods: pods == {})
        assert engines.made["nap-0"].slept == ["nap-0"]
        await scale(cluster, "nap", 1)
        await cluster.until(MODEL_SERVICES, "nap", sleeping(1, 0))


@pytest.mark.parametrize("side", SIDES)
async def test_replicas_sleep_and_wake_though_the_operator_dies_at_every_write(
    apiserver: ApiServer, side: Side
) -> None:
    engines = Engines()
    async with Cluster(apiserver, script=engines) as cluster:
        cluster.proxy.kill_each(side)
        async with reviving(cluster):
            await cluster.start()
            await cluster.create(nap(replicas=2, scaling={"warm": {"replicas": 2}}))
            await cluster.until(MODEL_SERVICES, "nap", sleeping(2, 0))
            for replicas in (0, 2, 1):
                await scale(cluster, "nap", replicas)
                await cluster.until(MODEL_SERVICES, "nap", sleeping(replicas, 2 - replicas))
        status = await cluster.status(MODEL_SERVICES, "nap")
        assert [(h["previous"], h["desired"]) for h in status["scalingHistory"]] == [(2, 0), (0, 2), (2, 1)]
        made = sorted(name.partition("/")[2] for name in cluster.kubelet.created.values())
        assert made == sorted(await cluster.pods()) == ["nap-0", "nap-1"]
        assert all(script.woken and not script.drained for script in engines.made.values())
        assert cluster.proxy.died_at >= 15


@pytest.mark.parametrize("change", [{"suspend": True}, {"scaling": {"warm": None}}], ids=["off", "no warm"])
async def test_sleeping_replicas_leave_once_they_may_not_sleep(
    apiserver: ApiServer, change: dict[str, Any]
) -> None:
    engines = Engines()
    async with Cluster(apiserver, script=engines) as cluster:
        await cluster.start()
        await cluster.create(nap(replicas=1))
        await cluster.until(MODEL_SERVICES, "nap", sleeping(1, 0))
        await scale(cluster, "nap", 0)
        await cluster.until(MODEL_SERVICES, "nap", sleeping(0, 1))
        await cluster.client.patch(MODEL_SERVICES, "nap", {"spec": change}, cluster.namespace)
        await becomes(cluster.pods, lambda pods: pods == {})
        assert engines.made["nap-0"].drained == []


async def test_a_loaded_replica_serves_again_without_a_command(apiserver: ApiServer) -> None:
    engines = Engines()
    async with Cluster(apiserver, script=engines) as cluster:
        await cluster.start()
        await cluster.create(nap(replicas=1, scaling={"warm": {"replicas": 1, "level": "loaded"}}))
        await cluster.until(MODEL_SERVICES, "nap", sleeping(1, 0))
        await scale(cluster, "nap", 0)
        await cluster.until(MODEL_SERVICES, "nap", sleeping(0, 1))
        assert open_endpoints(cluster) == []
        await scale(cluster, "nap", 1)
        await cluster.until(MODEL_SERVICES, "nap", sleeping(1, 0))
        await becomes(_endpoints(cluster), lambda found: found == ["nap-0"])
        assert (engines.made["nap-0"].slept, engines.made["nap-0"].woken) == ([], [])


def _endpoints(cluster: Cluster) -> Any:
    async def read() -> list[str]:
        return open_endpoints(cluster)

    return read
