"""The operator while somebody sets its machine's clock an hour ahead, an hour back, and right again.

Only the operator's wall clock is set, in its own process; the API server, the nodes and the lease have the right time.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_overload import CALM, admitted, one_pod, reach, rounds, statuses

from busbar.kube.client import Object
from busbar.kube.resources import TRAINING_JOBS
from busbar.operator import steady_clock
from busbar.operator.steady_clock import SteadyClock

HOUR_S = 3600.0
DEADLINE_S = 600


class Clock:
    """The wall clock of the operator's machine."""

    def __init__(self) -> None:
        self.wrong_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.wrong_s


def runs(pod: Object) -> Script:
    return Script()


async def look_again(cluster: Cluster) -> None:
    """Lets the operator reconcile every object and plan anew."""
    operator = cluster.operator
    assert operator is not None
    before = await rounds(operator)
    for _ in range(2):
        operator.everything()
        await becomes(lambda: rounds(operator), lambda count, wanted=before: count > wanted)  # type: ignore[misc]
        before = await rounds(operator)
    await becomes(lambda: asyncio.sleep(0, len(operator.controller.queue)), lambda waiting: waiting == 0)


async def test_a_clock_that_is_set_wrong_ends_nothing_charges_nothing_and_stops_nothing(
    apiserver: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(steady_clock, "CLOCK", SteadyClock(clock))
    async with Cluster(apiserver, script=runs, cpu="3") as cluster:
        operator = await cluster.start(**CALM)
        began = time.monotonic()
        await cluster.create(gang_job("short", 1, activeDeadlineSeconds=DEADLINE_S))
        await cluster.create(gang_job("gang", 2))
        await reach(cluster, Running=2)
        waiting = 0
        for wrong_s in (HOUR_S, -HOUR_S, 0.0):
            clock.wrong_s = wrong_s
            await cluster.create(one_pod(f"waits-{waiting}"))
            waiting += 1
            await look_again(cluster)
            await reach(cluster, Running=2, Queued=waiting)
        await cluster.kubelet.end((await cluster.pods())["short-1-0"], 0, "")
        ended = await cluster.until(TRAINING_JOBS, "short", lambda s: s.get("phase") == "Succeeded")
        took_s = time.monotonic() - began
        await reach(cluster, Succeeded=1, Running=2, Queued=waiting - 1)

        assert len(admitted(cluster)) == len(set(admitted(cluster))) == 3
        assert 0 < ended["usage"]["acceleratorSeconds"] <= 1.1 * took_s + 0.1
        held = _moment(ended["lastUsageTime"]) - _moment(ended["admission"]["admittedAt"])
        assert held.total_seconds() == pytest.approx(ended["usage"]["acceleratorSeconds"], abs=0.002)
        assert operator.lease.hold.term == 1
        assert len(statuses(cluster)) <= 8 * 5


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
