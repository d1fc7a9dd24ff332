"""What power limits cost is learned from a job whose boards are limited, written, and known after a restart.

The boards are simulated and their limits are files; the job's speed is made to follow these files, and the operator is
told to take the boards for real ones, which it would not learn from otherwise.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.kubelet import Script
from tests.cluster.racks import is_running, racked
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_caps import FEED, llm
from tests.cluster.test_operator_leases import Rack
from tests.cluster.test_operator_profiles import becomes_table

from busbar.kube.client import Object
from busbar.kube.resources import PERFORMANCE_PROFILES, POWER_DOMAINS, TRAINING_JOBS
from busbar.operator.power.readings import Reading
from busbar.operator.profiles import paces, power_curves
from busbar.scheduler.power.curves import seconds_of

HOME = "curves-home"
STEP_S = 0.05


class Engine:
    """Runs half as fast where its boards are limited to half."""

    def __init__(self, rack: Rack) -> None:
        self.rack, self.node = rack, ""
        self.tokens, self.seconds, self.asked_s = 0, 0.0, time.monotonic()

    def status(self, seconds: float) -> dict[str, Any]:
        now_s = time.monotonic()
        passed_s, self.asked_s = now_s - self.asked_s, now_s
        part = min(self.rack.limits.get(f"SIMULATED-{self.node}-{i}", 400.0) for i in range(2)) / 400
        self.tokens += round(100_000 * passed_s * part)
        self.seconds += passed_s
        return {
            "kind": "training",
            "phase": "Training",
            "step": 1 + int(self.seconds / STEP_S),
            "totalSteps": 10_000_000,
            "tokens": self.tokens,
            "tokensPerSecond": 100_000.0 * part,
            "phaseSeconds": {"forward": round(self.seconds, 3)},
        }


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reading, "is_simulated", property(lambda self: False))
    monkeypatch.setattr(paces, "STRETCH_S", 1.0)
    monkeypatch.setattr(paces, "USED_S", 0.5)
    monkeypatch.setattr(power_curves, "KNOWN_S", 2.0)


async def test_a_job_under_changing_limits_teaches_a_curve_that_outlives_the_operator(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    rack = Rack(tmp_path)
    engine = Engine(rack)

    def runs(pod: Object) -> Script:
        engine.node = pod["spec"]["nodeName"]
        return Script(status=engine.status)

    async with racked(apiserver, rack, HOME, FEED, runs) as cluster:
        await cluster.start(power_simulator_url=rack.url)
        await cluster.until(POWER_DOMAINS, "red", lambda s: s.get("boardsLimited") is True)
        await cluster.create(llm("taught"))
        running = await cluster.until(TRAINING_JOBS, "taught", is_running)

        async def curves() -> list[Object]:
            found, _ = await cluster.client.list(PERFORMANCE_PROFILES)
            ours = [p for p in found if p["spec"]["workloadClass"] == running["workloadClass"]]
            return [curve for p in ours for curve in (p.get("status") or {}).get("powerCurves") or ()]

        def worth_s(found: list[Object]) -> float:
            return math.fsum(each["seconds"] for curve in found for each in curve["comparisons"])

        for budget_w in (1450, 950, 1450, 950, 1450, 950, 1450):
            if worth_s(await curves()) > 2.0:
                break
            await cluster.client.patch(POWER_DOMAINS, "red", {"spec": {"budgetWatts": budget_w}})
            before_s = engine.seconds

            async def ran_s() -> float:
                return engine.seconds - before_s  # noqa: B023

            await becomes(ran_s, lambda seconds: seconds > 4.0)
        [curve] = await becomes(curves, lambda found: worth_s(found) > 2.0)
        assert (curve["accelerator"], curve["mode"]) == ("A100", "resident")
        lowest = curve["points"][0]
        assert lowest["percent"] < 100
        assert lowest["slowdown"] > 1.05
        told = await cluster.until(TRAINING_JOBS, "taught", lambda s: "power" in s)
        assert told["power"]["attempt"] == running["attempt"]
        assert told["power"]["slowdown"] >= 1.0

        await cluster.kill()
        await cluster.start(power_simulator_url=rack.url)
        await becomes_table(cluster, lambda table: any(cell.power_cap < 1 for cell in table.learned))
        assert cluster.operator is not None
        known = cluster.operator.handlers.profiles.curves

        async def restored() -> float:
            return math.fsum(seconds_of(of) for of in known.of_class(running["workloadClass"]).values())

        await becomes(restored, lambda seconds: seconds >= worth_s([curve]) - 1)
