"""A job or service that is deleted at any moment leaves nothing behind: the real garbage collector removes
everything."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.errors import NotFound
from busbar.kube.informer import Key
from busbar.kube.resources import MODEL_SERVICES, PODS, SERVICES, TRAINING_JOBS, Resource
from busbar.local.build import binary
from busbar.operator.settings import Settings


@pytest.fixture(scope="module")
def collector(apiserver: ApiServer) -> Iterator[None]:
    """kube-controller-manager with the garbage collector only."""
    command = [
        str(binary("kube-controller-manager")),
        f"--kubeconfig={apiserver.kubeconfig()}",
        "--controllers=garbage-collector-controller",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        "--secure-port=0",
        "--v=0",
    ]
    log = apiserver.directory / "garbage-collector.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    yield
    assert process.poll() is None, log.read_text(errors="replace")[-2000:]
    process.kill()
    process.wait()


async def nothing_is_left(cluster: Cluster) -> None:
    async def left() -> list[str]:
        found: list[str] = []
        for resource in (TRAINING_JOBS, MODEL_SERVICES, PODS, SERVICES):
            items, _ = await cluster.client.list(resource, cluster.namespace)
            found += [f"{resource.kind}/{i['metadata']['name']}" for i in items]
        return found

    await becomes(left, lambda names: names == [])


def suspended(cluster: Cluster) -> Any:
    return cluster.client.patch(TRAINING_JOBS, "gang", {"spec": {"suspend": True}}, cluster.namespace)


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("phase", ["Admitted", "Starting", "Running", "Preempting", "Succeeded"])
async def test_a_job_that_is_deleted_leaves_nothing(apiserver: ApiServer, phase: str) -> None:
    def script(pod: Object) -> Script:
        return Script(run_s=0.1 if phase == "Succeeded" else None)

    async with Cluster(apiserver, script=script) as cluster:
        await cluster.start()
        await cluster.create(gang_job("gang", 2))
        if phase == "Preempting":
            await cluster.until(TRAINING_JOBS, "gang", lambda s: s.get("phase") == "Running")
            await suspended(cluster)
        reached: Callable[[dict[str, Any]], bool] = lambda s: s.get("phase") == phase or _past(s, phase)  # noqa: E731
        await cluster.until(TRAINING_JOBS, "gang", reached)
        await _delete(cluster, TRAINING_JOBS, "gang")
        await nothing_is_left(cluster)


@pytest.mark.usefixtures("collector")
async def test_a_service_that_is_deleted_while_it_scales_leaves_nothing(apiserver: ApiServer) -> None:
    def script(pod: Object) -> Script:
        return Script(status=lambda s: {"kind": "serving", "ready": True})

    async with Cluster(apiserver, script=script) as cluster:
        await cluster.start()
        spec = {"model": {"uri": "pvc://claim/model"}, "replicas": 3}
        await cluster.create({"kind": "ModelService", "metadata": {"name": "web"}, "spec": spec})
        await cluster.until(MODEL_SERVICES, "web", lambda s: (s.get("replicas") or 0) >= 1)
        await _delete(cluster, MODEL_SERVICES, "web")
        await nothing_is_left(cluster)


async def test_a_pod_that_goes_with_its_job_is_not_made_again(
    apiserver: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch of jobs is late and the workers are busy: the pod's end is seen while the job still seems to be there."""
    monkeypatch.setattr("busbar.operator.app.EARLY_RESYNCS_S", ())
    async with Cluster(apiserver) as cluster:
        operator = await cluster.start(start_told_s=Settings().start_told_s)
        await becomes(lambda: _value(cluster.proxy.watches("/trainingjobs")), bool)
        cluster.kubelet.skips = lambda pod: True  # it does not start
        await cluster.create(gang_job("gone", 1))
        job, pod = Key(cluster.namespace, "gone"), Key(cluster.namespace, "gone-1-0")
        await becomes(lambda: _value(pod in operator.caches.pods.items), bool)
        cluster.proxy.stall_watches("/trainingjobs")
        operator.controller.pause()
        await _delete(cluster, TRAINING_JOBS, "gone")
        await _collect(cluster, "gone-1-0")
        await becomes(lambda: _value(pod in operator.caches.pods.items), lambda is_there: not is_there)
        assert job in operator.caches.jobs.items
        operator.controller.resume()
        # It learns that the job is gone from the answer to its own write.
        await becomes(
            lambda: _value(job not in operator.caches.jobs.items or len(cluster.kubelet.created) > 1), bool
        )
        assert list(cluster.kubelet.created.values()) == [str(pod)]


async def test_a_replica_that_goes_with_its_service_is_not_made_again(
    apiserver: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for a service: its status, which counts its replicas, is written before a pod is made, and is refused."""
    monkeypatch.setattr("busbar.operator.app.EARLY_RESYNCS_S", ())
    async with Cluster(apiserver) as cluster:
        operator = await cluster.start()
        await becomes(lambda: _value(cluster.proxy.watches("/modelservices")), bool)
        cluster.kubelet.skips = lambda pod: True  # it does not start
        spec = {"model": {"uri": "pvc://claim/model"}, "replicas": 1}
        await cluster.create({"kind": "ModelService", "metadata": {"name": "gone"}, "spec": spec})
        service, pod = Key(cluster.namespace, "gone"), Key(cluster.namespace, "gone-0")
        await becomes(lambda: _value(pod in operator.caches.pods.items), bool)
        cluster.proxy.stall_watches("/modelservices")
        await _delete(cluster, MODEL_SERVICES, "gone")
        await _collect(cluster, "gone-0")
        services = operator.caches.services.items
        await becomes(lambda: _value(service not in services or len(cluster.kubelet.created) > 1), bool)
        assert list(cluster.kubelet.created.values()) == [str(pod)]


async def _value(value: Any) -> Any:
    return value


async def _delete(cluster: Cluster, resource: Resource, name: str) -> None:
    await cluster.client.delete(resource, name, cluster.namespace)


async def _collect(cluster: Cluster, pod: str) -> None:
    """Deletes it as the garbage collector does, which may still run and be first."""
    with contextlib.suppress(NotFound):
        await _delete(cluster, PODS, pod)


def _past(status: dict[str, Any], phase: str) -> bool:
    """Phases are short: a later phase also proves that the wanted one was reached."""
    order = ["Admitted", "Starting", "Running", "Preempting", "Suspended"]
    now = status.get("phase")
    return phase in order and now in order and order.index(str(now)) > order.index(phase)
