"""Deadlines on a real API server: promised in the status, refused with a reason, kept over a restart, and judged at the end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster
from tests.cluster.kubelet import Script
from tests.cluster.test_operator_forecasts import phase, sized_job

from busbar.kube.client import Object
from busbar.kube.resources import TRAINING_JOBS


def due(name: str, seconds: float) -> Object:
    made = sized_job(name)
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    made["spec"]["deadline"] = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return made


def answers(answer: str) -> Any:
    return lambda status: status.get("deadline", {}).get("answer") == answer


async def test_deadlines_are_promised_or_refused_and_judged_at_the_end(apiserver: ApiServer) -> None:
    def script(pod: Object) -> Script:
        return Script(run_s=2.0) if pod["metadata"]["name"].startswith("in-time") else Script()

    async with Cluster(apiserver, cpu="2", script=script) as cluster:
        await cluster.start()
        await cluster.create(due("in-time", 7200))
        found = await cluster.until(TRAINING_JOBS, "in-time", answers("Keeps"))
        assert found["deadline"]["message"].startswith("Promised: ")
        await cluster.create(due("too-late", -60))
        refused = await cluster.until(TRAINING_JOBS, "too-late", answers("OutOfReach"))
        assert refused["deadline"]["message"].startswith("Not promised: out of reach")

        done = await cluster.until(
            TRAINING_JOBS,
            "in-time",
            lambda status: phase("Succeeded")(status) and "met" in status["deadline"],
        )
        assert done["deadline"]["met"] is True
        assert "before its deadline" in done["deadline"]["message"]

        without = {"spec": {"deadline": None}}
        await cluster.client.patch(TRAINING_JOBS, "too-late", without, cluster.namespace)
        await cluster.until(TRAINING_JOBS, "too-late", lambda status: "deadline" not in status)
        told = {(event["involvedObject"]["name"], event["reason"]) for event in await cluster.events()}
        assert {("in-time", "DeadlinePromised"), ("in-time", "DeadlineKept")} <= told
        assert ("too-late", "DeadlineNotPromised") in told


async def test_a_promise_outlives_the_operator(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, cpu="2", script=lambda pod: Script()) as cluster:
        await cluster.start()
        await cluster.create(due("kept", 7200))
        before = await cluster.until(TRAINING_JOBS, "kept", answers("Keeps"))
        await cluster.stop()
        await cluster.start()
        await cluster.create(due("more", 7200))
        await cluster.until(TRAINING_JOBS, "more", lambda status: "deadline" in status)
        after = await cluster.status(TRAINING_JOBS, "kept")
        assert after["deadline"]["answer"] == before["deadline"]["answer"] == "Keeps"
