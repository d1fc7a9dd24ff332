"""The operator reaches the same end through refusals, broken watches and competing writers, and writes nothing
twice."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import PATIENCE_S, Cluster, engine_job
from tests.cluster.kubelet import Script, add_node, said
from tests.cluster.operator_process import COMMAND, environment
from tests.cluster.proxy import FaultProxy
from tests.cluster.tenancy import becomes

from busbar.kube.client import ClientLimits, KubeClient
from busbar.kube.errors import ConnectionFailed, NotFound, TooManyRequests
from busbar.kube.informer import Informer, Key, key_of
from busbar.kube.login import Login
from busbar.kube.resources import LEASES, NAMESPACES, NODES, PODS, TRAINING_JOBS
from busbar.operator.errors import Fenced

DONE = Script(run_s=0.1, message=said(step=10, totalSteps=10))


def on(method: str, part: str) -> Callable[[str, str], bool]:
    return lambda m, path: m == method and part in path


async def finishes(cluster: Cluster, name: str = "job") -> None:
    await cluster.create(engine_job(name))
    status = await cluster.until(TRAINING_JOBS, name, lambda s: s.get("phase") == "Succeeded")
    assert (status["attempt"], status.get("restarts", 0)) == (1, 0)
    assert [n for n in await cluster.pods() if n.startswith(name)] == [f"{name}-1-0"]
    assert len([p for p in cluster.kubelet.created.values() if p.endswith(f"/{name}-1-0")]) == 1


@pytest.mark.parametrize(
    ("method", "part"),
    [("PATCH", "/trainingjobs/job/status"), ("POST", "/pods"), ("PATCH", "/pods/job-1-0")],
)
@pytest.mark.parametrize(
    ("status", "reason", "headers"),
    [
        (409, "Conflict", {}),
        (429, "TooManyRequests", {"Retry-After": "1"}),
        (500, "InternalError", {}),
        (503, "ServiceUnavailable", {"Retry-After": "0"}),
    ],
)
async def test_a_refused_write_is_looked_at_again(
    apiserver: ApiServer, method: str, part: str, status: int, reason: str, headers: dict[str, str]
) -> None:
    async with Cluster(apiserver, script=lambda pod: DONE) as cluster:
        cluster.proxy.answer(on(method, part), status, reason, headers=headers, times=2)
        await cluster.start()
        await finishes(cluster)


async def test_a_write_that_stays_forbidden_hurts_only_its_object(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=lambda pod: DONE) as cluster:
        cluster.proxy.answer(
            lambda m, p: p.endswith("/trainingjobs/bad/status"), 403, "Forbidden", times=10_000
        )
        await cluster.start()
        await cluster.create(engine_job("bad"))
        await finishes(cluster)
        cluster.raise_if_ended()


async def test_cut_and_stalled_watches_lose_nothing(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=lambda pod: DONE) as cluster:
        await cluster.start(watch_inactivity_s=1.0)
        await finishes(cluster, "first")
        cluster.proxy.cut_watches()
        await finishes(cluster, "second")
        cluster.proxy.stall_watches()
        await finishes(cluster, "third")


async def test_a_watch_that_is_too_old_is_listed_again(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=lambda pod: DONE) as cluster:
        operator = await cluster.start()
        await finishes(cluster, "first")
        before = operator.caches.pods.relists
        cluster.proxy.answer(lambda m, p: m == "GET" and p == "/api/v1/pods", 410, "Expired", times=1)
        cluster.proxy.cut_watches()
        await finishes(cluster, "second")
        assert operator.caches.pods.relists == before + 1


async def test_an_operator_that_loses_its_lease_writes_nothing_until_it_holds_it_again(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=lambda pod: DONE) as cluster:
        first = await cluster.start(lease_duration_s=3.0)
        await finishes(cluster, "before")
        # Without a resource version: a renewal between the read and the write must not make this a conflict.
        taken = {"spec": {"holderIdentity": "somebody-else"}}
        await cluster.client.patch(LEASES, "busbar-operator", taken, "default")
        await becomes(lambda: _returned(first.fence.left_s() <= 0), bool)
        written = len(cluster.proxy.writes)
        await cluster.create(engine_job("during"))
        with pytest.raises(Fenced):
            await first.client.patch(TRAINING_JOBS, "before", {}, cluster.namespace)
        assert len(cluster.proxy.writes) == written
        # Not renewed by anybody, it is free after its three seconds. The operator started over in the same process.
        status = await cluster.until(TRAINING_JOBS, "during", lambda s: s.get("phase") == "Succeeded")
        assert status["attempt"] == 1
        assert cluster.operator is not first
        cluster.raise_if_ended()


async def test_what_another_holder_wrote_is_read_before_anything_is_planned(apiserver: ApiServer) -> None:
    """The watches say nothing of what happened meanwhile; the lists that follow a new term do."""
    async with Cluster(apiserver, script=lambda pod: Script(), cpu="1") as cluster:
        first = await cluster.start(lease_duration_s=3.0)
        await cluster.create(engine_job("one"))
        await cluster.until(TRAINING_JOBS, "one", lambda s: s.get("phase") == "Running")
        cluster.proxy.stall_watches()
        other = {"spec": {"holderIdentity": "somebody-else"}}
        await cluster.client.patch(LEASES, "busbar-operator", other, "default")
        await becomes(lambda: _returned(first.fence.left_s() <= 0), bool)
        # As another operator: the only node is gone, and there is a new one.
        await cluster.client.delete(NODES, f"{cluster.namespace}-node-0")
        await asyncio.to_thread(
            add_node, apiserver, f"{cluster.namespace}-node-1", labels={"pool": cluster.namespace}, cpu="1"
        )
        await cluster.create(engine_job("two"))
        status = await cluster.until(TRAINING_JOBS, "two", lambda s: s.get("phase") is not None)
        assert status["admission"]["nodes"] == [f"{cluster.namespace}-node-1"]
        cluster.raise_if_ended()


async def _returned(value: bool) -> bool:
    return value


async def test_a_second_operator_waits_until_the_first_is_dead(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, script=lambda pod: DONE) as cluster:
        await cluster.start()
        await finishes(cluster, "first")
        await cluster.kill()  # killed: the lease is not released
        # A short lease expires quickly, but its holder could lose it on a busy machine.
        short = {"spec": {"leaseDurationSeconds": 3}}
        await cluster.client.patch(LEASES, "busbar-operator", short, "default")
        started = asyncio.get_running_loop().time()
        await cluster.start(identity="another-pod")
        await finishes(cluster, "second")
        waited = asyncio.get_running_loop().time() - started
        assert waited >= 3.0


async def test_an_operator_killed_as_a_process_goes_on_where_it_was(
    apiserver: ApiServer, tmp_path: Path
) -> None:
    env = environment(apiserver.kubeconfig(), tmp_path)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(COMMAND, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async with Cluster(apiserver, script=lambda pod: Script()) as cluster:
        process = start()
        try:
            await cluster.create(engine_job("job"))
            for phase in ("Admitted", "Starting", "Running"):
                await cluster.until(TRAINING_JOBS, "job", lambda s: bool(s.get("phase")))
                process.send_signal(signal.SIGKILL)
                process.wait()
                process = start()
                if phase == "Running":
                    await cluster.until(TRAINING_JOBS, "job", lambda s: s.get("phase") == "Running")
            await cluster.kubelet.end((await cluster.pods())["job-1-0"], 0, said(step=10, totalSteps=10))
            status = await cluster.until(TRAINING_JOBS, "job", lambda s: s.get("phase") == "Succeeded")
            assert (status["attempt"], status.get("restarts", 0)) == (1, 0)
            process.terminate()
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()


# -- the client and the informer by themselves ---------------------------------------------------------


async def test_the_client_waits_as_long_as_the_server_asks_and_no_longer(apiserver: ApiServer) -> None:
    async with FaultProxy(apiserver.url, apiserver.ca_file) as proxy:
        login = Login(server=proxy.url, token=apiserver.admin_token)
        async with KubeClient(login, limits=ClientLimits(retry_s=1.5)) as client:
            proxy.answer(on("GET", "/namespaces"), 429, "TooManyRequests", headers={"Retry-After": "1"})
            started = asyncio.get_running_loop().time()
            items, _ = await client.list(NAMESPACES)
            assert items
            assert asyncio.get_running_loop().time() - started >= 1.0
            proxy.answer(on("GET", "/namespaces"), 429, "TooManyRequests", headers={"Retry-After": "60"})
            with pytest.raises(TooManyRequests):
                await client.list(NAMESPACES)


async def test_a_write_whose_answer_is_lost_is_not_repeated_by_the_client(apiserver: ApiServer) -> None:
    async with FaultProxy(apiserver.url, apiserver.ca_file) as proxy:
        login = Login(server=proxy.url, token=apiserver.admin_token)
        async with KubeClient(login) as client:
            proxy.kill_at(1, "after")
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "written-once"}}
            with pytest.raises(ConnectionFailed):
                await client.create(NAMESPACES, body)
            proxy.revive()
            assert len(proxy.writes) == 1
            assert (await client.get(NAMESPACES, "written-once"))["metadata"]["name"] == "written-once"


async def test_typed_errors_and_pages(apiserver: ApiServer, namespace: str) -> None:
    login = Login(apiserver.url, ca_pem=apiserver.ca_file.read_text(), token=apiserver.admin_token)
    async with KubeClient(login) as client:
        with pytest.raises(NotFound):
            await client.get(PODS, "nobody", namespace)
        for i in range(5):
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"p{i}"},
                "spec": {"containers": [{"name": "c", "image": "i"}]},
            }
            await client.create(PODS, pod, namespace)
        items, revision = await client.list(PODS, namespace, page=2)
        assert sorted(i["metadata"]["name"] for i in items) == [f"p{i}" for i in range(5)]
        assert revision.isdigit()


async def test_an_informer_falls_back_to_pages_and_reports_what_went_away(
    apiserver: ApiServer, namespace: str
) -> None:
    login = Login(apiserver.url, ca_pem=apiserver.ca_file.read_text(), token=apiserver.admin_token)
    async with FaultProxy(apiserver.url, apiserver.ca_file) as proxy:
        through = Login(server=proxy.url, token=apiserver.admin_token)
        async with KubeClient(through) as client, KubeClient(login) as direct:
            proxy.answer(lambda m, p: m == "GET" and p.endswith("/pods"), 400, "BadRequest")
            seen: list[tuple[Key, bool]] = []
            informer: Informer[str] = Informer(
                client,
                PODS,
                lambda obj: str(obj["metadata"]["uid"]),
                lambda key, old, new: seen.append((key, new is not None)),
                namespace=namespace,
            )
            task = asyncio.create_task(informer.run())
            await asyncio.wait_for(informer.synced.wait(), PATIENCE_S)
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "here"},
                "spec": {"containers": [{"name": "c", "image": "i"}]},
            }
            made = await direct.create(PODS, pod, namespace)
            key = key_of(made)
            await _until(lambda: key in informer.items)
            await direct.delete(PODS, "here", namespace, grace_s=0)
            await _until(lambda: key not in informer.items)
            assert seen == [(key, True), (key, False)]
            # A late answer to our own write must not restore a deleted object in the cache.
            informer.observe(made)
            assert key not in informer.items
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _until(holds: Callable[[], bool]) -> None:
    async def look() -> bool:
        return holds()

    await becomes(look, bool)


def test_settings_of_the_harness_differ_from_production_in_times_only() -> None:
    from tests.cluster.harness import QUICK

    from busbar.operator.settings import Settings

    changed = {f for f, v in vars(QUICK).items() if v != getattr(Settings(), f)}
    assert all(
        f.endswith(("_s", "_port", "_burst"))
        or f in {"namespace", "workload_key", "workloads_image", "internal_host", "forecast_cpu_share"}
        for f in changed
    )
    assert replace(QUICK) == QUICK
