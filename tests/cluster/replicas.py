"""Replicas of the operator as in its Deployment: a process each, a pod each, and a fault proxy of its own.

The pods exist in the API server and run nowhere; the processes are real. What each of them writes is seen at its proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from tests.cluster.harness import Cluster
from tests.cluster.operator_process import COMMAND, environment
from tests.cluster.proxy import FaultProxy
from tests.cluster.tenancy import becomes
from tests.free_port import free_port

from busbar.kube.client import Object
from busbar.kube.resources import LEASES, PODS
from busbar.kube.types.meta import LABEL_LEADER

LEASE_S = 3.0
_numbers = itertools.count(1)


@dataclass
class Replica:
    """One process; ``start`` makes another one of the same pod where it has ended."""

    cluster: Cluster
    folder: Path
    lease_s: float = LEASE_S
    name: str = field(default_factory=lambda: f"busbar-operator-{next(_numbers)}")
    port: int = field(default_factory=free_port)
    """Of metrics and probes."""
    internal: int = field(default_factory=free_port)
    home: str = ""
    """Its namespace, where its pod is there already; else one is made in `home(cluster)`."""

    async def __aenter__(self) -> Replica:
        self.folder = self.folder / self.name
        self.folder.mkdir(parents=True)
        server = self.cluster.server
        self.proxy = FaultProxy(server.url, server.ca_file)
        await self.proxy.__aenter__()
        config = self.folder / "kubeconfig"
        config.write_text(server.kubeconfig().read_text().replace(server.url, self.proxy.url))
        self._env = environment(config, self.folder) | {
            "POD_NAMESPACE": self.home or home(self.cluster),
            "POD_NAME": self.name,
            "POD_UID": self.name,
            "BUSBAR_OPERATOR_METRICS_PORT": str(self.port),
            "BUSBAR_OPERATOR_INTERNAL_PORT": str(self.internal),
            "BUSBAR_OPERATOR_LEASE_DURATION_S": str(self.lease_s),
        }
        if not self.home:
            await self.cluster.client.create(PODS, operator_pod(self.name), home(self.cluster))
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        await self.proxy.__aexit__(None, None, None)

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(COMMAND, env=self._env, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def ask(self, path: str, port: int = 0) -> tuple[int, str]:
        """Status and body; 0 where nobody answers."""
        url = f"http://127.0.0.1:{port or self.port}{path}"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return response.status, await response.text()
        except aiohttp.ClientError:
            return 0, ""

    async def leads(self) -> bool:
        return "busbar_lease_held 1.0" in (await self.ask("/metrics"))[1]

    async def is_ready(self) -> bool:
        return (await self.ask("/ready"))[0] == 200 and (await self.ask("/healthz"))[0] == 200

    async def to_lead(self) -> None:
        """Waits until it leads and its pod alone has the label."""
        await becomes(self.leads, bool)
        await becomes(lambda: labelled(self.cluster), lambda names: names == [self.name])


def home(cluster: Cluster) -> str:
    """The platform's namespace."""
    return f"{cluster.namespace}-system"


def operator_pod(name: str) -> Object:
    """A pod that nobody runs."""
    return {
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "operator", "image": "busbar-platform"}]},
    }


async def labelled(cluster: Cluster, namespace: str = "") -> list[str]:
    """The pods that the operator's Service would select."""
    items, _ = await cluster.client.list(
        PODS, namespace or home(cluster), label_selector=f"{LABEL_LEADER}=true"
    )
    return [pod["metadata"]["name"] for pod in items]


async def holder(cluster: Cluster) -> str:
    lease = await cluster.client.get(LEASES, "busbar-operator", home(cluster))
    return str(lease["spec"]["holderIdentity"])


@contextlib.asynccontextmanager
async def two(
    cluster: Cluster, folder: Path, lease_s: float = LEASE_S
) -> AsyncIterator[tuple[Replica, Replica]]:
    """The one that leads, and the one that stands by."""
    await asyncio.to_thread(cluster.server.make_namespace, home(cluster))
    async with Replica(cluster, folder, lease_s) as first:
        await first.to_lead()
        async with Replica(cluster, folder, lease_s) as second:
            await becomes(second.is_ready, bool)
            yield first, second


def admissions(replica: Replica) -> list[str]:
    """The jobs that it has admitted, as often as the server took it."""
    return [
        write.path.split("/")[-2]
        for write in replica.proxy.writes
        if write.status == 200
        and write.path.endswith("/status")
        and "/trainingjobs/" in write.path
        and ((write.body.get("status") or {}).get("admission") or {}).get("id")
    ]


def nothing_doubled(cluster: Cluster, *replicas: Replica) -> None:
    """No job was admitted twice, and none has two pods."""
    admitted = [job for replica in replicas for job in admissions(replica)]
    assert len(admitted) == len(set(admitted)), admitted
    pods = [
        pod for pod in cluster.kubelet.created.values() if not pod.partition("/")[2].startswith("busbar-")
    ]
    assert len(pods) == len(set(pods)), pods
    assert len(pods) <= len(admitted), (pods, admitted)
