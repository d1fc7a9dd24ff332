"""A waiting job's forecast, on the real API server: written to its status, kept by a restart, scored at the start."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, engine_job, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.resources import PODS, TRAINING_JOBS
from busbar.kube.types import TrainingJob
from busbar.operator.app import Operator

SOON: dict[str, Any] = {
    "forecast_pause_s": 0.1, "forecast_renew_s": 10.0, "forecast_ended": 2,
    "forecast_computing_s": 60.0, "forecast_draft_s": 60.0,
}  # fmt: skip
"""A first forecast comes at once, and is read before another takes its place."""
ANEW: dict[str, Any] = {**SOON, "forecast_renew_s": 0.5}


SIZED = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip


def sized_job(name: str) -> Object:
    """A job whose work is known, so that its end can be forecast."""
    made = engine_job(name)
    made["spec"]["engine"]["model"] = {"config": SIZED}
    return made


def phase(name: str) -> Any:
    return lambda status: status.get("phase") == name


def made(operator: Operator) -> float:
    return float(operator.metrics.forecasts.labels("made")._value.get())


async def outcomes(operator: Operator) -> dict[str, Any]:
    """What the operator knows of promises, by job."""
    return dict(operator.job_history.outcomes)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


async def test_a_waiting_job_has_a_forecast_and_after_a_restart_again(apiserver: ApiServer) -> None:
    def script(pod: Object) -> Script:
        return Script() if pod["metadata"]["name"].startswith("first") else Script(run_s=0.3)

    async with Cluster(apiserver, cpu="2", script=script) as cluster:
        operator = await cluster.start(**SOON)
        for name in ("short-a", "short-b"):
            await cluster.create(engine_job(name))
            await cluster.until(TRAINING_JOBS, name, phase("Succeeded"))
        await cluster.create(gang_job("first", 2, preemptible=False))
        await cluster.until(TRAINING_JOBS, "first", phase("Running"))
        await cluster.create(sized_job("second"))
        status = await cluster.until(TRAINING_JOBS, "second", lambda s: "forecast" in s)
        forecast, promise = status["forecast"], status["promise"]
        assert status["phase"] == "Queued"
        assert at(forecast["madeAt"]) <= at(forecast["startP50"]) <= at(forecast["startP90"])
        assert at(forecast["startP50"]) <= at(forecast["endP50"]) <= at(forecast["endP90"])
        assert (promise["startP50"], promise["attempt"]) == (forecast["startP50"], 0)
        assert promise["simulatedP50Seconds"] <= promise["simulatedP90Seconds"]
        assert len(operator.job_history.ended) == 2

        # The status can be read here before the operator has seen it.
        told = await becomes(lambda: outcomes(operator), bool)
        await cluster.stop()
        restarted = await cluster.start(**ANEW)
        status = await cluster.until(TRAINING_JOBS, "second", lambda s: made(restarted) >= 1)
        assert status["promise"] == promise
        assert "forecast" in status
        assert len(restarted.job_history.ended) == 2
        assert await becomes(lambda: outcomes(restarted), bool) == told

        draft = TrainingJob.model_validate(
            {**engine_job("draft"), "metadata": {"name": "d", "namespace": cluster.namespace}}
        )
        found = await restarted.previews.of(draft, admin=False)
        assert found.waits
        assert found.start_p50_seconds is not None
        assert found.when.startswith("Likely in ")

        await cluster.client.delete(TRAINING_JOBS, "first", cluster.namespace)
        for name in ("first-1-0", "first-1-1"):  # there is no garbage collector here
            await cluster.client.delete(PODS, name, cluster.namespace)
        status = await cluster.until(TRAINING_JOBS, "second", phase("Succeeded"))
        # This test may see the event before the operator gets its answer. The deleted job ran too.
        await cluster.until(TRAINING_JOBS, "second", lambda s: len(restarted.job_history.ended) == 4)
        assert "forecast" not in status
        assert status["promise"]["startedAt"] == status["admission"]["admittedAt"]
        (outcome,) = (kept for _, kept in restarted.job_history.outcomes)
        assert outcome.waited_s is not None
        assert outcome.waited_s > 0
