"""A cluster for the operator's tests: API server, nodes, a pool, a tenant, a simulated kubelet, and the operator.

The operator runs in this process as a task, through the fault proxy; ``kill`` ends it as SIGKILL would, because the
proxy then forwards none of its requests. Settings are the production ones with shorter times.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from tests.cluster.apiserver import ApiServer
from tests.cluster.kubelet import Kubelet, Script, add_node
from tests.cluster.proxy import FaultProxy
from tests.cluster.rights import SYSTEM

from busbar.kube.client import KubeClient, Object
from busbar.kube.errors import NotFound
from busbar.kube.login import Login
from busbar.kube.resources import (
    ACCELERATOR_POOLS,
    EVENTS,
    MODEL_SERVICES,
    PERFORMANCE_PROFILES,
    PODS,
    POWER_DOMAINS,
    SERVICES,
    TENANTS,
    TRAINING_JOBS,
    Resource,
)
from busbar.operator.app import Operator, lead
from busbar.operator.serving import series_store
from busbar.operator.settings import Settings
from busbar.scheduler import Policy

PATIENCE_S = 60.0
"""For what takes a second or two; long enough for a busy machine."""
_numbers = itertools.count(1)
_MANIFESTS: dict[str, Resource] = {
    r.kind: r
    for r in (
        TRAINING_JOBS,
        MODEL_SERVICES,
        ACCELERATOR_POOLS,
        TENANTS,
        PERFORMANCE_PROFILES,
        POWER_DOMAINS,
        PODS,
    )
}

QUICK = Settings(
    namespace="default",
    workload_key=b"0123456789abcdef0123456789abcdef",
    workloads_image="registry.test/busbar-workloads:1",
    internal_host="127.0.0.1",
    internal_port=0,
    metrics_port=0,
    lease_duration_s=20.0,  # operator, proxy and test share a process: a busy machine must not cost the lease
    round_debounce_s=0.01,
    round_period_s=1.0,
    round_check_s=0.2,
    explain_period_s=0.5,
    start_told_s=0.0,
    count_period_s=0.0,
    forecast_cpu_share=0.5,
    refused_again_s=0.5,
    poll_period_s=0.1,
    progress_period_s=0.3,
    profile_period_s=0.3,
    explore_period_s=1.0,
    backoff_base_s=0.1,
    preempt_hold_s=0.2,
    drain_settle_s=0.05,
    orphan_grace_s=0.1,  # no garbage collector runs here
    events_per_s=1000.0,
    events_burst=1000,
)


def clear(server: ApiServer) -> None:
    """Removes the objects of earlier tests, the lease included, so that each test plans on its own cluster."""
    background = {"propagationPolicy": "Background"}
    for path in (
        "/apis/busbar.dev/v1alpha1/acceleratorpools",
        "/apis/busbar.dev/v1alpha1/tenants",
        "/apis/busbar.dev/v1alpha1/performanceprofiles",
        "/apis/busbar.dev/v1alpha1/powerdomains",
        "/api/v1/nodes",
        *(
            path
            for home in ("default", SYSTEM)
            for path in (
                f"/apis/coordination.k8s.io/v1/namespaces/{home}/leases/busbar-operator",
                f"/api/v1/namespaces/{home}/configmaps/busbar-energy",
                f"/api/v1/namespaces/{home}/configmaps/busbar-services",
                *(f"/api/v1/namespaces/{home}/configmaps/{name}" for name in series_store.NAMES),
            )
        ),
    ):
        server.admin.request("DELETE", path, background)
    for path in ("/apis/busbar.dev/v1alpha1/trainingjobs", "/apis/busbar.dev/v1alpha1/modelservices"):
        for item in server.admin.get(path).expect()["items"]:
            server.admin.request(
                "DELETE", f"{_collection(path, item)}/{item['metadata']['name']}", background
            )
    for item in server.admin.get("/api/v1/pods").expect()["items"]:
        path = f"/api/v1/namespaces/{item['metadata']['namespace']}/pods/{item['metadata']['name']}"
        server.admin.request("DELETE", path, {"gracePeriodSeconds": 0})


def _collection(path: str, item: Object) -> str:
    root, _, plural = path.rpartition("/")
    return f"{root}/namespaces/{item['metadata']['namespace']}/{plural}"


@dataclass
class Cluster:
    """One test's cluster. Use ``async with Cluster(server) as cluster``."""

    server: ApiServer
    script: Callable[[Object], Script] = lambda pod: Script(run_s=0.0)
    settings: Settings = QUICK
    nodes: int = 1
    cpu: str = "8"
    unit: str = "1"
    namespace: str = field(default_factory=lambda: f"op-{next(_numbers)}")
    operator: Operator | None = None
    _all: list[Operator] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Cluster:
        await asyncio.to_thread(self._prepare)
        self.proxy = FaultProxy(self.server.url, self.server.ca_file)
        await self.proxy.__aenter__()
        self.login = Login(server=self.proxy.url, token=self.server.admin_token)
        direct = Login(
            server=self.server.url, ca_pem=self.server.ca_file.read_text(), token=self.server.admin_token
        )
        self.client = KubeClient(direct)
        self.kubelet = Kubelet(self.client, self.script)
        self._kubelet = asyncio.create_task(self.kubelet.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await _ended(self._kubelet)
        await self.kubelet.close()
        await self.client.close()
        for operator in self._all:  # Kopf leaves a connection open if its server ends before it does
            await asyncio.to_thread(operator.shell.join, 10)
        await self.proxy.__aexit__(None, None, None)
        # TLS connections close a few iterations of the event loop after their session.
        await asyncio.sleep(0.05)
        gc.collect()  # warnings about half-open sockets appear here, not in a later test

    def _prepare(self) -> None:
        clear(self.server)
        self.server.make_namespace(self.namespace)
        self.server.make_claim(self.namespace)
        for i in range(self.nodes):
            add_node(self.server, f"{self.namespace}-node-{i}", labels={"pool": self.namespace}, cpu=self.cpu)
        pool = {
            "apiVersion": "busbar.dev/v1alpha1",
            "kind": "AcceleratorPool",
            "metadata": {"name": self.namespace},
            "spec": {
                "accelerator": "cpu",
                "resourceName": "cpu",
                "nodeSelector": {"pool": self.namespace},
                "pricePerHour": 3.6,
                "unit": self.unit,
            },
        }
        tenant = {
            "apiVersion": "busbar.dev/v1alpha1",
            "kind": "Tenant",
            "metadata": {"name": f"tenant-{self.namespace}"},
            "spec": {"namespaces": [self.namespace]},
        }
        self.server.admin.create(pool).expect()
        self.server.admin.create(tenant).expect()

    # -- the operator ----------------------------------------------------------------------------------

    async def start(self, policy: Policy | None = None, **changes: Any) -> Operator:
        """Starts an operator; it has the last one's pod name unless ``identity`` gives another.

        Where another process takes its lease, ``operator`` is a new one that stands by, as in ``busbar.operator.app.lead``.
        """
        first = Operator(self.login, replace(self.settings, **changes), policy)
        waiting = [first]

        def make() -> Operator:
            self.operator = waiting.pop() if waiting else Operator(self.login, first.settings, policy)
            self._all.append(self.operator)
            return self.operator

        self.operator = first
        self._task = asyncio.create_task(lead(make))
        return first

    async def kill(self) -> None:
        """Ends it at once; call after ``proxy.killed``, or it may still write during its shutdown."""
        if self._task is not None:
            assert self.operator is not None
            self.operator.lease.drop()  # a killed process does not release its lease
            await _ended(self._task)
            self._task = None

    async def stop(self) -> None:
        await self.kill()

    def raise_if_ended(self) -> None:
        """The operator's own error, if it has ended."""
        if self._task is not None and self._task.done():
            self._task.result()
            raise AssertionError("the operator ended")

    # -- objects ---------------------------------------------------------------------------------------

    async def create(self, manifest: Object) -> Object:
        resource = _MANIFESTS[manifest["kind"]]
        manifest = {"apiVersion": resource.api_version, **manifest}
        return await self.client.create(resource, manifest, self.namespace if resource.namespaced else None)

    async def get(self, resource: Resource, name: str) -> Object:
        return await self.client.get(resource, name, self.namespace if resource.namespaced else None)

    async def status(self, resource: Resource, name: str) -> dict[str, Any]:
        try:
            return (await self.get(resource, name)).get("status") or {}
        except NotFound:
            return {}

    async def pods(self) -> dict[str, Object]:
        items, _ = await self.client.list(PODS, self.namespace)
        return {p["metadata"]["name"]: p for p in items}

    async def services(self) -> list[str]:
        items, _ = await self.client.list(SERVICES, self.namespace)
        return [s["metadata"]["name"] for s in items]

    async def events(self) -> list[Object]:
        items, _ = await self.client.list(EVENTS, self.namespace)
        return items

    async def until(
        self,
        resource: Resource,
        name: str,
        holds: Callable[[dict[str, Any]], bool],
        timeout_s: float = PATIENCE_S,
    ) -> dict[str, Any]:
        """Waits until the object's status is as wanted; AssertionError shows the last one."""
        end = asyncio.get_running_loop().time() + timeout_s
        last: dict[str, Any] = {}
        while asyncio.get_running_loop().time() < end:
            last = await self.status(resource, name)
            if holds(last):
                return last
            if not self.proxy.killed.is_set():
                self.raise_if_ended()
            await asyncio.sleep(0.02)
        raise AssertionError(f"{resource.kind} {name} after {timeout_s} s: {last}")


class _AsScheduler:
    """A client for the simulated scheduler and kubelet: only the scheduler may bind pods here."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self.admin_token = server.scheduler_token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


@contextlib.asynccontextmanager
async def with_the_charts_rights(
    platform: ApiServer, settings: Settings = QUICK, **options: Any
) -> AsyncIterator[Cluster]:
    """A cluster whose operator has its own service account's rights and no others; it is not started."""
    token = await asyncio.to_thread(platform.service_account_token, SYSTEM, "busbar-operator")
    settings = replace(settings, namespace=SYSTEM)
    async with Cluster(cast(ApiServer, _AsScheduler(platform)), settings=settings, **options) as made:
        made.login = Login(server=made.proxy.url, token=token)
        yield made


async def _ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception, BaseExceptionGroup):
        await task


def engine_job(name: str, **spec: Any) -> Object:
    """A small TrainingJob with our engine."""
    return {
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "engine": {
                "model": {"config": {"model_type": "llama"}},
                "tokenizer": {"train": {"vocabSize": 512}},
                "data": {"uri": "builtin://python-stdlib"},
                "steps": 10,
            },
            "output": {"uri": "pvc://claim/model"},
            **spec,
        },
    }


def gang_job(name: str, pods: int, **spec: Any) -> Object:
    """A gang with an own image."""
    return {
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "template": {"image": "registry.test/own:1", "command": ["true"]},
            "shape": {"minPods": pods, "maxPods": pods},
            **spec,
        },
    }


logging.getLogger("kopf").setLevel(logging.ERROR)
