"""What one scheduling round costs the operator: CPU time, how much of it holds the event loop, and memory.

    python benchmarks/control/rounds.py [--jobs N ...] [--rounds N] [--output FILE]

The objects are JSON as an API server sends it, and go through the operator's own caches into `Rounds`; an
admission or release that it decides is in the job's status at once. Of N jobs half run on one accelerator each, a quarter waits and a quarter has ended;
running and ended jobs have their pod, and every node runs pods of others, N pods in all. Before each round some
running jobs report progress, one job ends, one arrives, and (in the second row of a size) nothing else; the round is
the answer to these events (`react`), not the full plan that comes every ten seconds, which is shown beside it.

Bars: a round under 10 ms and 0.1 ms per changed object, none of it on the event loop; 250 MiB with 15,000 jobs.
Each size runs in a process of its own. CPU time is the process's; the event loop's is that of its thread.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.operator.builders import SETTINGS, engine_of

from busbar.kube.client import Object
from busbar.kube.informer import Key
from busbar.operator.accounting.allocations import AllocationCounts, PoolRemarks
from busbar.operator.decisions import Admit, Decision, Release
from busbar.operator.metrics import Metrics
from busbar.operator.queue.controller import Controller
from busbar.operator.scheduling.rounds import Rounds
from busbar.operator.watch.caches import Caches
from busbar.scheduler import Snapshot

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = (2000, 5000, 15000)
PER_NODE = 8
TEAMS = 10
CHANGED = (2, 50)
"""Objects that change before a round."""
KIND = "H100"
SETTLE = 3
"""Rounds between the first plan and the measured ones."""
NOW = datetime.now(UTC)
BAR_MS, BAR_PER_CHANGE_MS, BAR_MIB = 10.0, 0.1, 250.0


def time_of(ago: timedelta) -> str:
    return (NOW - ago).strftime("%Y-%m-%dT%H:%M:%SZ")


def metadata(name: str, namespace: str = "", version: int = 1) -> Object:
    """As an API server sends it, with the managedFields that every object carries."""
    fields: Object = {f"f:field-{i}": {} for i in range(30)}
    managed = [
        {"manager": m, "operation": "Update", "fieldsV1": fields} for m in ("busbar-api", "kopf", "kubelet")
    ]
    found: Object = {
        "name": name, "uid": f"uid-{namespace}-{name}", "generation": 1, "resourceVersion": str(version),
        "creationTimestamp": time_of(timedelta(hours=2)), "managedFields": managed,
    }  # fmt: skip
    return {**found, "namespace": namespace} if namespace else found


def node(number: int) -> Object:
    size = {"cpu": "128", "memory": "1Ti", "ephemeral-storage": "1Ti", "nvidia.com/gpu": str(PER_NODE)}
    meta = metadata(f"node-{number:05d}")
    meta["labels"] = {"busbar.dev/accelerator": KIND, "kubernetes.io/hostname": f"node-{number:05d}"}
    meta["labels"]["topology.kubernetes.io/rack"] = f"rack-{number // 16}"
    return {"metadata": meta, "spec": {}, "status": {
        "allocatable": size, "conditions": [{"type": "Ready", "status": "True"}]}}  # fmt: skip


def job(number: int, state: str, where: str, version: int = 1, step: int = 10) -> Object:
    width = (256, 512, 1024, 2048)[number % 4]
    config = {
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": 8, "num_attention_heads": 8,
        "intermediate_size": 4 * width, "vocab_size": 32000,
    }  # fmt: skip
    began = time_of(timedelta(minutes=30 + number % 60))
    status: Object = {"phase": "Queued", "observedGeneration": 1}
    if state != "waits":
        status = {
            "phase": "Running", "attempt": 1, "observedGeneration": 1,
            "admission": {
                "id": f"a{number}", "pool": "h100", "accelerator": KIND, "mode": "resident", "pods": 1,
                "acceleratorsPerPod": 1, "nodes": [where],
                "perPod": {"acceleratorsM": 1000, "cpuM": 8000, "memoryMib": 65536},
                "admittedAt": began, "startedAt": began,
            },
            "progress": {"step": step, "totalSteps": 100_000, "tokensPerSecond": 20_000.0 + number % 7, "tokens": 1},
        }  # fmt: skip
    if state == "ended":
        status["phase"] = "Succeeded"
        status["finishedAt"] = time_of(timedelta(minutes=5))
        del status["admission"]
    meta = metadata(f"job-{number}", f"team-{number // 4 % TEAMS}", version)
    engine = {**engine_of(config), "steps": 100_000, "mode": "resident"}
    shape = {"acceleratorsPerPod": 1, "cpu": "8", "memory": "64Gi"}
    spec = {"output": {"uri": "pvc://claim/model"}, "engine": engine, "shape": shape}
    return {"kind": "TrainingJob", "metadata": meta, "spec": spec, "status": status}


def pod(number: int, owner: Object | None, where: str, phase: str, version: int = 1) -> Object:
    meta = metadata(f"pod-{number}", owner["metadata"]["namespace"] if owner else "monitoring", version)
    requests = {"cpu": "100m", "memory": "128Mi"}
    if owner is not None:
        meta["labels"] = {
            "busbar.dev/kind": "trainingjob", "busbar.dev/job": owner["metadata"]["name"], "busbar.dev/attempt": "1",
            "busbar.dev/rank": "0", "busbar.dev/admission-id": f"a{number}",
        }  # fmt: skip
        meta["ownerReferences"] = [
            {"controller": True, "uid": owner["metadata"]["uid"], "kind": "TrainingJob", "name": "x"}
        ]
        requests = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"}
    env = [{"name": f"VARIABLE_{i}", "value": "v" * 20} for i in range(20)]
    image = "registry/busbar-workloads:1"
    container = {"name": "main", "image": image, "resources": {"requests": requests}, "env": env}
    running = {"running": {"startedAt": time_of(timedelta(minutes=20))}}
    ended = {
        "terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": time_of(timedelta(minutes=5))}
    }
    states = [
        {"name": "main", "imageID": f"{image}@sha256:0", "state": running if phase == "Running" else ended}
    ]
    conditions = [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}]
    status = {"phase": phase, "podIP": "10.0.0.1", "conditions": conditions, "containerStatuses": states}
    return {"metadata": meta, "spec": {"nodeName": where, "containers": [container]}, "status": status}


def fill(caches: Caches, jobs: int) -> int:
    """Puts the cluster into the caches; returns the number of nodes."""
    nodes = max(8, jobs // 15)
    for number in range(nodes):
        caches.nodes.observe(node(number))
    tolerated = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    caches.pools.observe({"kind": "AcceleratorPool", "metadata": metadata("h100"), "spec": {
        "accelerator": KIND, "resourceName": "nvidia.com/gpu", "memoryGib": 80, "tolerations": tolerated,
        "nodeSelector": {"busbar.dev/accelerator": KIND}}})  # fmt: skip
    for number in range(TEAMS):
        caches.tenants.observe({"kind": "Tenant", "metadata": metadata(f"team-{number}"), "spec": {
            "namespaces": [f"team-{number}"]}})  # fmt: skip
    places = [f"node-{i // PER_NODE:05d}" for i in range(nodes * PER_NODE)]
    pods = 0
    for number in range(jobs):
        state = ("runs", "waits", "runs", "ended")[number % 4]
        where = places[number // 2] if state == "runs" and number // 2 < len(places) else ""
        state = "waits" if state == "runs" and not where else state
        made = job(number, state, where or places[0])
        caches.jobs.observe(made)
        if state != "waits":
            caches.pods.observe(pod(number, made, where or places[0], "Running" if where else "Succeeded"))
            pods += 1
    for number in range(pods, jobs):
        caches.pods.observe(pod(jobs + number, None, f"node-{number % nodes:05d}", "Running"))
    return nodes


def memory_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return float("nan")


class Operator:
    """Caches and rounds, whose decisions are in the jobs' statuses at once."""

    def __init__(self) -> None:
        metrics = Metrics()
        controller = Controller(metrics, workers=1)
        controller.handles("TrainingJob", self._carry_out)
        self.caches = Caches(cast(Any, None), self._changed, inactivity_s=60.0)
        self.rounds = Rounds(self.caches, controller, SETTINGS, metrics)
        self.rounds.after = self._after
        self._counts = AllocationCounts()
        self._versions = itertools.count(2)
        self._ended = self._arrived = 0

    def change(self, jobs: int, changed: int) -> None:
        """One job ends, one arrives, and the others of so many report progress; there were so many jobs at first."""
        for index in range(changed - 2):
            number, version = 2 * (100 + index), next(self._versions)
            where = f"node-{number // 2 // PER_NODE:05d}"
            self.caches.jobs.observe(job(number, "runs", where, version, version))
        self.caches.jobs.observe(over := job(self._ended, "ended", "", next(self._versions)))
        self.caches.pods.observe(pod(self._ended, over, "node-00000", "Succeeded", next(self._versions)))
        self.caches.jobs.observe(job(jobs + self._arrived, "waits", "", next(self._versions)))
        self._ended, self._arrived = self._ended + 2, self._arrived + 1

    def _changed(self, kind: str, key: Key, old: Any, new: Any) -> None:
        self.rounds.changed(kind, key, new)

    async def _after(self, snapshot: Snapshot, remarks: PoolRemarks) -> None:
        await asyncio.to_thread(self._counts.follow, snapshot, remarks)

    async def _carry_out(self, key: Key, decisions: tuple[Decision, ...]) -> None:
        number = int(key.name.removeprefix("job-"))
        for decision in decisions:
            if isinstance(decision, Admit):
                where = decision.placement.nodes[0]
                made = job(number, "runs", where, next(self._versions))
                self.caches.jobs.observe(made)
                self.caches.pods.observe(pod(number, made, where, "Running", next(self._versions)))
            elif isinstance(decision, Release):
                self.caches.pods.forget(Key(key.namespace, f"pod-{number}"))
                self.caches.jobs.observe(job(number, "waits", "", next(self._versions)))


async def measure(jobs: int, rounds_of: int) -> Object:
    """One row: a cluster of so many jobs, and so many rounds of each number of changes."""
    operator = Operator()
    before = memory_mib()
    nodes = fill(operator.caches, jobs)
    gc.collect()
    kept = memory_mib()
    row: Object = {"jobs": jobs, "pods": len(operator.caches.pods.items), "nodes": nodes}
    row["first_plan_cpu_s"] = await _full_plan_cpu_s(operator)
    for _ in range(SETTLE):
        await operator.rounds.once(full=False)
    row["rounds"] = {
        str(changed): await _reactions(operator, jobs, changed, rounds_of) for changed in CHANGED
    }
    row["full_plan_cpu_s"] = await _full_plan_cpu_s(operator)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"process": before, "with_objects": kept, "peak": peak, "bar": BAR_MIB}
    row["memory_mib"] = {name: round(mib) for name, mib in found.items()}
    return row


async def _full_plan_cpu_s(operator: Operator) -> float:
    start = time.process_time()
    await operator.rounds.once(full=True)
    return round(time.process_time() - start, 3)


async def _reactions(operator: Operator, jobs: int, changed: int, rounds_of: int) -> Object:
    """What rounds cost that answer so many changes; garbage is collected between them."""
    cpu, loop = [], []
    for _ in range(rounds_of):
        operator.change(jobs, changed)
        gc.collect()
        gc.disable()
        start, loop_s = time.process_time(), time.thread_time()
        await operator.rounds.once(full=False)
        cpu.append(time.process_time() - start)
        loop.append(time.thread_time() - loop_s)
        gc.enable()
    return {
        "cpu_ms": {"p50": ms(cpu), "max": round(1000 * max(cpu), 1)},
        "event_loop_ms": {"p50": ms(loop), "max": round(1000 * max(loop), 1)},
        "bar_ms": BAR_MS + BAR_PER_CHANGE_MS * changed,
    }


def ms(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds), 1)


def one(given: tuple[int, int]) -> Object:
    return asyncio.run(measure(*given))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found = []
    for size in given.jobs:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(one, ((size, given.rounds),))
        found.append(row)
        print(json.dumps(row), flush=True)
    command = f"python {Path(__file__).relative_to(ROOT)} " + " ".join(sys.argv[1:])
    if given.output is not None:
        written = {
            "command": command.strip(), "python": platform.python_version(), "date": str(NOW.date()), "rows": found,
        }  # fmt: skip
        given.output.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
