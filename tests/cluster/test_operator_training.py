"""A TrainingJob from submission to its end, on the real API server."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, engine_job, gang_job, with_the_charts_rights
from tests.cluster.kubelet import Script, add_node, said
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.resources import ACCELERATOR_POOLS, NAMESPACES, PODS, TENANTS, TRAINING_JOBS
from busbar.operator.settings import Settings
from busbar.scheduler import Policy


def phase(name: str) -> Any:
    return lambda status: status.get("phase") == name


def training(seconds: float, step_s: float = 0.05) -> dict[str, Any]:
    step = int(seconds / step_s)
    return {
        "kind": "training",
        "phase": "Training",
        "step": step,
        "totalSteps": 1000,
        "loss": 2.0,
        "tokens": step * 10,
    }


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


async def test_a_job_is_admitted_runs_and_succeeds_with_its_last_numbers(apiserver: ApiServer) -> None:
    message = said(
        step=10, totalSteps=10, loss=1.5, tokens=1000,
        fingerprint={"losses": "a", "weights": "b"},
        evaluation={"bitsPerByte": 2.0, "heldOutBytes": 5},
    )  # fmt: skip
    async with Cluster(apiserver, script=lambda pod: Script(run_s=0.3, message=message)) as cluster:
        await cluster.start()
        await cluster.create(engine_job("one"))
        status = await cluster.until(TRAINING_JOBS, "one", phase("Succeeded"))
        assert status["progress"]["step"] == 10
        assert status["fingerprint"] == {"losses": "a", "weights": "b"}
        assert status["evaluation"]["bitsPerByte"] == 2.0
        assert status["outputUri"] == "pvc://claim/model"
        assert status["attempt"] == 1
        held = _moment(status["lastUsageTime"]) - _moment(status["admission"]["admittedAt"])
        assert status["usage"]["acceleratorSeconds"] == pytest.approx(held.total_seconds(), abs=0.002)
        assert held.total_seconds() > 0
        assert list(await cluster.pods()) == ["one-1-0"]
        ready = next(c for c in status["conditions"] if c["type"] == "Ready")
        assert ready["status"] == "True"
        tenant = f"tenant-{cluster.namespace}"
        await cluster.until(
            TENANTS, tenant,
            lambda s: s.get("usage", {}).get("acceleratorSeconds", 0) > 0 and s["held"] == 0,
        )  # fmt: skip


def writes(cluster: Cluster) -> list[tuple[str, str]]:
    """The operator's for jobs, in their order; what the tenant costs is not the job's."""
    kinds = ("/trainingjobs/", "/pods", "/services", "/secrets")
    made = [w for w in cluster.proxy.writes if any(kind in w.path for kind in kinds)]
    return [(w.method, w.path.split(f"/{cluster.namespace}/")[1]) for w in made]


async def test_a_one_pod_job_of_cores_costs_four_writes_and_their_events(apiserver: ApiServer) -> None:
    """Admitted, the pod, Running, Succeeded: no gate, no Service, and no Starting that does not last."""
    async with Cluster(apiserver, script=lambda pod: Script(run_s=0.3)) as cluster:
        await cluster.start(start_told_s=Settings().start_told_s, count_period_s=Settings().count_period_s)
        await cluster.create(gang_job("one", 1))
        await cluster.until(TRAINING_JOBS, "one", phase("Succeeded"))
        assert writes(cluster) == [
            ("PATCH", "trainingjobs/one/status"),
            ("POST", "pods"),
            ("PATCH", "trainingjobs/one/status"),
            ("PATCH", "trainingjobs/one/status"),
        ]
        env = {
            e["name"]: e.get("value")
            for e in (await cluster.pods())["one-1-0"]["spec"]["containers"][0]["env"]
        }
        assert (env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("1", "127.0.0.1")


TAINTED = [{"key": "busbar.dev/pool", "operator": "Exists", "effect": "NoSchedule"}]


@pytest.mark.parametrize(
    ("accelerator", "pool"),
    [
        ("H100", {"resourceName": "nvidia.com/gpu"}),
        ("cpu", {"resourceName": "cpu", "tolerations": TAINTED}),
    ],
    ids=["device", "tolerations"],
)
async def test_a_one_pod_job_on_a_guarded_pool_starts_under_the_charts_policies_for_four_writes(
    platform: ApiServer, accelerator: str, pool: dict[str, Any]
) -> None:
    """``busbar-queue`` takes the pod of a job without our gate from the operator."""
    async with with_the_charts_rights(platform, nodes=0, script=lambda pod: Script(run_s=0.3)) as cluster:
        name = f"guarded-{cluster.namespace}"
        await asyncio.to_thread(add_node, platform, name, labels={"guarded": name}, gpus=2)
        spec = {"accelerator": accelerator, "nodeSelector": {"guarded": name}, **pool}
        await cluster.create({"kind": "AcceleratorPool", "metadata": {"name": name}, "spec": spec})
        await cluster.start(start_told_s=Settings().start_told_s, count_period_s=Settings().count_period_s)
        await cluster.until(TENANTS, f"tenant-{cluster.namespace}", lambda s: bool(s.get("conditions")))
        await becomes(lambda: labels_of(cluster), lambda labels: "busbar.dev/tenant" in labels)
        shape = {"minPods": 1, "maxPods": 1, "acceleratorsPerPod": 1}
        await cluster.create(gang_job("one", 1, shape=shape, accelerators=[accelerator]))
        await cluster.until(TRAINING_JOBS, "one", phase("Succeeded"))
        assert writes(cluster) == [
            ("PATCH", "trainingjobs/one/status"),
            ("POST", "pods"),
            ("PATCH", "trainingjobs/one/status"),
            ("PATCH", "trainingjobs/one/status"),
        ]
        await cluster.client.delete(ACCELERATOR_POOLS, name)  # it would guard other tests' pods


async def labels_of(cluster: Cluster) -> dict[str, str]:
    """The labels of the tenant's namespace."""
    found = await cluster.client.get(NAMESPACES, cluster.namespace)
    return dict(found["metadata"].get("labels") or {})


async def test_a_gang_comes_up_together_and_finishes_together(apiserver: ApiServer) -> None:
    script = Script()
    async with Cluster(apiserver, nodes=2, cpu="2", script=lambda pod: script) as cluster:
        await cluster.start()
        await cluster.create(gang_job("gang", 3))
        status = await cluster.until(TRAINING_JOBS, "gang", phase("Running"))
        assert status["pods"] == {"ready": 3, "total": 3}
        pods = await cluster.pods()
        assert sorted(pods) == ["gang-1-0", "gang-1-1", "gang-1-2"]
        nodes = [pods[f"gang-1-{rank}"]["spec"]["nodeName"] for rank in range(3)]
        assert nodes == status["admission"]["nodes"]
        assert len(set(nodes)) == 2
        env = {e["name"]: e.get("value") for e in pods["gang-1-2"]["spec"]["containers"][0]["env"]}
        assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("2", "3", "gang-1-0.gang")
        assert await cluster.services() == ["gang"]
        script.run_s = 0.0  # seen running: now it may end
        await cluster.until(TRAINING_JOBS, "gang", phase("Succeeded"))


async def test_a_gang_costs_two_writes_a_pod_one_service_and_at_most_six_statuses(
    apiserver: ApiServer,
) -> None:
    """With binding and kubelet that is five a pod. The pods end one after another, in more than two seconds."""
    size, begun = 12, itertools.count()
    async with Cluster(
        apiserver, nodes=3, cpu="4", script=lambda pod: Script(run_s=0.5 + 0.2 * next(begun))
    ) as cluster:
        periods = ("start_told_s", "count_period_s", "progress_period_s")
        await cluster.start(**{name: getattr(Settings(), name) for name in periods})
        await cluster.create(gang_job("gang", size))
        await cluster.until(TRAINING_JOBS, "gang", phase("Succeeded"))
        made = Counter((method, path.split("/")[0]) for method, path in writes(cluster))
        statuses = made.pop(("PATCH", "trainingjobs"))
        assert made == {("POST", "pods"): size, ("PATCH", "pods"): size, ("POST", "services"): 1}
        assert statuses <= 6
        assert len(cluster.kubelet.created) == size


async def test_a_failed_attempt_is_tried_again_and_its_lost_work_is_counted(apiserver: ApiServer) -> None:
    def script(pod: Object) -> Script:
        if pod["metadata"]["labels"]["busbar.dev/attempt"] == "1":
            return Script(status=training)
        return Script(run_s=0.5, message=said(step=1000, totalSteps=1000, resumedFromStep=2), status=lambda s: {
            "kind": "training", "phase": "Training", "step": 3, "totalSteps": 1000, "resumedFromStep": 2,
        })  # fmt: skip

    async with Cluster(apiserver, script=script) as cluster:
        await cluster.start()
        await cluster.create(engine_job("again"))
        seen = await cluster.until(
            TRAINING_JOBS, "again", lambda s: s.get("progress", {}).get("step", 0) >= 5
        )
        await cluster.kubelet.end((await cluster.pods())["again-1-0"], 137)
        status = await cluster.until(TRAINING_JOBS, "again", phase("Succeeded"))
        assert status["attempt"] == 2
        assert status["restarts"] == 1
        assert status["lostWork"]["steps"] >= seen["progress"]["step"] - 2
        assert status["lostWork"]["attempt"] == 2
        assert status["progress"]["step"] == 1000


async def test_a_job_that_fails_too_often_is_failed_with_the_cause(apiserver: ApiServer) -> None:
    script = Script(run_s=0.0, exit_code=1, message="Traceback\nValueError: bad data\n")
    async with Cluster(apiserver, script=lambda pod: script) as cluster:
        await cluster.start()
        await cluster.create(engine_job("bad", retryLimit=1))
        status = await cluster.until(TRAINING_JOBS, "bad", phase("Failed"))
        assert status["reason"] == "RetryLimitReached"
        assert "ValueError: bad data" in status["message"]
        assert status["attempt"] == 2
        assert status["completionTime"]


async def test_suspending_saves_first_and_gives_everything_back(apiserver: ApiServer) -> None:
    script = Script(status=training)
    async with Cluster(apiserver, script=lambda pod: script) as cluster:
        await cluster.start()
        await cluster.create(engine_job("pause"))
        await cluster.until(TRAINING_JOBS, "pause", phase("Running"))
        await cluster.client.patch(TRAINING_JOBS, "pause", {"spec": {"suspend": True}}, cluster.namespace)
        status = await cluster.until(TRAINING_JOBS, "pause", phase("Suspended"))
        assert script.saved == ["pause-1-0"]
        assert "admission" not in status
        assert await cluster.pods() == {}
        await cluster.client.patch(TRAINING_JOBS, "pause", {"spec": {"suspend": False}}, cluster.namespace)
        again = await cluster.until(TRAINING_JOBS, "pause", phase("Running"))
        assert again["attempt"] == 2
        assert again.get("restarts", 0) == 0


async def test_a_waiting_job_says_why_and_starts_when_there_is_room(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, cpu="2", script=lambda pod: Script()) as cluster:
        await cluster.start()
        await cluster.create(gang_job("first", 2, preemptible=False))
        await cluster.until(TRAINING_JOBS, "first", phase("Running"))
        await cluster.create(gang_job("second", 1))
        status = await cluster.until(TRAINING_JOBS, "second", phase("Queued"))
        assert status["reason"] == status["waiting"]["code"]
        assert "CPU" in status["message"]
        assert status["preview"]["startsNow"] is False
        await cluster.client.delete(TRAINING_JOBS, "first", cluster.namespace)
        for name in ("first-1-0", "first-1-1"):  # there is no garbage collector here
            await cluster.client.delete(PODS, name, cluster.namespace)
        await cluster.until(TRAINING_JOBS, "second", phase("Running"))


async def test_a_finished_job_is_deleted_after_its_time(apiserver: ApiServer) -> None:
    async with Cluster(apiserver) as cluster:
        await cluster.start()
        await cluster.create(engine_job("brief", ttlSecondsAfterFinished=0))

        async def jobs() -> list[Object]:
            return (await cluster.client.list(TRAINING_JOBS, cluster.namespace))[0]

        await becomes(jobs, lambda items: items == [])
        assert list(cluster.kubelet.created.values()) == [f"{cluster.namespace}/brief-1-0"]


async def test_a_job_of_another_controller_is_left_alone(apiserver: ApiServer) -> None:
    async with Cluster(apiserver) as cluster:
        await cluster.start()
        await cluster.create(engine_job("theirs", managedBy="example.com/other"))
        await cluster.create(engine_job("ours"))
        await cluster.until(TRAINING_JOBS, "ours", phase("Succeeded"))
        assert await cluster.status(TRAINING_JOBS, "theirs") == {}


async def test_a_guarantee_takes_its_share_back_and_the_victim_saves_and_resumes(
    apiserver: ApiServer,
) -> None:
    other = "op-guaranteed"
    borrower, claimant = Script(status=training), Script()

    def script(pod: Object) -> Script:
        return borrower if pod["metadata"]["namespace"] != other else claimant

    async with Cluster(apiserver, cpu="1", script=script) as cluster:
        await asyncio.to_thread(apiserver.make_namespace, other)
        await asyncio.to_thread(apiserver.make_claim, other)
        quota = [{"accelerator": "cpu", "guaranteed": 1}]
        owner = {"metadata": {"name": "guaranteed"}, "spec": {"namespaces": [other], "quota": quota}}
        await cluster.create({"kind": "Tenant", **owner})
        await cluster.start(policy=Policy(min_run_s=0.0, guarantee_reclaim_s=0.0))
        await cluster.create(engine_job("borrows"))
        await cluster.until(TRAINING_JOBS, "borrows", phase("Running"))
        claim = {"apiVersion": TRAINING_JOBS.api_version, **engine_job("claims", preemptible=False)}
        await cluster.client.create(TRAINING_JOBS, claim, other)
        given_back = await cluster.until(TRAINING_JOBS, "borrows", phase("Queued"))
        assert given_back["preemptions"] == 1
        assert borrower.saved == ["borrows-1-0"]
        claimant.run_s = 0.0  # the other was seen waiting: now the claim may end

        async def claims() -> dict[str, Any]:
            return (await cluster.client.get(TRAINING_JOBS, "claims", other)).get("status") or {}

        await becomes(claims, phase("Succeeded"))
        resumed = await cluster.until(TRAINING_JOBS, "borrows", phase("Running"))
        assert (resumed["attempt"], resumed.get("restarts", 0)) == (2, 0)
