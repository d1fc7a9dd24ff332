"""The parts around the operator that `queues.py` starts and measures: CPU seconds and peak memory of each.

Real etcd, kube-apiserver and kube-scheduler, and kube-controller-manager with the controller of ``batch/v1`` Jobs where a
row has them; KWOK plays the nodes' kubelets, without a start-up delay.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml
from benchmarks.control.given_cluster import GivenCluster
from tests.cluster.apiserver import ApiServer, render_chart
from tests.cluster.rights import SYSTEM, wait_for_bindings

from busbar.local.build import binary
from busbar.local.simulated import stages

ROOT_GROUP = ["system:masters"]
WORKLOADS = ("Deployment", "DaemonSet", "StatefulSet", "Job", "PersistentVolumeClaim")


@dataclass(frozen=True)
class Used:
    """What processes have used."""

    cpu_s: float
    peak_mib: float


def used(pids: list[int]) -> Used:
    """CPU time and the sum of the peaks of memory; a process that has ended counts as nothing."""
    cpu_s = peak_mib = 0.0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        except OSError:
            continue
        cpu_s += sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")
        peak_mib += int(peak.group(1)) / 1024 if peak is not None else 0.0
    return Used(cpu_s, peak_mib)


def busy_s() -> float:
    """CPU seconds that the whole machine has used."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = [int(field) for field in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def instant_stages() -> str:
    """KWOK's stages as in `busbar up`, but pods start at once."""
    made = [json.loads(document) for document in stages().split("\n---\n")]
    for stage in made:
        if stage["metadata"]["name"] == "pod-starts":
            del stage["spec"]["delay"]
    return "\n---\n".join(json.dumps(stage) for stage in made)


class Parts:
    """kube-scheduler and KWOK beside an API server, and the controller of Jobs where that is asked for; beside a cluster
    that was given, KWOK alone.

    Each acts under its usual name, because the chart's policies say who may bind pods and write their status.
    """

    def __init__(self, server: ApiServer, *, jobs: bool) -> None:
        self._server = server
        whole = not isinstance(server, GivenCluster)
        folder = server.directory
        config = folder / "stages.yaml"
        config.write_text(instant_stages())
        speed = ["--kube-api-qps=500", "--kube-api-burst=500", "--leader-elect=false"]
        quiet = ["--bind-address=127.0.0.1", "--secure-port=0", "--profiling=false"]
        who = {
            "kube-scheduler": ("system:kube-scheduler", ROOT_GROUP),
            "kwok": ("system:node:kwok", ["system:nodes", *ROOT_GROUP]),
            "kube-controller-manager": ("system:kube-controller-manager", ROOT_GROUP),
        }
        flags = {
            "kube-scheduler": [*speed, *quiet],
            "kwok": [f"--config={config}", "--cidr=10.128.0.0/14", "--node-ip=192.0.2.2",
                     "--manage-nodes-with-label-selector=type=kwok", "--node-lease-duration-seconds=200",
                     "--server-address=127.0.0.1:0"],
        }  # fmt: skip
        if not whole:
            del flags["kube-scheduler"]
        elif jobs:
            flags["kube-controller-manager"] = [
                *speed, *quiet[:2], "--controllers=job-controller", "--concurrent-job-syncs=20",
            ]  # fmt: skip
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        for name, more in flags.items():
            kubeconfig = server.kubeconfig(*who[name])
            with (folder / f"{name}.log").open("wb") as log:
                self._children[name] = subprocess.Popen(
                    [str(binary(name)), f"--kubeconfig={kubeconfig}", *more], stdout=log, stderr=log
                )

    def used(self) -> dict[str, Used]:
        """By part that runs here, this script included, which submits and watches."""
        own = (process.pid for process in self._server._processes)
        pids = {**dict(zip(("etcd", "kube-apiserver"), own, strict=False)), "client": os.getpid()}
        pids |= {name: child.pid for name, child in self._children.items()}
        return {name: used([pid]) for name, pid in pids.items()}

    def stop(self) -> None:
        for child in self._children.values():
            child.kill()
            child.wait()


def install_chart(server: ApiServer) -> Path:
    """Installs the whole chart, with its rights and policies (in a cluster that was given, without what would run there);
    a kubeconfig of the operator's service account."""
    server.make_namespace(SYSTEM)
    documents = render_chart("busbar")
    if isinstance(server, GivenCluster):
        documents = [one for one in documents if one["kind"] not in WORKLOADS]
        server.install(documents)
    else:
        for document in documents:
            server.admin.apply(document).expect()
    wait_for_bindings(server, documents)
    config = yaml.safe_load(server.kubeconfig().read_text())
    for user in config["users"]:
        user["user"] = {"token": server.service_account_token(SYSTEM, "busbar-operator")}
    path = server.directory / "kubeconfig-operator"
    path.write_text(yaml.safe_dump(config))
    return path
