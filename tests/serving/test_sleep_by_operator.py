"""The operator's own steps and commands against a real engine: from a running stream to sleep, and back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.operator.builders import RENDERING, SETTINGS, replica, service
from tests.serving.inside import serving_inside
from tests.serving.processes import OpenStream, Service

from busbar.kube.contracts.bearers import Role, bearer_for
from busbar.operator.metrics import Metrics
from busbar.operator.pods.prober import Prober
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.view import ModelPlace, ServiceView
from busbar.operator.watch.projections import Node, Pod, Sleep, project_pod
from busbar.operator.write.actions import Patch, PostToPod
from busbar.workloads.serving.settings import EngineSettings

QUICK = replace(SETTINGS, drain_settle_s=0.0)
LOOPBACK = Node("node-0", (), (), 0, 0, 0, (), ready=True, cidrs=("127.0.0.0/8",))
BEARERS = {role: bearer_for(SETTINGS.workload_key, "uid-web", role) for role in Role}
BODY = {"model": "tiny", "prompt": "a", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


class Operator:
    """Reconciles one replica; its annotation is kept here, everything else is the engine's."""

    def __init__(self, server: Service) -> None:
        port = urlsplit(server.url).port or 0
        self.pod: Pod = replica(0, ip="127.0.0.1", port=port)
        self.posted: list[str] = []
        self.prober = Prober(QUICK, Metrics(), lambda: [self.pod], lambda name: LOOPBACK, lambda pod: None)

    async def step(self, desired: int) -> None:
        """One poll and one reconcile; waits until the engine has answered."""
        await self.prober.poll_once()
        status = {"desiredReplicas": desired, "observedGeneration": 1}
        scaling = {"warm": {"replicas": 1}}
        of = service(replicas=desired, minReplicas=0, maxReplicas=1, scaling=scaling, status=status)
        at = ServiceView(
            of, (self.pod,), datetime.now(UTC), QUICK, RENDERING, ModelPlace(uri="pvc://claim/model"),
            readings=self.prober.serving,
        )  # fmt: skip
        for action in reconcile(at).actions:
            if isinstance(action, Patch):
                read = project_pod({"metadata": {"name": "web-0", **action.patch["metadata"]}})
                self.pod = replace(self.pod, sleep=read.sleep, sleep_since=read.sleep_since)
            elif isinstance(action, PostToPod):
                self.posted.append(action.path)
                self.prober.post(action, self.pod)
        await asyncio.gather(*self.prober._tasks)

    async def until(self, desired: int, state: Sleep) -> None:
        for _ in range(200):
            await self.step(desired)
            if self.pod.sleep is state:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{self.pod.sleep} instead of {state}")


def ask(server: Service, **changes: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {BEARERS[Role.INFER]}"}
    body = json.dumps(BODY | changes).encode()
    status, _, data = server.call("POST", "/v1/completions", body, token="", headers=headers)
    return status, json.loads(data)


async def test_a_replica_finishes_its_stream_sleeps_and_answers_the_same_after_it_woke(deep: Path) -> None:
    settings = EngineSettings(deep, block_tokens=16, threads=1)
    with serving_inside(settings, "tiny", bearers=BEARERS) as server:
        key = Service(server.url, BEARERS[Role.INFER])
        before = await asyncio.to_thread(ask, server)
        assert before[0] == 200
        operator = Operator(server)
        try:
            with OpenStream(key, BODY | {"max_tokens": 400, "stream": True}) as stream:
                assert stream.line().startswith(b"data: ")
                for _ in range(3):
                    await operator.step(desired=0)
                assert operator.pod.sleep is Sleep.SETTLING
                assert operator.posted == [], "it is not asked to sleep while a stream runs"
                rest = await asyncio.to_thread(stream.answer.read)
            assert b'"finish_reason":"length","token_index":400' in rest
            assert rest.rstrip().endswith(b"data: [DONE]")
            await operator.until(0, Sleep.ASLEEP)
            assert (await asyncio.to_thread(ask, server))[0] == 503
            await operator.until(1, Sleep.AWAKE)
            assert operator.posted == ["/sleep", "/wake_up"]
            after = await asyncio.to_thread(ask, server)
            assert after[1]["choices"][0]["text"] == before[1]["choices"][0]["text"]
        finally:
            await operator.prober.close()
