"""Whole lives of many jobs on a real control plane: time to the last end, the operator's CPU time, writes per job.

    python benchmarks/control/queues.py [ROW ...] [--scale 1.0] [--output FILE]

    fit      500 one-pod jobs of 30 s that all fit, on 200 nodes of 4
    tenants  1,000 jobs of 20 s of ten tenants with guarantees, on 200 places (ideal: 100 s)
    gangs    20 gangs of 50 pods of 30 s, on 250 nodes of 4
    idle     500 jobs that run and of which nothing is to be done, for three minutes
    floor    500 bare pods of 30 s, made by a plain loop: what Kubernetes itself takes

Real etcd, kube-apiserver and kube-scheduler; KWOK plays the nodes' kubelets, without a start-up delay; the operator is
a process of its own with production settings. The rows and their bars are those that were measured beside Kueue on two
cores; Kueue itself is not run here. Everything shares the machine, so the CPU time that others took meanwhile is
reported: repeat a row that was disturbed. Writes are counted by the API server and include those of the client that
submits, of the kubelet and of the scheduler; leases and events are reported apart. A row that misses its bar stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.control.operator_process import Process, writes
from tests.cluster.apiserver import ApiServer

from busbar.kube.client import KubeClient, Object
from busbar.kube.informer import Informer, Key
from busbar.kube.login import Login
from busbar.kube.resources import NODES, PODS, TRAINING_JOBS
from busbar.local.build import binary
from busbar.local.simulated import DURATION, TAINT, stages

ROOT = Path(__file__).resolve().parent.parent.parent
APART = ("leases", "events")
GPU = "nvidia.com/gpu"
SUBMITTING = 8
"""Requests of the client that submits, at a time."""
ENDED = ("Succeeded", "Failed")
LIMIT_S = 900.0


@dataclass(frozen=True)
class Row:
    """One situation."""

    name: str
    jobs: int
    pods: int
    """Of one job."""
    seconds: float | None
    """How long a pod runs; None: until it is deleted."""
    nodes: int
    per_node: int
    tenants: int = 1
    guaranteed: int = 0
    """Accelerators of each tenant."""
    bare: bool = False
    bars: dict[str, float] = field(default_factory=dict)


ROWS = (
    Row("fit", 500, 1, 30, 200, 4, bars={"all_ended_s": 80, "cpu_ms_per_job": 12, "writes_per_job": 9}),
    Row(
        "tenants", 1000, 1, 20, 50, 4, tenants=10, guaranteed=20,
        bars={"all_ended_s": 170, "cpu_ms_per_job": 20, "writes_per_job": 11, "operator_peak_mib": 140},
    ),
    Row(
        "gangs", 20, 50, 30, 250, 4,
        bars={"last_running_s": 22, "all_ended_s": 58, "cpu_ms_per_pod": 5, "writes_per_pod": 5.2},
    ),
    Row("idle", 500, 1, None, 200, 4, bars={"idle_cpu_percent": 2, "idle_calls_per_s": 3}),
    Row("floor", 500, 1, 30, 200, 4, bare=True),
)  # fmt: skip


def scaled(row: Row, scale: float) -> Row:
    """A smaller cluster with fewer jobs; its bars are left out."""
    if scale == 1.0:
        return row
    jobs, nodes = max(1, round(row.jobs * scale)), max(1, round(row.nodes * scale))
    held = round(row.guaranteed * scale)
    return Row(row.name, jobs, row.pods, row.seconds, nodes, row.per_node, row.tenants, held, row.bare)


def instant_stages() -> str:
    """KWOK's stages as in `busbar up`, but pods start at once."""
    made = [json.loads(document) for document in stages().split("\n---\n")]
    for stage in made:
        if stage["metadata"]["name"] == "pod-starts":
            del stage["spec"]["delay"]
    return "\n---\n".join(json.dumps(stage) for stage in made)


class Nodes:
    """kube-scheduler and KWOK beside an API server."""

    def __init__(self, server: ApiServer) -> None:
        folder, kubeconfig = server.directory, str(server.kubeconfig())
        config = folder / "stages.yaml"
        config.write_text(instant_stages())
        scheduler = [str(binary("kube-scheduler")), f"--kubeconfig={kubeconfig}", "--leader-elect=false",
                     "--bind-address=127.0.0.1", "--secure-port=0", "--profiling=false",
                     "--kube-api-qps=500", "--kube-api-burst=500"]  # fmt: skip
        kwok = [str(binary("kwok")), f"--kubeconfig={kubeconfig}", f"--config={config}", "--cidr=10.128.0.0/14",
                "--manage-nodes-with-label-selector=type=kwok", "--node-ip=192.0.2.2",
                "--node-lease-duration-seconds=200", "--server-address=127.0.0.1:0"]  # fmt: skip
        self._children = [
            subprocess.Popen(command, stdout=log, stderr=log)
            for command, name in ((scheduler, "kube-scheduler"), (kwok, "kwok"))
            for log in [(folder / f"{name}.log").open("wb")]
        ]

    def stop(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()


def node(number: int, per_node: int) -> Object:
    name = f"node-{number:04d}"
    labels = {"type": "kwok", "kubernetes.io/hostname": name, "nvidia.com/gpu.count": str(per_node),
              "busbar.dev/accelerator": "H100"}  # fmt: skip
    notes = {"kwok.x-k8s.io/node": "fake", "sim.busbar.dev/cpu": "64", "sim.busbar.dev/memory": "512Gi"}
    metadata = {"name": name, "labels": labels, "annotations": notes}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": [TAINT]}}


def job(number: int, row: Row) -> tuple[str, Object]:
    """A TrainingJob with its namespace."""
    notes = {DURATION: str(row.seconds)} if row.seconds is not None else {}
    template = {"image": "registry.test/own:1", "command": ["true"], "metadata": {"annotations": notes}}
    shape = {"minPods": row.pods, "maxPods": row.pods, "acceleratorsPerPod": 1, "cpu": "1", "memory": "1Gi"}
    made = {
        "apiVersion": TRAINING_JOBS.api_version, "kind": "TrainingJob", "metadata": {"name": f"job-{number:05d}"},
        "spec": {"template": template, "shape": shape},
    }  # fmt: skip
    return f"team-{number % row.tenants}", made


def bare_pod(number: int, row: Row) -> tuple[str, Object]:
    """The pod that such a job would have, made by nobody's controller."""
    size = {GPU: "1", "cpu": "1", "memory": "1Gi"}
    container = {
        "name": "main",
        "image": "registry.test/own:1",
        "resources": {"requests": size, "limits": size},
    }
    metadata = {"name": f"pod-{number:05d}", "annotations": {DURATION: str(row.seconds)}}
    spec = {"containers": [container], "tolerations": [{**TAINT, "operator": "Equal"}]}
    return "team-0", {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


class Watcher:
    """When jobs were admitted, ran and ended, in seconds since the first was submitted."""

    def __init__(self, client: KubeClient, *, bare: bool) -> None:
        resource = PODS if bare else TRAINING_JOBS
        self.informer: Informer[Object] = Informer(client, resource, lambda obj: obj, self._changed)
        self.began = time.monotonic()
        self.at: dict[str, dict[Key, float]] = {"admitted": {}, "running": {}, "ended": {}}
        self.phases: Counter[str] = Counter()

    def _changed(self, key: Key, old: Object | None, new: Object | None) -> None:
        if new is None:
            return
        status = new.get("status") or {}
        phase, now = status.get("phase", "New"), time.monotonic() - self.began
        if status.get("admission") or new["spec"].get("nodeName"):
            self.at["admitted"].setdefault(key, now)
        if phase in ("Running", *ENDED):
            self.at["running"].setdefault(key, now)
        if phase in ENDED:
            self.at["ended"].setdefault(key, now)
            self.phases[phase] += 1

    async def until(self, what: str, count: int) -> bool:
        """Whether so many did so within the limit."""
        shown = -1
        while len(self.at[what]) < count:
            if time.monotonic() - self.began > LIMIT_S:
                return False
            if len(self.at[what]) * 10 // count > shown:
                shown = len(self.at[what]) * 10 // count
                print(f"    {what}: {len(self.at[what])} of {count}", file=sys.stderr, flush=True)
            await asyncio.sleep(0.2)
        return True

    def last(self, what: str) -> float | None:
        return round(max(self.at[what].values()), 1) if self.at[what] else None


async def many(count: int, call: Callable[[int], Awaitable[Any]]) -> None:
    """Calls with 0 to count - 1, a few at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(worker() for _ in range(SUBMITTING)))


def busy_s() -> float:
    """CPU seconds that the machine has used."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    used = [int(field) for field in fields]
    return (sum(used) - used[3] - used[4]) / os.sysconf("SC_CLK_TCK")


async def measure(row: Row, source: Path) -> Object:
    # No controller manager runs here, which would take the taint "not ready" off new nodes.
    with ApiServer.start("--disable-admission-plugins=TaintNodesByCondition") as server:
        server.install_crds()
        login = Login(server=server.url, ca_pem=server.ca_file.read_text(), token=server.admin_token)
        client = KubeClient(login)
        nodes = Nodes(server)
        process: Process | None = None
        tasks: list[asyncio.Task[Any]] = []
        try:
            await _prepare(server, client, row)
            watcher = Watcher(client, bare=row.bare)
            tasks.append(asyncio.create_task(watcher.informer.run()))
            if not row.bare:
                process = Process(server.kubeconfig(), server.directory, source)
                tasks.append(asyncio.create_task(process.keep()))
                await _one_job(client, row, watcher)
            return await _story(server, client, row, watcher, process)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if process is not None:
                process.stop()
            nodes.stop()
            await client.close()


async def _prepare(server: ApiServer, client: KubeClient, row: Row) -> None:
    for number in range(row.tenants):
        server.make_namespace(f"team-{number}")
        quota = [{"accelerator": "H100", "guaranteed": row.guaranteed}] if row.guaranteed else []
        spec: Object = {"namespaces": [f"team-{number}"], **({"quota": quota} if quota else {})}
        server.admin.create(
            {
                "apiVersion": "busbar.dev/v1alpha1",
                "kind": "Tenant",
                "metadata": {"name": f"team-{number}"},
                "spec": spec,
            }
        ).expect()
    pool = {"accelerator": "H100", "resourceName": GPU, "memoryGib": 80, "tolerations": [{**TAINT, "operator": "Equal"}],
            "nodeSelector": {"busbar.dev/accelerator": "H100"}}  # fmt: skip
    server.admin.create(
        {
            "apiVersion": "busbar.dev/v1alpha1",
            "kind": "AcceleratorPool",
            "metadata": {"name": "h100"},
            "spec": pool,
        }
    ).expect()
    await many(row.nodes, lambda number: client.create(NODES, node(number, row.per_node)))
    while True:
        found, _ = await client.list(NODES)
        if all((one.get("status") or {}).get("allocatable", {}).get(GPU) for one in found):
            return
        await asyncio.sleep(0.5)


async def _one_job(client: KubeClient, row: Row, watcher: Watcher) -> None:
    """The operator has started when one job has run; it is not counted."""
    namespace, first = job(99_999, Row("first", 1, 1, 0.0, 1, 1, row.tenants))
    await client.create(TRAINING_JOBS, first, namespace)
    if not await watcher.until("ended", 1):
        raise SystemExit("the operator did not start: see its log")


async def _story(
    server: ApiServer, client: KubeClient, row: Row, watcher: Watcher, process: Process | None
) -> Object:
    for seen in watcher.at.values():
        seen.clear()
    watcher.phases.clear()
    before, used = writes(server), busy_s()
    cpu_s = _cpu(process)
    watcher.began = time.monotonic()

    async def submit(number: int) -> None:
        namespace, made = bare_pod(number, row) if row.bare else job(number, row)
        await client.create(PODS if row.bare else TRAINING_JOBS, made, namespace)

    await many(row.jobs, submit)
    submitted_s = time.monotonic() - watcher.began
    found: Object = {"row": row.name, "jobs": row.jobs, "pods": row.jobs * row.pods, "nodes": row.nodes}
    if row.seconds is None:
        await watcher.until("running", row.jobs)
        found |= await _idle(server, process)
    else:
        found["complete"] = await watcher.until("ended", row.jobs)
    wall_s = time.monotonic() - watcher.began
    made = writes(server) - before
    counted = sum(count for name, count in made.items() if name.split("/")[0] not in APART)
    own_s = _cpu(process) - cpu_s
    found |= {
        "submitted_s": round(submitted_s, 1),
        "last_admitted_s": watcher.last("admitted"),
        "last_running_s": watcher.last("running"),
        "all_ended_s": watcher.last("ended"),
        "ended": dict(watcher.phases),
        "cpu_ms_per_job": round(1000 * own_s / row.jobs, 1),
        "cpu_ms_per_pod": round(1000 * own_s / (row.jobs * row.pods), 1),
        "writes_per_job": round(counted / row.jobs, 2),
        "writes_per_pod": round(counted / (row.jobs * row.pods), 2),
        "writes": dict(sorted(made.items())),
        "machine_busy_percent": round(100 * (busy_s() - used) / wall_s / (os.cpu_count() or 1)),
    }
    if process is not None:
        found |= {"operator_peak_mib": round(process.peak_mib), "operator_ends": process.ends}
    found["bars"] = {
        name: {"at_most": bar, "met": found.get(name) is not None and found[name] <= bar}
        for name, bar in row.bars.items()
    }
    return found


async def _idle(server: ApiServer, process: Process | None, seconds: float = 180.0) -> Object:
    """What the operator does while all jobs run and nothing happens. Leases are left out: KWOK's nodes renew theirs."""
    await asyncio.sleep(120)  # events of their start are written at a limited rate
    cpu_s, before = _cpu(process), writes(server)
    await asyncio.sleep(seconds)
    made = writes(server) - before
    return {
        "idle_cpu_percent": round(100 * (_cpu(process) - cpu_s) / seconds, 2),
        "idle_calls_per_s": round(sum(n for name, n in made.items() if name != "leases") / seconds, 2),
        "idle_writes": dict(sorted(made.items())),
    }


def _cpu(process: Process | None) -> float:
    if process is None:
        return 0.0
    process.count()
    return process.cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="of jobs and nodes; bars hold for 1 only")
    parser.add_argument("--source", type=Path, default=ROOT / ".src", help="another version's package folder")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    known = {row.name: row for row in ROWS}
    if unknown := set(given.rows) - known.keys():
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    found = []
    for name in given.rows or known:
        print(f"  {name}", file=sys.stderr, flush=True)
        found.append(asyncio.run(measure(scaled(known[name], given.scale), given.source.resolve())))
        print(json.dumps(found[-1]), flush=True)
        if given.output is not None:
            written = {
                "command": f"python {Path(__file__).relative_to(ROOT)} {' '.join(sys.argv[1:])}".strip(),
                "date": str(datetime.now(UTC).date()), "python": platform.python_version(), "cores": os.cpu_count(),
                "rows": found,
            }  # fmt: skip
            given.output.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
