"""The chart's two operators are replaced one after the other while jobs come and go: real controllers, real processes.

Kubernetes' own controllers make the pods of the chart's Deployment and the endpoints of its Service; for each pod a
process of the operator runs, ready when it says so, stopped as the kubelet stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.apiserver import ApiServer, render_chart
from tests.cluster.harness import Cluster
from tests.cluster.kubelet import Script
from tests.cluster.replicas import LEASE_S, Replica, labelled, nothing_doubled
from tests.cluster.rights import SYSTEM
from tests.cluster.tenancy import becomes
from tests.cluster.test_operator_overload import one_pod, phases, reach

from busbar.kube.client import Object
from busbar.kube.errors import ApiError
from busbar.kube.resources import PODS
from busbar.local.build import binary

pytestmark = pytest.mark.apiserver
CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
)
DEPLOYMENT = f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/busbar-operator"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM}/endpointslices"
OPERATORS = "app.kubernetes.io/component=operator"


@pytest.fixture
def kubernetes() -> Iterator[ApiServer]:
    """An API server with the controllers that the chart's objects of the operator need."""
    with ApiServer.start() as server:
        server.install_crds()
        server.make_namespace(SYSTEM)
        command = [
            str(binary("kube-controller-manager")), f"--kubeconfig={server.kubeconfig()}", "--leader-elect=false",
            f"--controllers={','.join(CONTROLLERS)}", "--bind-address=127.0.0.1", "--secure-port=0",
        ]  # fmt: skip
        with (server.directory / "kube-controller-manager.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        yield server
        process.kill()
        process.wait()


@dataclass
class Runner:
    """A kubelet for the operator's pods."""

    cluster: Cluster
    folder: Path
    everybody: list[Replica] = field(default_factory=list)
    _running: dict[str, Replica] = field(default_factory=dict)
    _open: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @contextlib.asynccontextmanager
    async def runs(self) -> AsyncIterator[None]:
        async with self._open:
            task = asyncio.create_task(self._run())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            found, _ = await self.cluster.client.list(PODS, SYSTEM, label_selector=OPERATORS)
            for pod in found:
                with contextlib.suppress(ApiError):
                    await self._step(pod)
            await asyncio.sleep(0.1)

    async def _step(self, pod: Object) -> None:
        name, client = pod["metadata"]["name"], self.cluster.client
        if not pod["spec"].get("nodeName"):
            target = {"apiVersion": "v1", "kind": "Node", "name": f"{self.cluster.namespace}-node-0"}
            await client.create(
                PODS, {"metadata": {"name": name}, "target": target}, SYSTEM, subresource="binding"
            )
            return
        replica = self._running.get(name)
        if replica is None:
            replica = Replica(self.cluster, self.folder, LEASE_S, name=name, home=SYSTEM)
            self._running[name] = await self._open.enter_async_context(replica)
            self.everybody.append(replica)
        if pod["metadata"].get("deletionTimestamp"):
            replica.process.send_signal(signal.SIGTERM)
            if replica.process.poll() is not None:
                await client.delete(PODS, name, SYSTEM, grace_s=0)
            return
        ready = await replica.is_ready()
        conditions = (pod.get("status") or {}).get("conditions") or []
        if ready is not any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
            await self._tell(name, ready)

    async def _tell(self, name: str, ready: bool) -> None:
        address = f"10.0.0.{next(self._numbers)}"
        since = "2026-01-01T00:00:00Z"
        state = {"type": "Ready", "status": str(ready), "lastTransitionTime": since}
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [state]}
        await self.cluster.client.patch(PODS, name, {"status": status}, SYSTEM, subresource="status")


def install(server: ApiServer) -> None:
    """What the chart says of two operators, without its rights and policies."""
    for document in render_chart("busbar", "--set", "operator.replicas=2"):
        kind, name = document["kind"], document["metadata"]["name"]
        if name == "busbar-operator" and kind in ("ServiceAccount", "PriorityClass", "Service", "Deployment"):
            server.admin.apply(document).expect()


async def endpoints(cluster: Cluster) -> list[str]:
    """The pods to which the operator's Service leads now."""
    found = cluster.server.admin.get(
        SLICES, labelSelector="kubernetes.io/service-name=busbar-operator"
    ).expect()
    return sorted(
        endpoint["targetRef"]["name"]
        for one in found["items"]
        for endpoint in one.get("endpoints") or ()
        if endpoint["conditions"].get("ready")
    )


async def rolled_out(cluster: Cluster) -> bool:
    """As `kubectl rollout status` sees it."""
    found = cluster.server.admin.get(DEPLOYMENT).expect()
    status: dict[str, Any] = found.get("status") or {}
    counts = [status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    return status.get("observedGeneration") == found["metadata"]["generation"] and counts == [2, 2, 2]


async def test_two_operators_are_upgraded_under_load_and_the_service_follows_the_leader(
    kubernetes: ApiServer, tmp_path: Path
) -> None:
    async with Cluster(kubernetes, script=lambda pod: Script(run_s=0.2), cpu="4") as cluster:
        cluster.kubelet.skips = lambda pod: pod["metadata"]["namespace"] == SYSTEM
        runner = Runner(cluster, tmp_path)
        install(kubernetes)
        async with runner.runs():
            await becomes(lambda: rolled_out(cluster), bool)
            await becomes(lambda: endpoints(cluster), lambda names: len(names) == 1)
            assert await endpoints(cluster) == await labelled(cluster, SYSTEM)
            before = {replica.name for replica in runner.everybody}
            assert len(before) == 2

            kubernetes.admin.request(
                "PATCH",
                DEPLOYMENT,
                {"spec": {"template": {"metadata": {"annotations": {"version": "next"}}}}},
                content_type="application/merge-patch+json",
            ).expect()
            for number in itertools.count():
                await cluster.create(one_pod(f"j{number:03d}"))
                await asyncio.sleep(0)
                if await rolled_out(cluster) and not before & set(await endpoints(cluster)):
                    break
                await becomes(lambda: _waiting(cluster), lambda count: count < 8)
            [leader] = await becomes(lambda: endpoints(cluster), lambda names: len(names) == 1)
            assert leader not in before
            assert [leader] == await labelled(cluster, SYSTEM)
            await reach(cluster, Succeeded=number + 1)
            nothing_doubled(cluster, *runner.everybody)
            assert len(runner.everybody) == 4


async def _waiting(cluster: Cluster) -> int:
    found = await phases(cluster)
    return found["New"] + found["Queued"]
