"""A job that lacks watts starts with its boards limited, and is lifted while it runs: real operator, agent and guard."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import engine_job
from tests.cluster.racks import is_running, racked
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_leases import NAMES, Rack

from busbar.kube.client import Object
from busbar.kube.resources import PERFORMANCE_PROFILES, POWER_DOMAINS, TRAINING_JOBS

HOME = "caps-home"
"""The platform's namespace here."""
BUDGET_W = 1450.0
FEED: Object = {
    "kind": "PowerDomain",
    "metadata": {"name": "red"},
    "spec": {"budgetWatts": BUDGET_W, "policy": "Lease", "hostWatts": 100, "nodeSelector": {"rack": "red"}},
}
"""Two hosts of 100 W and four A100: 452 W while they idle, 674 W more with a job on two of them, and 274 W more with one
whose boards are limited to 200 W; 1,400 W of the 1,435 W that are left after the margin. With one host they are 1,300 W."""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
}


def llm(name: str) -> Object:
    job = engine_job(
        name,
        shape={"minPods": 2, "maxPods": 2},
        accelerators=["A100"],
    )
    job["spec"]["engine"] |= {"model": {"config": CONFIG}, "mode": "resident", "steps": 1_000_000}
    return job


CELLS = [
    {
        "accelerator": "A100",
        "accelerators": 2,
        "powerCapPercent": percent,
        "tokensPerSecond": speed,
        "watts": watts,
    }
    for percent, speed, watts in ((100, 1000, 400), (50, 800, 200))
]


@pytest.mark.parametrize(("nodes", "own"), [(2, (0, 1)), (1, (2, 3))], ids=["its own node", "a shared node"])
async def test_a_job_starts_capped_and_its_boards_are_held_until_it_is_lifted(
    apiserver: ApiServer, tmp_path: Path, nodes: int, own: tuple[int, int]
) -> None:
    """Of four boards; `own`: those of the second job on its node."""
    rack = Rack(tmp_path, NAMES[:nodes], boards=4 // nodes)
    async with racked(apiserver, rack, f"{HOME}-{nodes}", FEED) as cluster, rack.watched():
        await cluster.start(power_simulator_url=rack.url)
        await cluster.until(POWER_DOMAINS, "red", lambda s: s.get("boardsLimited") is True)
        await rack.has(lambda watts: watts <= BUDGET_W)
        rack.most_w = BUDGET_W

        await cluster.create(llm("first"))
        first = await cluster.until(TRAINING_JOBS, "first", is_running)
        assert "powerCapPercent" not in first["admission"]

        async def discovered() -> list[str]:
            """The operator makes one for each class that runs; a second one of the class would not count."""
            profiles, _ = await cluster.client.list(PERFORMANCE_PROFILES)
            of = first["workloadClass"]
            return [p["metadata"]["name"] for p in profiles if p["spec"]["workloadClass"] == of]

        [name] = await becomes(discovered, lambda found: found != [])
        await cluster.client.patch(PERFORMANCE_PROFILES, name, {"spec": {"cells": CELLS}})

        await cluster.create(llm("second"))
        second = await cluster.until(TRAINING_JOBS, "second", is_running)
        capped = second["admission"]
        assert (capped["powerCapPercent"], capped["powerCapWatts"]) == (50, 200)
        assert "limited to 50%" in capped["reason"]
        [node] = {*capped["nodes"]}
        boards = [f"SIMULATED-{node}-{i}" for i in own]
        others = {f"SIMULATED-{node}-{i}" for i in range(rack.boards)}.difference(boards)

        async def limits() -> list[float]:
            return [rack.limits.get(uuid, 400.0) for uuid in boards]

        async def of_others() -> list[float]:
            return [rack.limits.get(uuid, 400.0) for uuid in others]

        await becomes(limits, lambda found: max(found) <= 200.0)
        await becomes(of_others, lambda found: all(watts > 300.0 for watts in found))
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert max(await limits()) <= 200.0

        await cluster.client.delete(TRAINING_JOBS, "first", cluster.namespace)
        lifted = await cluster.until(
            TRAINING_JOBS, "second", lambda s: "powerCapPercent" not in s["admission"]
        )
        assert (lifted["admission"]["id"], lifted["attempt"]) == (capped["id"], second["attempt"])
        assert is_running(lifted)
        await becomes(limits, lambda found: min(found) > 200.0)
    assert rack.overruns == []
