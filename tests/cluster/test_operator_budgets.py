"""A tenant's budget on the real API server: it holds what waits, says so, and lets it go when it is raised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import QUICK, Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes

from busbar.kube.resources import EVENTS, TENANTS, TRAINING_JOBS

SMALL_H = 0.0003
"""About a second of one accelerator."""


def budget(hours: float, enforcement: str = "StopAdmitting") -> dict[str, Any]:
    return {"spec": {"budgets": [{"period": "month", "acceleratorHours": hours, "enforcement": enforcement}]}}


async def test_a_spent_budget_holds_waiting_jobs_and_a_raised_one_lets_them_go(apiserver: ApiServer) -> None:
    settings = replace(QUICK, usage_period_s=1.0)
    async with Cluster(apiserver, settings=settings, script=lambda pod: Script(run_s=None)) as cluster:
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

        await cluster.client.patch(TENANTS, tenant, budget(1000))
        await cluster.until(TRAINING_JOBS, "second", lambda s: s.get("phase") == "Running")

        await cluster.client.patch(TENANTS, tenant, budget(SMALL_H, "Warn"))
        await cluster.create(gang_job("third", 1))
        await cluster.until(TRAINING_JOBS, "third", lambda s: s.get("phase") == "Running")

        async def reasons() -> set[str]:
            events, _ = await cluster.client.list(EVENTS)
            return {e["reason"] for e in events if e["involvedObject"]["name"] == tenant}

        await becomes(reasons, lambda found: {"BudgetSpent", "WithinBudget"} <= found)
