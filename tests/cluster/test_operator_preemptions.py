"""A feed whose floor is above its budget, with real agents and simulated boards: what is stopped, and when it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import gang_job
from tests.cluster.racks import is_running, racked
from tests.cluster.test_operator_budgets import reasons
from tests.cluster.test_operator_leases import Rack
from tests.cluster.test_operator_power import conditions

from busbar.kube.client import Object
from busbar.kube.resources import MODEL_SERVICES, POWER_DOMAINS, TRAINING_JOBS

HOME = "stop-home"
"""The platform's namespace here."""
FEED: Object = {
    "kind": "PowerDomain",
    "metadata": {"name": "red"},
    "spec": {
        "budgetWatts": 2500,
        "policy": "Static",
        "enforcement": "Preempt",
        "hostWatts": 100,
        "nodeSelector": {"rack": "red"},
    },
}
"""Two hosts of 100 W and four A100, each 63 W idle and 100 W at its lowest limit: 600 W with work on all, 452 W without."""


def one_board(name: str, **spec: Any) -> Object:
    return gang_job(
        name, 1, shape={"minPods": 1, "maxPods": 1, "acceleratorsPerPod": 1}, accelerators=["A100"], **spec
    )


def web() -> Object:
    spec = {
        "model": {"uri": "pvc://claim/model"},
        "shape": {"acceleratorsPerPod": 1},
        "accelerators": ["A100"],
        "replicas": 2,
        "minReplicas": 1,
    }
    return {"kind": "ModelService", "metadata": {"name": "web"}, "spec": spec}


def budget(watts: float) -> dict[str, Any]:
    return {"spec": {"budgetWatts": watts}}


def is_short(status: dict[str, Any]) -> bool:
    return (status.get("phase"), status.get("reason")) == ("Queued", "InsufficientPower")


async def test_work_is_stopped_where_limits_do_not_suffice_and_goes_on_with_a_larger_budget(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    rack = Rack(tmp_path)
    async with racked(apiserver, rack, HOME, FEED) as cluster:
        operator = await cluster.start(power_simulator_url=rack.url)
        await cluster.create(one_board("first", priority=1))
        await cluster.create(one_board("stays", preemptible=False))
        await cluster.create(web())
        for name in ("first", "stays"):
            await cluster.until(TRAINING_JOBS, name, is_running)
        await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("readyReplicas") == 2)
        status = await cluster.until(
            POWER_DOMAINS, "red", lambda s: conditions(s).get("WithinBudget") == ("True", "WithinBudget")
        )
        assert "shortWatts" not in status

        await cluster.client.patch(POWER_DOMAINS, "red", budget(576))  # one board too many
        lacking = await cluster.until(
            POWER_DOMAINS,
            "red",
            lambda s: (
                s.get("shortWatts") == 29.8
                and conditions(s).get("WithinBudget") == ("False", "FloorAboveBudget")
            ),
        )
        assert conditions(lacking)["Ready"] == ("False", "FloorAboveBudget")
        stopped = await cluster.until(TRAINING_JOBS, "first", is_short)
        assert "power domain red" in stopped["message"]
        assert stopped.get("preemptions", 0) == 0
        # What the boards draw is simulated, whatever runs, so that only the floor is looked at.
        await cluster.until(POWER_DOMAINS, "red", lambda s: conditions(s).get("Ready") == ("True", "Leasing"))
        assert (await cluster.status(MODEL_SERVICES, "web"))["readyReplicas"] == 2, "jobs go first"
        await cluster.create(one_board("late"))
        late = await cluster.until(TRAINING_JOBS, "late", is_short)
        assert "on the power domain red" in late["message"]
        await cluster.client.delete(TRAINING_JOBS, "late", cluster.namespace)
        assert "WorkStopped" in await reasons(cluster, "red")

        await cluster.client.patch(POWER_DOMAINS, "red", budget(300))  # not even the idle boards fit
        web_status = await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("readyReplicas") == 1)
        assert web_status["desiredReplicas"] == 2
        least = await cluster.until(POWER_DOMAINS, "red", lambda s: s.get("shortWatts") == 452 + 2 * 37 - 297)
        [says] = [c["message"] for c in least["conditions"] if c["type"] == "WithinBudget"]
        assert "229 W will still be lacking" in says
        assert (await cluster.status(TRAINING_JOBS, "stays"))["phase"] == "Running"
        assert (await cluster.status(MODEL_SERVICES, "web"))["readyReplicas"] == 1, (
            "the least number serves on"
        )
        counted = operator.metrics.registry.get_sample_value
        assert counted("busbar_power_preemptions_total", {"domain": "red"}) == 2

        await cluster.client.patch(POWER_DOMAINS, "red", budget(2500))
        again = await cluster.until(TRAINING_JOBS, "first", is_running)
        assert again["attempt"] == 2
        await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("readyReplicas") == 2)
        await cluster.until(POWER_DOMAINS, "red", lambda s: "shortWatts" not in s)
