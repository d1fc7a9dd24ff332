"""Two replicas of the operator: one leads, the other is ready and does nothing until the lease is free."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import time
from dataclasses import replace
from pathlib import Path

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import PATIENCE_S, QUICK, Cluster, with_the_charts_rights
from tests.cluster.kubelet import Script
from tests.cluster.replicas import Replica, holder, home, labelled, nothing_doubled, operator_pod, two
from tests.cluster.rights import SYSTEM
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_overload import one_pod, reach
from tests.cluster.test_operator_serving import ready, replica, service

from busbar.kube.client import Object
from busbar.kube.contracts.service_series import SeriesSpan
from busbar.kube.informer import Key
from busbar.kube.resources import CONFIG_MAPS, MODEL_SERVICES, PODS
from busbar.kube.types.meta import LABEL_LEADER
from busbar.operator.main import END_S
from busbar.operator.serving.series_store import NAMES
from busbar.operator.steady_clock import CLOCK
from busbar.operator.write.kept_object import DATA, unpacked

CALLER = "/snapshot"


def runs(pod: Object) -> Script:
    return Script()


async def submit(cluster: Cluster, *names: str) -> None:
    for name in names:
        await cluster.create(one_pod(name))


async def stops(replica: Replica) -> None:
    """An ordinary stop, as the kubelet does it."""
    replica.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(replica.process.wait, PATIENCE_S) == 0


async def test_a_standby_does_nothing_until_it_takes_over_from_a_killed_leader(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    async with Cluster(apiserver, script=runs, cpu="4") as cluster, two(cluster, tmp_path) as (first, second):
        assert not await second.leads()
        await submit(cluster, "a", "b")
        await reach(cluster, Running=2)
        assert second.proxy.writes == []
        # Its callers are told to try another one, if any comes past the Service.
        assert (await second.ask(CALLER, second.internal))[0] in (401, 503)

        await submit(cluster, "c", "d", "e", "f")
        await becomes(lambda: asyncio.sleep(0, len(cluster.kubelet.created)), lambda pods: pods >= 5)
        first.kill()  # in the middle of it
        await second.to_lead()
        await reach(cluster, Running=4, Queued=2)
        nothing_doubled(cluster, first, second)


async def test_a_leader_that_was_frozen_past_its_lease_writes_nothing_and_leads_again_after_the_other(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    async with Cluster(apiserver, script=runs, cpu="3") as cluster, two(cluster, tmp_path) as (first, second):
        await submit(cluster, "a")
        await reach(cluster, Running=1)
        first.freeze()
        await submit(cluster, "b")  # its watches say so when it wakes
        await second.to_lead()
        await reach(cluster, Running=2)
        written = len(first.proxy.writes)
        first.thaw()
        await submit(cluster, "c", "d")
        await becomes(
            lambda: asyncio.sleep(0, first.log), lambda log: "this operator is a standby now" in log
        )
        await becomes(first.is_ready, bool)
        await reach(cluster, Running=3, Queued=1)
        assert [str(write) for write in first.proxy.writes[written:]] == []
        assert await holder(cluster) == f"{second.name}_{second.name}"

        await stops(second)
        assert await holder(cluster) != f"{second.name}_{second.name}", "it gave the lease back"
        await cluster.kubelet.end((await cluster.pods())["a-1-0"], 0, "")
        await first.to_lead()  # it can still lead, in the same process
        await reach(cluster, Succeeded=1, Running=3)
        nothing_doubled(cluster, first, second)
        assert first.process.poll() is None


async def test_the_leader_may_label_its_pod_and_takes_the_label_from_another(platform: ApiServer) -> None:
    async with with_the_charts_rights(platform) as cluster:
        for name in ("operator-old", "operator-new"):
            await cluster.client.create(PODS, operator_pod(name), SYSTEM)
        mark = {"metadata": {"labels": {LABEL_LEADER: "true"}}}
        await cluster.client.patch(PODS, "operator-old", mark, SYSTEM)
        await cluster.start(pod_name="operator-new")
        await becomes(lambda: labelled(cluster, SYSTEM), lambda names: names == ["operator-new"])
        cluster.raise_if_ended()


async def test_the_load_over_time_goes_on_in_another_operator_with_a_gap_between(platform: ApiServer) -> None:
    settings = replace(QUICK, series_period_s=0.8)  # replicas that took requests, by the minute
    async with with_the_charts_rights(platform, settings, script=replica) as cluster:

        async def ready_by_minute() -> tuple[float | None, ...]:
            assert cluster.operator is not None
            key = Key(cluster.namespace, "web")
            pools = cluster.operator.series.of(key, SeriesSpan.HOUR).pools
            return pools[0].ready_replicas if pools else ()

        operator = await cluster.start()
        operator.series.now_s = lambda: CLOCK.now_s() - 600  # ten minutes ago
        await cluster.create(service("web", replicas=2))
        await cluster.until(MODEL_SERVICES, "web", ready(2))
        await operator.series.sample()

        async def kept() -> list[str]:
            found, _ = await cluster.client.list(CONFIG_MAPS, SYSTEM)
            return [each["metadata"]["name"] for each in found if each["metadata"]["name"] in NAMES]

        await becomes(kept, lambda names: len(names) == 1)
        await cluster.kill()
        await cluster.start()
        found = await becomes(ready_by_minute, lambda minutes: minutes[-1:] == (2.0,))
        assert set(found[-9:-1]) == {None}, "nobody counted"
        before = [value for value in found[-12:-9] if value is not None]
        assert before, "what the operator before had counted"
        assert all(0 < value <= 2 for value in before)


async def kept_series(cluster: Cluster) -> dict[str, str]:
    """What is kept of the services' load over time, by their uids."""
    found, _ = await cluster.client.list(CONFIG_MAPS, home(cluster))
    kept: dict[str, str] = {}
    for each in found:
        if each["metadata"]["name"] in NAMES:
            kept |= json.loads(unpacked(base64.b64decode(each["binaryData"][DATA])))
    return kept


async def test_a_stop_writes_what_was_counted_since_the_last_period_and_releases_the_lease(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    async with (
        Cluster(apiserver, script=replica) as cluster,
        two(cluster, tmp_path, lease_s=20.0) as (first, second),
    ):
        made = await cluster.create(service("web", replicas=2))
        await cluster.until(MODEL_SERVICES, "web", ready(2))
        assert await kept_series(cluster) == {}, "a period is ten minutes"
        await stops(first)
        assert set(await kept_series(cluster)) == {made["metadata"]["uid"]}
        await second.to_lead()
        before = await kept_series(cluster)
        other = await cluster.create(service("other", replicas=1))
        await cluster.until(MODEL_SERVICES, "other", ready(1))
        again_later = {"Retry-After": "30"}
        second.proxy.answer(_writes_config_maps, 429, "TooManyRequests", headers=again_later, times=1000)
        began = time.monotonic()
        await stops(second)
        assert time.monotonic() - began < END_S, "nothing had to end it"
        assert not await holder(cluster), "it gave the lease back"
        assert await kept_series(cluster) == before
        assert other["metadata"]["uid"] not in before


def _writes_config_maps(method: str, path: str) -> bool:
    return method != "GET" and "/configmaps" in path
