"""A ModelService: replicas up, scaled, drained, woken, on the real API server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.contracts.demand import Demand, ServiceDemand
from busbar.kube.errors import Conflict
from busbar.kube.resources import MODEL_SERVICES


def service(name: str, **spec: Any) -> Object:
    return {
        "kind": "ModelService",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "pvc://claim/model"}, **spec},
    }


SERVING = {"kind": "serving", "ready": True, "running": 0, "waiting": 0}


def replica(pod: Object) -> Script:
    return Script(status=lambda s: SERVING)


def ready(count: int) -> Callable[[dict[str, Any]], bool]:
    return lambda s: s.get("readyReplicas") == count and s.get("replicas") == count


def demand(cluster: Cluster, name: str, **fields: Any) -> None:
    """The demand that the gateway would report."""
    assert cluster.operator is not None
    said = ServiceDemand(namespace=cluster.namespace, name=name, **fields)
    cluster.operator.demand.take(Demand(services=[said], as_of=datetime.now(UTC)))


async def scale(cluster: Cluster, name: str, replicas: int) -> None:
    patch = {"spec": {"replicas": replicas}}
    await cluster.client.patch(MODEL_SERVICES, name, patch, cluster.namespace, subresource="scale")


async def test_a_service_follows_the_scale_subresource_and_drains_before_it_deletes(
    apiserver: ApiServer,
) -> None:
    scripts: dict[str, Script] = {}

    def script(pod: Object) -> Script:
        name = pod["metadata"]["name"]
        made = scripts.setdefault(name, replica(pod))
        crash = {"count": 1, "cause": "the server was killed by SIGSEGV", "at": "2026-01-01T12:00:00Z"}
        made.status = lambda s: {
            **SERVING,
            "drain": {"requests": 3, "copied": 2} if made.drained else None,
            "restarted": crash if name == "web-1" else None,
        }
        return made

    async with Cluster(apiserver, script=script) as cluster:
        operator = await cluster.start()
        await cluster.create(service("web", drainSeconds=60))
        status = await cluster.until(MODEL_SERVICES, "web", ready(1))
        assert status["phase"] == "Ready"
        assert status["selector"] == "busbar.dev/kind=modelservice,busbar.dev/job=web"
        await scale(cluster, "web", 2)
        await cluster.until(MODEL_SERVICES, "web", ready(2))
        assert sorted(await cluster.pods()) == ["web-0", "web-1"]
        assert operator.feed.current is not None
        endpoints = operator.feed.current.services[0].endpoints
        assert [(e.pod, e.ready) for e in endpoints] == [("web-0", True), ("web-1", True)]
        await scale(cluster, "web", 0)
        status = await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("phase") == "Idle")
        assert status["desiredReplicas"] == 0
        assert [s.drained for s in scripts.values()] == [["web-0"], ["web-1"]]
        assert await cluster.pods() == {}
        spec = (await cluster.get(MODEL_SERVICES, "web"))["spec"]
        assert spec["replicas"] == 0
        assert [h["desired"] for h in status["scalingHistory"]] == [2, 0]
        external = {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}["ExternallyScaled"]
        assert external == ("True", "ExternalTarget")
        assert sorted((d["replica"], d["copied"]) for d in status["departures"]) == [
            ("web-0", 2),
            ("web-1", 2),
        ]
        moved = [e["message"] for e in await cluster.events() if e["reason"] == "StreamsMoved"]
        assert all("leaves: 2 of 3 requests went on" in message for message in moved)
        assert len(moved) == 2
        assert [(c["time"], c["replica"], c["restarts"]) for c in status["crashes"]] == [
            ("2026-01-01T12:00:00Z", "web-1", 1)
        ]
        crashed = [
            (e["type"], e["message"]) for e in await cluster.events() if e["reason"] == "ReplicaCrashed"
        ]
        assert crashed == [
            ("Warning", "Replica web-1 crashed, and serves again: the server was killed by SIGSEGV.")
        ]


async def test_of_three_writers_at_once_none_takes_away_what_another_asked_for(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=replica) as cluster:
        await cluster.start()
        await cluster.create(service("web", replicas=2, drainSeconds=1))
        await cluster.until(MODEL_SERVICES, "web", ready(2))

        async def all_write() -> None:
            words = ("-n", cluster.namespace, "scale", "modelservice/web", "--replicas=4")
            assert (await asyncio.to_thread(cluster.server.kubectl, *words)).returncode == 0
            await has_seen(cluster, "web")
            await as_hpa(cluster, "web", 2)
            await has_seen(cluster, "web")
            await scale(cluster, "web", 3)  # KEDA patches it
            await has_seen(cluster, "web")

        for _ in range(2):
            await all_write()
        before = await cluster.until(MODEL_SERVICES, "web", ready(4))
        pods = await uids(cluster)
        for _ in range(2):
            await all_write()
        status = await cluster.status(MODEL_SERVICES, "web")
        assert await uids(cluster) == pods
        assert [(e["previous"], e["desired"]) for e in status["scalingHistory"]] == [
            (2, 4), (4, 2), (2, 3), (3, 4),
        ]  # fmt: skip
        assert status["scalingHistory"] == before["scalingHistory"]
        [external] = [c for c in status["conditions"] if c["type"] == "ExternallyScaled"]
        assert (external["status"], external["reason"]) == ("True", "ExternalTargetAlternates")
        assert (await cluster.get(MODEL_SERVICES, "web"))["spec"]["replicas"] == 3


async def uids(cluster: Cluster) -> set[str]:
    return {pod["metadata"]["uid"] for pod in (await cluster.pods()).values()}


async def has_seen(cluster: Cluster, name: str) -> None:
    """The operator has looked at the newest spec."""
    generation = (await cluster.get(MODEL_SERVICES, name))["metadata"]["generation"]
    await cluster.until(MODEL_SERVICES, name, lambda s: s.get("observedGeneration") == generation)


async def as_hpa(cluster: Cluster, name: str, replicas: int) -> None:
    """As its controller does: the whole Scale that it read, with its version; again where somebody was faster."""
    path = f"/apis/busbar.dev/v1alpha1/namespaces/{cluster.namespace}/modelservices/{name}/scale"

    async def written() -> bool:
        read = await cluster.client.call("GET", path)
        with contextlib.suppress(Conflict):
            await cluster.client.call("PUT", path, body={**read, "spec": {"replicas": replicas}})
            return True
        return False

    await becomes(written, bool)


async def test_a_held_request_wakes_a_service_at_zero_and_idleness_sends_it_back(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=replica) as cluster:
        await cluster.start(gateway_url="http://127.0.0.1:1")
        await cluster.create(
            service("nap", minReplicas=0, replicas=0, scaling={"idleSeconds": 1}, drainSeconds=0)
        )
        await cluster.until(MODEL_SERVICES, "nap", lambda s: s.get("phase") == "Idle")
        demand(cluster, "nap", waiting=1, last_request_age_seconds=0.0)
        status = await cluster.until(MODEL_SERVICES, "nap", ready(1))
        assert status["desiredReplicas"] == 1
        assert (await cluster.get(MODEL_SERVICES, "nap"))["spec"]["replicas"] == 0

        async def without_requests() -> dict[str, Any]:
            demand(cluster, "nap", last_request_age_seconds=30.0)
            return await cluster.status(MODEL_SERVICES, "nap")

        idle = await becomes(without_requests, lambda s: s.get("phase") == "Idle")
        assert idle["desiredReplicas"] == 0


async def test_a_service_waits_for_the_job_whose_output_it_serves(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=replica) as cluster:
        await cluster.start()
        await cluster.create(service("later", model={"trainingJob": "missing"}))
        status = await cluster.until(MODEL_SERVICES, "later", lambda s: s.get("phase") == "Pending")
        assert status["reason"] == "ModelNotReady"
        assert "missing" in status["message"]
        assert await cluster.pods() == {}


async def test_a_suspended_service_has_no_pods(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=replica) as cluster:
        await cluster.start()
        await cluster.create(service("off", replicas=1, drainSeconds=0))
        await cluster.until(MODEL_SERVICES, "off", ready(1))
        await cluster.client.patch(MODEL_SERVICES, "off", {"spec": {"suspend": True}}, cluster.namespace)
        await cluster.until(MODEL_SERVICES, "off", lambda s: s.get("phase") == "Suspended")
        assert await cluster.pods() == {}


async def test_a_replica_that_vanishes_is_replaced(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=replica) as cluster:
        await cluster.start()
        await cluster.create(service("keep", replicas=1))
        await cluster.until(MODEL_SERVICES, "keep", ready(1))
        pod = (await cluster.pods())["keep-0"]
        await cluster.kubelet.end(pod, 1)
        gone = pod["metadata"]["uid"]
        await becomes(
            cluster.pods, lambda pods: [p["metadata"]["uid"] == gone for p in pods.values()] == [False]
        )
        await cluster.until(MODEL_SERVICES, "keep", ready(1))


async def test_a_replica_that_somebody_else_drained_is_replaced(apiserver: ApiServer) -> None:
    def script(pod: Object) -> Script:
        drained = pod["metadata"]["name"] == "keep-0"
        return Script(status=lambda s: {"kind": "serving", "ready": not drained, "draining": drained})

    async with Cluster(apiserver, script=script) as cluster:
        await cluster.start()
        await cluster.create(service("keep", replicas=1, drainSeconds=60))
        await becomes(cluster.pods, lambda pods: list(pods) == ["keep-1"])
        await cluster.until(MODEL_SERVICES, "keep", ready(1))
        await becomes(cluster.events, lambda found: "ReplicaReplaced" in {e["reason"] for e in found})
