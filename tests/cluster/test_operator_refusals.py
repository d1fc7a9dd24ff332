"""Pods that the API server refuses (a quota, a policy, a webhook), and the status of the jobs that need them."""

from __future__ import annotations

import asyncio

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, engine_job
from tests.cluster.kubelet import Script, said

from busbar.kube.client import Object
from busbar.kube.resources import MODEL_SERVICES, PODS, TRAINING_JOBS


def script(pod: Object) -> Script:
    if pod["metadata"]["labels"]["busbar.dev/kind"] == "trainingjob":
        return Script(run_s=0.05, message=said(step=10, totalSteps=10))
    return Script(status=lambda s: {"kind": "serving", "ready": True})


async def test_a_job_says_why_its_pods_are_refused_gives_its_place_back_and_ends_when_they_are_taken(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=script) as cluster:
        cluster.proxy.answer(lambda m, p: m == "POST" and p.endswith("/pods"), 403, "Forbidden", times=10_000)
        await cluster.start(unschedulable_s=0.5)
        await cluster.create(engine_job("job"))
        told = await cluster.until(TRAINING_JOBS, "job", lambda s: s.get("reason") == "PodsRefused")
        assert "cannot be made" in told["message"]
        await cluster.until(TRAINING_JOBS, "job", lambda s: s.get("admission") is None)
        cluster.proxy.forgive()  # both were seen
        done = await cluster.until(TRAINING_JOBS, "job", lambda s: s.get("phase") == "Succeeded")
        assert done["attempt"] > 1
        assert done.get("restarts", 0) == 0


async def test_what_lacks_a_claim_holds_nothing_and_starts_when_the_claim_is_there(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=script) as cluster:
        await cluster.start()
        await cluster.create(engine_job("job", output={"uri": "pvc://later/model"}))
        service = {"model": {"uri": "pvc://later/model"}, "replicas": 1}
        await cluster.create({"kind": "ModelService", "metadata": {"name": "web"}, "spec": service})
        for kind, name in ((TRAINING_JOBS, "job"), (MODEL_SERVICES, "web")):
            told = await cluster.until(kind, name, lambda s: s.get("reason") == "ClaimMissing")
            assert "PersistentVolumeClaim later does not exist" in told["message"]
            assert told.get("admission") is None
        await cluster.create(engine_job("beside"))
        await cluster.until(TRAINING_JOBS, "beside", lambda s: s.get("phase") == "Succeeded")
        assert {name for name in await cluster.pods() if not name.startswith("beside")} == set()
        await asyncio.to_thread(apiserver.make_claim, cluster.namespace, "later")
        done = await cluster.until(TRAINING_JOBS, "job", lambda s: s.get("phase") == "Succeeded")
        assert done["attempt"] == 1
        await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("phase") == "Ready")


async def test_a_service_says_why_its_replica_is_refused_and_serves_when_it_is_taken(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=script) as cluster:
        cluster.proxy.answer(lambda m, p: m == "POST" and p.endswith("/pods"), 403, "Forbidden", times=10_000)
        await cluster.start()
        await cluster.create(
            {
                "kind": "ModelService",
                "metadata": {"name": "web"},
                "spec": {"model": {"uri": "pvc://claim/model"}, "replicas": 1},
            }
        )
        told = await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("reason") == "PodsRefused")
        assert told["phase"] == "Queued"
        cluster.proxy.forgive()
        await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("phase") == "Ready")


async def test_a_service_whose_replicas_name_is_taken_names_the_pod_and_serves_when_it_is_gone(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=script) as cluster:
        await cluster.client.create(
            PODS,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "web-0"},
                # The gate keeps the simulated kubelet away from it.
                "spec": {
                    "containers": [{"name": "c", "image": "i"}],
                    "schedulingGates": [{"name": "example.com/never"}],
                },
            },
            cluster.namespace,
        )
        await cluster.start()
        await cluster.create(
            {
                "kind": "ModelService",
                "metadata": {"name": "web"},
                "spec": {"model": {"uri": "pvc://claim/model"}, "replicas": 1},
            }
        )
        told = await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("reason") == "PodsRefused")
        assert "pod web-0 exists already and belongs to nobody" in told["message"]
        await cluster.client.delete(PODS, "web-0", cluster.namespace, grace_s=0)
        await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("phase") == "Ready")
