"""What is reconciled first."""

from __future__ import annotations

from typing import Any

from tests.operator.builders import SETTINGS

from busbar.kube.informer import Key
from busbar.kube.login import Login
from busbar.operator.app import Item, Operator


def pod_of(job: str, phase: str, version: int) -> dict[str, Any]:
    labels = {"busbar.dev/kind": "trainingjob", "busbar.dev/job": job, "busbar.dev/attempt": "1"}
    meta = {"name": f"{job}-1-0", "namespace": "team", "uid": f"uid-{job}", "labels": labels}
    return {"metadata": {**meta, "resourceVersion": str(version)}, "spec": {}, "status": {"phase": phase}}


async def test_a_job_whose_pod_has_ended_is_reconciled_before_those_whose_pods_start() -> None:
    operator = Operator(Login("https://cluster.test"), SETTINGS)
    operator.synced = True
    for version, (job, phase) in enumerate(
        [("a", "Pending"), ("b", "Running"), ("c", "Running"), ("b", "Succeeded")], start=1
    ):
        operator.caches.pods.observe(pod_of(job, phase, version))
    queue = operator.controller.queue
    try:
        first, second, third = [await queue.get() for _ in range(3)]
    finally:
        await operator.client.close()
    assert first == Item("TrainingJob", Key("team", "b"))
    assert [second.key.name, third.key.name] == ["a", "c"]
