"""The operator is killed before and after every write of the main job's life; the end is the same each time.

The scenario: a TrainingJob trains, a ModelService that serves its output comes up, is scaled to two and to zero. It
runs once with a kill before, and once with a kill after, every write; then, for every write n = 1..N of the job, the
service and their pods, once with a single kill before or after that write. A kill is like SIGKILL: no request of the
operator reaches the server any more, and it is started again. The end must not differ: no pod, admission or scaling
step happens twice, nothing is left, and usage adds up to the millisecond.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Literal

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, engine_job, gang_job
from tests.cluster.kubelet import Script, said
from tests.cluster.proxy import Write

from busbar.kube.client import Object
from busbar.kube.resources import MODEL_SERVICES, TRAINING_JOBS

Side = Literal["before", "after"]
SIDES: tuple[Side, ...] = ("before", "after")


def script(pod: Object) -> Script:
    if pod["metadata"]["labels"]["busbar.dev/kind"] == "trainingjob":
        return Script(run_s=0.05, message=said(step=10, totalSteps=10, loss=1.0, tokens=100))
    return Script(status=lambda s: {"kind": "serving", "ready": True, "running": 0, "waiting": 0})


@asynccontextmanager
async def reviving(cluster: Cluster, **changes: Any) -> AsyncIterator[list[int]]:
    """Starts the operator again whenever the proxy killed it; yields the numbers of the writes at which it was
    killed."""
    deaths: list[int] = []

    async def watch() -> None:
        while True:
            await cluster.proxy.killed.wait()
            deaths.append(len(cluster.proxy.writes))
            await cluster.kill()
            cluster.proxy.revive()
            await cluster.start(**changes)

    task = asyncio.create_task(watch())
    try:
        yield deaths
    finally:
        task.cancel()


async def story(cluster: Cluster) -> dict[str, Any]:
    """The main job's life; returns everything that must be the same at the end."""
    await cluster.create(engine_job("main"))
    await cluster.create(
        {
            "kind": "ModelService",
            "metadata": {"name": "web"},
            "spec": {"model": {"trainingJob": "main"}, "replicas": 1, "drainSeconds": 10},
        }
    )
    await cluster.until(TRAINING_JOBS, "main", lambda s: s.get("phase") == "Succeeded")
    for replicas in (1, 2, 0):
        patch = {"spec": {"replicas": replicas}}
        await cluster.client.patch(MODEL_SERVICES, "web", patch, cluster.namespace, subresource="scale")
        await cluster.until(
            MODEL_SERVICES,
            "web",
            lambda s, n=replicas: (
                s.get("readyReplicas") == n and s.get("replicas") == n and s["desiredReplicas"] == n
            ),  # type: ignore[misc]
        )
    service = await cluster.until(MODEL_SERVICES, "web", lambda s: s.get("phase") == "Idle")
    job = await cluster.status(TRAINING_JOBS, "main")
    held = _moment(job["lastUsageTime"]) - _moment(job["admission"]["admittedAt"])
    assert job["usage"]["acceleratorSeconds"] == pytest.approx(held.total_seconds(), abs=0.002)
    admissions = [
        w.body["status"]["admission"]["id"]
        for w in cluster.proxy.writes
        if w.status == 200
        and w.path.endswith("/main/status")
        and (w.body["status"].get("admission") or {}).get("id")
    ]
    assert len(admissions) == 1
    return {
        "job": {k: job[k] for k in ("phase", "reason", "attempt", "progress", "conditions")}
        | {"restarts": job.get("restarts", 0), "lost": job.get("lostWork")},
        "service": [service[k] for k in ("phase", "replicas", "readyReplicas", "desiredReplicas")],
        "scaled": [(h["previous"], h["desired"]) for h in service["scalingHistory"]],
        "pods that ever were": sorted(cluster.kubelet.created.values()),
        "pods that are": sorted(await cluster.pods()),
        "services": await cluster.services(),
    }


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _comparable(end: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Without the parts that differ between runs: the namespace's name and times."""
    end["pods that ever were"] = [p.removeprefix(f"{namespace}/") for p in end["pods that ever were"]]
    end["job"]["conditions"] = [(c["type"], c["status"], c["reason"]) for c in end["job"]["conditions"]]
    return end


EXPECTED: dict[str, Any] = {
    "job": {
        "phase": "Succeeded",
        "reason": "Succeeded",
        "attempt": 1,
        "restarts": 0,
        "lost": None,
        "progress": {"step": 10, "totalSteps": 10, "loss": 1, "tokens": 100, "percent": 100, "badRows": 0},
        "conditions": [
            ("Ready", "True", "Succeeded"),
            ("Admitted", "True", "Succeeded"),
            ("Running", "False", "Succeeded"),
            ("Complete", "True", "Succeeded"),
            ("Failed", "False", "Succeeded"),
            ("Suspended", "False", "Succeeded"),
        ],
    },
    "service": ["Idle", 0, 0, 0],
    "scaled": [(0, 1), (1, 2), (2, 0)],
    "pods that ever were": ["main-1-0", "web-0", "web-1"],
    "pods that are": ["main-1-0"],
    "services": [],
}


async def tell(server: ApiServer, number: int = 0, side: Side = "before") -> tuple[list[Write], list[int]]:
    """The scenario with one kill; returns the writes and the write at which the operator was killed."""
    async with Cluster(server, script=script) as cluster:
        if number:
            cluster.proxy.kill_at(number, side)
        async with reviving(cluster) as deaths:
            await cluster.start()
            end = await story(cluster)
        assert _comparable(end, cluster.namespace) == EXPECTED
        return cluster.proxy.writes, deaths


@pytest.mark.parametrize("side", ["before", "after"])
async def test_the_end_is_the_same_though_the_operator_dies_at_every_write(
    apiserver: ApiServer, side: Side
) -> None:
    async with Cluster(apiserver, script=script) as cluster:
        cluster.proxy.kill_each(side)
        async with reviving(cluster):
            await cluster.start()
            end = await story(cluster)
        assert _comparable(end, cluster.namespace) == EXPECTED
        assert cluster.proxy.died_at >= 20


async def test_the_end_is_the_same_wherever_the_operator_dies_once(apiserver: ApiServer) -> None:
    writes, _ = await tell(apiserver)
    # Events, and the counts of tenants and pools, carry no decision here; the tests above kill at those writes too.
    numbers = [
        w.number for w in writes if any(part in w.path for part in ("/pods", "trainingjobs", "modelservices"))
    ]
    assert len(numbers) >= 15
    reached = 0
    for number in numbers:
        for side in SIDES:
            try:
                _, deaths = await tell(apiserver, number, side)
            except AssertionError as error:
                raise AssertionError(f"killed {side} write {number} of {len(writes)}: {error}") from error
            reached += len(deaths)
    # Writes may be merged in a run, so the last few numbers are not always reached.
    assert reached >= 1.5 * len(numbers)


def gang_script(pod: Object) -> Script:
    """The first attempt runs until it is stopped, the second ends by itself."""
    first = pod["metadata"]["labels"]["busbar.dev/attempt"] == "1"
    return Script(
        run_s=None if first else 0.05, status=lambda s: {"kind": "training", "phase": "Training", "step": 1}
    )


@pytest.mark.parametrize("side", SIDES)
async def test_a_gang_that_is_suspended_and_resumed_survives_a_death_at_every_write(
    apiserver: ApiServer, side: Side
) -> None:
    async with Cluster(apiserver, script=gang_script, nodes=2) as cluster:
        cluster.proxy.kill_each(side)
        async with reviving(cluster):
            await cluster.start()
            await cluster.create(gang_job("gang", 2))
            await cluster.until(TRAINING_JOBS, "gang", lambda s: s.get("phase") == "Running")
            for suspend, phase in ((True, "Suspended"), (False, "Succeeded")):
                patch = {"spec": {"suspend": suspend}}
                await cluster.client.patch(TRAINING_JOBS, "gang", patch, cluster.namespace)
                await cluster.until(TRAINING_JOBS, "gang", lambda s, p=phase: s.get("phase") == p)  # type: ignore[misc]
        status = await cluster.status(TRAINING_JOBS, "gang")
        assert (status["attempt"], status.get("restarts", 0), status.get("preemptions", 0)) == (2, 0, 0)
        made = sorted(p.partition("/")[2] for p in cluster.kubelet.created.values())
        assert made == ["gang-1-0", "gang-1-1", "gang-2-0", "gang-2-1"]
        assert sorted(await cluster.pods()) == ["gang-2-0", "gang-2-1"]
        assert await cluster.services() == ["gang"]
        assert cluster.proxy.died_at >= 15
