"""What is reconciled first, and what later."""

from __future__ import annotations

import time
from typing import Any

from tests.operator.builders import SETTINGS

from busbar.kube.informer import Key
from busbar.kube.login import Login
from busbar.operator.accounting.allocations import PoolRemarks
from busbar.operator.app import Item, Operator
from busbar.scheduler import Job, JobId, Node, Placement, Pool, Resources, Run, Snapshot, Tenant


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


def snapshot(*jobs: Job) -> Snapshot:
    return Snapshot((Pool("p", "H100"),), (Node("n", "p", Resources(8000)),), (Tenant("a"),), jobs)


def one(name: str, run: Run | None = None) -> Job:
    return Job(JobId(name), name, "ns", "a", per_pod=Resources(1000), run=run)


async def test_a_tenant_is_looked_at_when_it_holds_something_else_and_else_when_its_counts_are_due() -> None:
    operator = Operator(Login("https://cluster.test"), SETTINGS)
    queue, tenant = operator.controller.queue, Item("Tenant", Key("", "a"))

    async def queued_after(*jobs: Job) -> bool:
        await operator.handlers.after_round(snapshot(*jobs), PoolRemarks())
        found = tenant in queue._ready
        while len(queue):
            queue.done(await queue.get())
        return found

    try:
        assert await queued_after(one("x")), "its status has never been written"
        operator.handlers.tenants._told[tenant.key] = time.monotonic()
        assert not await queued_after(one("x"), one("y"))
        assert tenant in queue._timers
        runs = Run(Placement("p", "H100", "resident", ("n",), Resources(1000)), 0.0)
        assert await queued_after(one("x", runs), one("y"))
        operator.handlers.tenants._told[tenant.key] = time.monotonic() - 60
        assert await queued_after(one("x", runs))
        assert not await queued_after(one("x", runs))
    finally:
        queue.close()
        await operator.client.close()
