"""A TrainingJob from submission to its end, on the real API server."""

from __future__ import annotations

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, engine_job
from tests.cluster.kubelet import Script, said

from busbar.kube.resources import TRAINING_JOBS


async def test_a_job_is_admitted_runs_and_succeeds_with_its_last_numbers(apiserver: ApiServer) -> None:
    message = said(step=10, totalSteps=10, loss=1.5, tokens=1000)
    async with Cluster(apiserver, script=lambda pod: Script(run_s=0.3, message=message)) as cluster:
        await cluster.start()
        await cluster.create(engine_job("one"))
        status = await cluster.until(TRAINING_JOBS, "one", lambda s: s.get("phase") == "Succeeded")
        assert status["progress"]["step"] == 10
        assert status["attempt"] == 1
        assert list(await cluster.pods()) == ["one-1-0"]
