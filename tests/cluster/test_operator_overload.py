"""The operator while the API server is late or refuses: slower, with fewer writes, and never at its end.

Each test ends in the state that a calm run reaches, with the same operator process, within a bounded number of writes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.proxy import Write, every_second
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.resources import TRAINING_JOBS

CALM: dict[str, Any] = {"lease_duration_s": 6.0, "explain_period_s": 60.0, "sentences_per_s": 20.0}
"""As in production, but for the lease: a pause of seconds must cost it."""


def one_pod(name: str) -> Object:
    return gang_job(name, 1)


async def phases(cluster: Cluster) -> Counter[str]:
    items, _ = await cluster.client.list(TRAINING_JOBS, cluster.namespace)
    return Counter((item.get("status") or {}).get("phase", "New") for item in items)


async def reach(cluster: Cluster, **wanted: int) -> None:
    """Waits until so many jobs are in each phase."""
    await becomes(lambda: phases(cluster), lambda found: found == Counter(wanted))
    cluster.raise_if_ended()


def statuses(cluster: Cluster, name: str = "") -> list[Write]:
    """The writes of TrainingJobs' statuses so far."""
    return [
        w for w in cluster.proxy.writes if f"/trainingjobs/{name}" in w.path and w.path.endswith("/status")
    ]


def admitted(cluster: Cluster) -> list[str]:
    """The jobs whose admission the server has taken, as often as it took one."""
    return sorted(
        w.path.split("/")[-2]
        for w in statuses(cluster)
        if w.status == 200 and ((w.body.get("status") or {}).get("admission") or {}).get("id")
    )


async def submit(cluster: Cluster, count: int) -> list[str]:
    names = [f"j{i:02d}" for i in range(count)]
    for name in names:
        await cluster.create(one_pod(name))
    return names


def ends(pod: Object) -> Script:
    return Script(run_s=0.05)


async def test_the_operator_survives_an_api_server_that_does_not_answer(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=ends, cpu="4") as cluster:
        operator = await cluster.start(**CALM)
        await cluster.create(one_pod("before"))
        await reach(cluster, Succeeded=1)
        names = await submit(cluster, 6)
        for pause_s in (1.0, 7.0):
            apiserver.pause()
            await asyncio.sleep(pause_s)
            assert (operator.fence.left_s() > 0) is (pause_s < 4.8)
            apiserver.resume()
        await reach(cluster, Succeeded=7)
        assert operator.lease.hold.term == 1  # nobody else held it: nothing is listed again
        assert [n for n in admitted(cluster) if n != "before"] == names
        assert len(cluster.kubelet.created) == 7
        assert len(statuses(cluster)) <= 6 * 7


async def test_late_answers_slow_the_operator_and_do_not_cost_its_lease(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=ends, cpu="4") as cluster:
        operator = await cluster.start(**CALM)
        await cluster.create(one_pod("before"))
        await reach(cluster, Succeeded=1)
        cluster.proxy.delay_s = 1.2
        names = await submit(cluster, 2)
        await reach(cluster, Succeeded=3)
        assert operator.lease.hold.term == 1
        assert operator.fence.left_s() > 0
        assert operator.lanes.limit < operator.settings.connections / 2
        assert [n for n in admitted(cluster) if n != "before"] == names
        assert len(cluster.kubelet.created) == 3


async def test_refusing_every_second_write_with_429_loses_and_doubles_nothing(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=ends, cpu="4") as cluster:
        await cluster.start(**CALM)
        await becomes(lambda: _ready(cluster), bool)
        cluster.proxy.answer(
            every_second("/trainingjobs", "/pods"),
            429,
            "TooManyRequests",
            headers={"Retry-After": "0"},
            times=10_000,
        )
        names = await submit(cluster, 6)
        await reach(cluster, Succeeded=6)
        assert any(w.status == 429 for w in cluster.proxy.writes)
        assert admitted(cluster) == names
        assert len(cluster.kubelet.created) == 6
        assert len(statuses(cluster)) <= 2 * 6 * 6


async def test_writes_that_were_done_and_answered_504_are_not_done_twice(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=ends, cpu="4") as cluster:
        await cluster.start(**CALM)
        await becomes(lambda: _ready(cluster), bool)
        cluster.proxy.answer_after(every_second("/trainingjobs", "/pods"), 504, "Timeout", times=10_000)
        names = await submit(cluster, 6)
        await reach(cluster, Succeeded=6)
        assert any(w.status == 504 for w in cluster.proxy.writes)
        assert len(cluster.kubelet.created) == 6
        # The answer of an admission may be lost; a second one must not follow.
        status = [await cluster.status(TRAINING_JOBS, name) for name in names]
        assert [(s["attempt"], s.get("restarts", 0)) for s in status] == [(1, 0)] * 6
        assert len(statuses(cluster)) <= 8 * 6


async def test_a_restart_on_many_waiting_jobs_writes_none_of_them_again(apiserver: ApiServer) -> None:
    waiting = 40
    async with Cluster(apiserver, script=lambda pod: Script(), cpu="2") as cluster:
        await cluster.start(**CALM)
        for i in range(waiting + 2):
            await cluster.create(one_pod(f"j{i:02d}"))
        await reach(cluster, Running=2, Queued=waiting)
        told = Counter(w.path for w in statuses(cluster) if not _acts(w))
        assert max(told.values()) <= 2  # its first reason, and another code at most
        await cluster.kill()
        before = len(statuses(cluster))
        operator = await cluster.start(**CALM)
        await becomes(lambda: rounds(operator), lambda count: count >= 3)
        assert len(statuses(cluster)) - before <= 4  # usage of the two that run
        cluster.raise_if_ended()


def _acts(write: Write) -> bool:
    status: dict[str, Any] = write.body.get("status") or {}
    return str(status.get("phase", "Queued")) != "Queued"


async def _ready(cluster: Cluster) -> bool:
    assert cluster.operator is not None
    return bool(cluster.operator.fence.left_s() > 0)


async def rounds(operator: Any) -> float:
    return float(
        next(
            sample.value
            for metric in operator.metrics.rounds.collect()
            for sample in metric.samples
            if sample.name.endswith("_count")
        )
    )
