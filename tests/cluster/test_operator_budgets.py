"""A tenant's budget on the real API server: it holds or stops work, says so, and lets it go when it is raised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import QUICK, Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes, opted_in

from busbar.kube.client import Object
from busbar.kube.resources import EVENTS, MODEL_SERVICES, PODS, TENANTS, TRAINING_JOBS

SMALL_H = 0.0003
"""About a second of one accelerator."""


def budget(hours: float, enforcement: str = "StopAdmitting") -> dict[str, Any]:
    return {"spec": {"budgets": [{"period": "month", "acceleratorHours": hours, "enforcement": enforcement}]}}


def web(least: int) -> Object:
    """A service of two replicas."""
    spec = {"model": {"uri": "pvc://claim/model"}, "replicas": 2, "minReplicas": least}
    return {"kind": "ModelService", "metadata": {"name": "web"}, "spec": spec}


def script(pod: Object) -> Script:
    if pod["metadata"]["labels"].get("busbar.dev/kind") == "modelservice":
        return Script(status=lambda s: {"kind": "serving", "ready": True})
    return Script(run_s=None)


async def reasons(cluster: Cluster, name: str) -> set[str]:
    """Of the events about an object."""
    events, _ = await cluster.client.list(EVENTS)
    return {e["reason"] for e in events if e["involvedObject"]["name"] == name}


async def test_a_spent_budget_holds_waiting_jobs_and_a_raised_one_lets_them_go(apiserver: ApiServer) -> None:
    settings = replace(QUICK, usage_period_s=1.0)
    async with Cluster(apiserver, settings=settings, script=script) as cluster:
        tenant = f"tenant-{cluster.namespace}"
        await cluster.client.patch(TENANTS, tenant, budget(SMALL_H))
        await cluster.start()
        await cluster.create(gang_job("first", 1))
        spent = await cluster.until(
            TENANTS, tenant, lambda s: [u.get("state") for u in s.get("budgets", ())] == ["Spent"]
        )
        [use] = spent["budgets"]
        assert use["acceleratorHours"] >= SMALL_H
        assert use["acceleratorHoursLeft"] == 0
        told = {c["type"]: (c["status"], c["reason"]) for c in spent["conditions"]}
        assert told["WithinBudget"] == ("False", "BudgetSpent")

        await cluster.create(gang_job("second", 1))
        held = await cluster.until(TRAINING_JOBS, "second", lambda s: s.get("reason") == "BudgetSpent")
        assert held["phase"] == "Queued"
        assert f"budget of {SMALL_H:g} accelerator-hours a month" in held["message"]
        assert (await cluster.status(TRAINING_JOBS, "first"))["phase"] == "Running"
        await cluster.create(web(1))
        served = await cluster.until(
            MODEL_SERVICES, "web", lambda s: (s.get("readyReplicas") or 0) == 1 and "budget" in s["message"]
        )
        assert served["message"].startswith(
            "1 of 2 replicas take requests. Nothing is left of the tenant's budget"
        )
        await cluster.client.create(PODS, opted_in("own", "500m"), cluster.namespace)
        await becomes(lambda: reasons(cluster, "own"), lambda found: "BudgetSpent" in found)

        await cluster.client.patch(TENANTS, tenant, budget(1000))
        await cluster.until(TRAINING_JOBS, "second", lambda s: s.get("phase") == "Running")
        await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("readyReplicas") == 2)
        await becomes(cluster.pods, lambda pods: bool(pods["own"]["spec"].get("nodeName")))

        await cluster.client.patch(TENANTS, tenant, budget(SMALL_H, "Warn"))
        await cluster.create(gang_job("third", 1))
        await cluster.until(TRAINING_JOBS, "third", lambda s: s.get("phase") == "Running")
        await becomes(
            lambda: reasons(cluster, tenant), lambda found: {"BudgetSpent", "WithinBudget"} <= found
        )


async def test_a_spent_budget_that_preempts_stops_what_runs_until_it_is_raised(apiserver: ApiServer) -> None:
    settings = replace(QUICK, usage_period_s=1.0)
    async with Cluster(apiserver, settings=settings, script=script) as cluster:
        tenant = f"tenant-{cluster.namespace}"
        await cluster.start()
        await cluster.create(gang_job("goes", 2))
        kept = gang_job("stays", 1)
        kept["spec"]["preemptible"] = False
        await cluster.create(kept)
        await cluster.create(web(1))
        for name in ("goes", "stays"):
            await cluster.until(TRAINING_JOBS, name, lambda s: s.get("phase") == "Running")
        await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("readyReplicas") == 2)

        await cluster.client.patch(TENANTS, tenant, budget(SMALL_H, "Preempt"))
        stopped = await cluster.until(
            TRAINING_JOBS, "goes", lambda s: (s["phase"], s.get("reason")) == ("Queued", "BudgetSpent")
        )
        assert "what ran is stopped" in stopped["message"]
        assert stopped.get("preemptions", 0) == 0
        off = await cluster.until(MODEL_SERVICES, "web", lambda s: s["phase"] == "Suspended")
        assert off["reason"] == "BudgetSpent"
        await becomes(cluster.pods, lambda pods: list(pods) == ["stays-1-0"])
        assert (await cluster.status(TRAINING_JOBS, "stays"))["phase"] == "Running"

        await cluster.client.patch(TENANTS, tenant, budget(1000, "Preempt"))
        again = await cluster.until(TRAINING_JOBS, "goes", lambda s: s["phase"] == "Running")
        assert again["attempt"] == 2
        await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("readyReplicas") == 2)
