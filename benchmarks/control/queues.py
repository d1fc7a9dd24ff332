"""Whole lives of many jobs on a real control plane: time to the last end, the operator's CPU time, writes per job.

    python benchmarks/control/queues.py [ROW ...] [--scale 1.0] [--kubeconfig FILE] [--output FILE] [--plot FILE]

    fit          500 one-pod jobs of 30 s that all fit, on 200 nodes of 4
    tenants      1,000 jobs of 20 s of ten tenants with guarantees, on 200 places (ideal: 100 s)
    gangs        20 gangs of 50 pods of 30 s, on 250 nodes of 4
    large-gangs  5 gangs of 400 pods of 30 s, on 500 nodes of 4
    arrivals     15,000 jobs of 10 s of ten tenants that arrive within 60 s, on 800 places (ideal: 188 s)
    storm        200 places are full of jobs of 120 s that borrow them; 200 jobs of 30 s claim them by their guarantee
                 (which must be kept within 10 s here, by the operator's setting)
    killed       as `tenants`; the operator is killed when half of the jobs have ended
    idle         2,000 jobs that run and of which nothing is to be done, for three minutes after the last events
    floor        500 bare pods of 30 s, made by a plain loop: what Kubernetes itself takes
    fit-jobs, tenants-jobs, gangs-jobs    the same with batch/v1 Jobs that opt in, under the chart's policies
    floor-jobs   500 batch/v1 Jobs of 30 s without any queue

The rows with Jobs run under another queue as well, which gets the same manifests:

    python benchmarks/control/queues.py fit-jobs --manager "COMMAND" --setup FILE --label KEY=VALUE

COMMAND is the other queue's process, which finds the API server by KUBECONFIG; FILE is applied before it starts (its kinds
and queues, for the namespaces team-0 to team-9); Jobs carry the label and are created suspended.

A cluster of one's own is measured with --kubeconfig FILE (`given_cluster.py` says what it has to be like): writes are those
of the API server that answers /metrics, and the CPU time of its parts is not known here.

The parts are those of `parts.py`; the operator is a process of its own with production settings. Bars are those of a
two-core machine that nothing else uses. Everything shares the machine, so the CPU time that others took is reported:
repeat a row that was disturbed. Writes are counted by the API server and include those of the client that submits, of the
kubelet and of the scheduler, without statuses that KWOK wrote again with nothing but other times (`kwok_repeats`);
leases and events are reported apart. A row that misses its bar stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.control import plots
from benchmarks.control.given_cluster import GivenCluster
from benchmarks.control.operator_process import Process, writes
from benchmarks.control.parts import Parts, Used, busy_s, install_chart
from benchmarks.control.queue_rows import (
    GPU,
    ROWS,
    URGENT,
    Queue,
    Row,
    bare_pod,
    batch_job,
    job,
    node,
    scaled,
)
from benchmarks.control.watching import MOMENTS, Watcher, longest_free_s
from tests.cluster.apiserver import ApiServer
from tests.cluster.rights import SYSTEM

from busbar.kube.client import KubeClient, Object
from busbar.kube.informer import Key
from busbar.kube.login import from_kubeconfig
from busbar.kube.resources import JOBS, NODES, PODS, TRAINING_JOBS
from busbar.local.simulated import TAINT

ROOT = Path(__file__).resolve().parent.parent.parent
SUBMITTING = 8
"""Requests of the client that submits, at a time."""
IDLE_S, SETTLE_S, SETTLE_LIMIT_S = 180.0, 15.0, 900.0


async def many(count: int, call: Callable[[int], Awaitable[Any]], within_s: float = 0.0) -> None:
    """Calls with 0 to count - 1, a few at a time, and evenly within so many seconds if that is asked for."""
    numbers, began = iter(range(count)), asyncio.get_running_loop().time()

    async def worker() -> None:
        for number in numbers:
            due = began + number * within_s / count
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            await call(number)

    await asyncio.gather(*(worker() for _ in range(SUBMITTING)))


@dataclass
class Stage:
    """What a row runs on."""

    row: Row
    queue: Queue
    server: ApiServer
    client: KubeClient
    parts: Parts
    watcher: Watcher
    process: Process | None = None
    submitted: list[float] = field(default_factory=list)

    @property
    def units(self) -> int:
        """How many things the watcher waits for: TrainingJobs, or pods."""
        return self.row.jobs * (1 if self.row.made_of is TRAINING_JOBS else self.row.pods)

    async def submit(self, number: int) -> None:
        row = self.row
        made = {
            TRAINING_JOBS: lambda: job(number, row),
            PODS: lambda: bare_pod(number, row),
            JOBS: lambda: batch_job(number, row, self.queue),
        }[row.made_of]()
        self.submitted.append(self.watcher.now_s)
        await self.client.create(row.made_of, made, f"team-{number % row.tenants}")

    def cpu_s(self) -> float:
        if self.process is None:
            return 0.0
        self.process.count()
        return self.process.cpu_s


def cluster_of(row: Row, kubeconfig: Path | None) -> ApiServer:
    """The cluster that a row runs on."""
    if kubeconfig is None:
        # No controller manager takes the taint "not ready" off new nodes.
        return ApiServer.start("--disable-admission-plugins=TaintNodesByCondition")
    given = GivenCluster.of(kubeconfig)
    given.check([SYSTEM, *row.namespaces])
    return given


async def measure(row: Row, queue: Queue, kubeconfig: Path | None = None) -> tuple[Object, Watcher]:
    with cluster_of(row, kubeconfig) as server:
        server.install_crds()
        ours = row.queued and queue.is_ours
        config = install_chart(server) if ours and row.made_of is JOBS else server.kubeconfig()
        login = from_kubeconfig(server.kubeconfig())
        client = KubeClient(login)
        parts = Parts(server, jobs=row.made_of is JOBS)
        watcher = Watcher(client, of_pods=row.made_of is not TRAINING_JOBS)
        stage = Stage(row, queue, server, client, parts, watcher)
        tasks: list[asyncio.Task[Any]] = []
        try:
            await prepare(stage)
            tasks += [asyncio.create_task(informer.run()) for informer in watcher.informers]
            if row.queued:
                namespace = SYSTEM if config != server.kubeconfig() else "default"
                stage.process = Process(
                    config,
                    server.directory,
                    queue.source,
                    namespace=namespace,
                    command=queue.command,
                    more=row.settings,
                )
                tasks.append(asyncio.create_task(stage.process.keep()))
            if ours:
                await one_job(stage)
            found = await _story(stage)
            if isinstance(server, GivenCluster):
                found["server"] = server.version
            return found, watcher
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if stage.process is not None:
                stage.process.stop()
            if isinstance(server, GivenCluster):
                await asyncio.to_thread(server.clean, [*row.namespaces, SYSTEM] if ours else row.namespaces)
            parts.stop()
            await client.close()


async def prepare(stage: Stage) -> None:
    row, server = stage.row, stage.server
    for number in range(row.tenants):
        await asyncio.to_thread(server.make_namespace, f"team-{number}")
        held = row.guaranteed if not row.storm or number else 0
        quota = [{"accelerator": "H100", "guaranteed": held}] if held else []
        spec: Object = {"namespaces": [f"team-{number}"], **({"quota": quota} if quota else {})}
        tenant = {
            "apiVersion": TRAINING_JOBS.api_version,
            "kind": "Tenant",
            "metadata": {"name": f"team-{number}"},
        }
        server.admin.create({**tenant, "spec": spec}).expect()
    pool = {"accelerator": "H100", "resourceName": GPU, "memoryGib": 80, "tolerations": [{**TAINT, "operator": "Equal"}],
            "nodeSelector": {"busbar.dev/accelerator": "H100"}}  # fmt: skip
    made = {"apiVersion": TRAINING_JOBS.api_version, "kind": "AcceleratorPool", "metadata": {"name": "h100"}}
    server.admin.create({**made, "spec": pool}).expect()
    if stage.queue.setup is not None:
        applied = await asyncio.to_thread(server.kubectl, "apply", "-f", str(stage.queue.setup))
        if applied.returncode:
            raise SystemExit(f"{stage.queue.setup}: {applied.stderr}")
    await many(row.nodes, lambda number: stage.client.create(NODES, node(number, row.per_node)))
    while True:
        found, _ = await stage.client.list(NODES, label_selector="type=kwok")
        if all((one.get("status") or {}).get("allocatable", {}).get(GPU) for one in found):
            return
        await asyncio.sleep(0.5)


async def one_job(stage: Stage) -> None:
    """The operator has started when one job has run; it is not counted."""
    first = replace(stage.row, name="first", jobs=1, pods=1, seconds=0.0)
    if stage.row.made_of is JOBS:
        while (
            True
        ):  # until the operator has labelled the namespace, it is no tenant's, and its pods get no gate
            labels = (
                stage.server.admin.get("/api/v1/namespaces/team-0").expect()["metadata"].get("labels") or {}
            )
            if "busbar.dev/tenant" in labels:
                break
            await asyncio.sleep(0.2)
        await asyncio.sleep(2.0)  # the policies see the label a little later
        made = batch_job(99_999, first, stage.queue)
    else:
        made = job(99_999, first)
    await stage.client.create(stage.row.made_of, made, "team-0")
    if not await stage.watcher.until("ended", 1):
        raise SystemExit("the operator did not start: see its log")


async def _story(stage: Stage) -> Object:
    row, watcher = stage.row, stage.watcher
    watcher.reset()
    before, busy = writes(stage.server), busy_s()
    parts, cpu_s = stage.parts.used(), stage.cpu_s()
    watcher.reset()
    found: Object = {"row": row.name, "jobs": row.jobs, "pods": row.jobs * row.pods, "nodes": row.nodes}
    if row.storm:
        found |= await _storm(stage)
    else:
        await many(row.jobs, stage.submit, row.arrive_s)
        found["submitted_s"] = round(watcher.now_s, 1)
    if row.killed:
        found |= await _killed(stage)
    if row.seconds is None:
        await watcher.until("running", stage.units)
        found |= await _idle(stage)
    elif not row.storm:
        found["complete"] = await watcher.until("ended", stage.units)
    wall_s = watcher.now_s
    made = writes(stage.server) - before
    own_s = stage.cpu_s() - cpu_s
    jobs = row.jobs + row.storm
    counted = (
        sum(count for name, count in made.items() if name.split("/")[0] not in plots.APART) - watcher.repeats
    )
    found |= {f"last_{what}_s" if what != "ended" else "all_ended_s": watcher.last(what) for what in MOMENTS}
    found |= {
        "ended": dict(watcher.phases),
        "cpu_ms_per_job": round(1000 * own_s / jobs, 1),
        "cpu_ms_per_pod": round(1000 * own_s / (jobs * row.pods), 2),
        "writes_per_job": round(counted / jobs, 2),
        "writes_per_pod": round(counted / (jobs * row.pods), 2),
        "writes": dict(sorted(made.items())),
        "kwok_repeats": watcher.repeats,
        "pods_doubled": watcher.pods_doubled(),
        **_machine(stage, parts, own_s, busy_s() - busy, wall_s),
    }
    if row.arrive_s:
        found |= _waits(stage)
    found["bars"] = {
        name: {"at_most": bar, "met": found.get(name) is not None and found[name] <= bar}
        for name, bar in row.bars.items()
    }
    return found


def _machine(stage: Stage, before: dict[str, Used], own_s: float, busy: float, wall_s: float) -> Object:
    """Who used the machine: CPU seconds of each part, of the operator, and of all else."""
    now = stage.parts.used()
    cpu_s = {name: round(part.cpu_s - before[name].cpu_s, 1) for name, part in now.items()}
    found: Object = {
        "cpu_s": {
            "operator": round(own_s, 1),
            **cpu_s,
            "others": round(busy - own_s - sum(cpu_s.values()), 1),
        },
        "machine_busy_percent": round(100 * busy / wall_s / (os.cpu_count() or 1)),
        "peak_mib": {name: round(part.peak_mib) for name, part in now.items()},
    }
    if stage.process is not None:
        found |= {"operator_peak_mib": round(stage.process.peak_mib), "operator_ends": stage.process.ends}
    return found


def _waits(stage: Stage) -> Object:
    """How long free places and waiting jobs were left alone."""
    watcher = stage.watcher
    admitted = watcher.at["admitted"]
    free_s = longest_free_s(
        stage.submitted, list(admitted.values()), list(watcher.pods_ended.values()), stage.row.places
    )
    waited_s = sum(sorted(admitted.values())) - sum(sorted(stage.submitted)[: len(admitted)])
    return {
        "longest_free_s": round(free_s, 2),
        "waiting_minutes": round(waited_s / 60, 1),
        "writes_per_waiting_minute": round(watcher.queued_writes / max(1.0, waited_s / 60), 2),
    }


async def _storm(stage: Stage) -> Object:
    """All places are taken by a tenant that borrows them, and claimed by the one that they are guaranteed to; the jobs
    that were stopped run to their end afterwards."""
    row, watcher = stage.row, stage.watcher
    alone = replace(stage, row=replace(row, tenants=1))
    await many(row.jobs, alone.submit)
    await watcher.until("running", row.jobs)
    came_s, urgent = watcher.now_s, replace(row, seconds=30.0)

    async def submit(number: int) -> None:
        await stage.client.create(TRAINING_JOBS, job(number, urgent, URGENT), "team-1")

    def is_urgent(key: Key) -> bool:
        return key.name.startswith(URGENT)

    await many(row.storm, submit)
    found: Object = {"submitted_s": round(watcher.now_s - came_s, 1)}
    for what in ("running", "ended"):
        await watcher.until(what, row.storm, is_urgent)
        found[f"urgent_{what}_s"] = round(watcher.now_s - came_s, 1)
    found["complete"] = await watcher.until("ended", row.jobs + row.storm)
    return found


async def _killed(stage: Stage) -> Object:
    """The operator is killed when half of the jobs have ended, and is started again at once."""
    assert stage.process is not None
    watcher = stage.watcher
    await watcher.until("ended", stage.units // 2)
    at_s = watcher.now_s
    stage.process.restart()
    await asyncio.sleep(0.5)  # what it had written just before is seen by now
    await watcher.until("admitted", watcher.count("admitted") + 1)
    return {"killed_at_s": round(at_s, 1), "admits_again_s": round(watcher.now_s - at_s, 1)}


async def _idle(stage: Stage) -> Object:
    """What the operator does while all jobs run and nothing happens, after the events of their start.

    Leases are left out: KWOK's nodes renew theirs.
    """
    watcher = stage.watcher
    began, told = watcher.now_s, -1
    while (now := writes(stage.server)["events"]) > told + 2 and watcher.now_s < began + SETTLE_LIMIT_S:
        told = now
        await asyncio.sleep(SETTLE_S)
    settled_s, cpu_s, before = watcher.now_s - began, stage.cpu_s(), writes(stage.server)
    await asyncio.sleep(IDLE_S)
    made = writes(stage.server) - before
    return {
        "settled_s": round(settled_s, 1),
        "idle_cpu_percent": round(100 * (stage.cpu_s() - cpu_s) / IDLE_S, 2),
        "idle_calls_per_s": round(sum(n for name, n in made.items() if name != "leases") / IDLE_S, 2),
        "idle_writes": dict(sorted(made.items())),
    }


def arguments() -> tuple[argparse.Namespace, Queue]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    known = [row.name for row in ROWS]
    parser.add_argument("rows", nargs="*", metavar="ROW", default=known, help="default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="of jobs and nodes; bars hold for 1 only")
    parser.add_argument(
        "--kubeconfig", type=Path, help="of the cluster to measure, in place of one of its own"
    )
    parser.add_argument("--source", type=Path, default=ROOT / ".src", help="another version's package folder")
    parser.add_argument("--manager", help="command of another queue, for rows with Jobs")
    parser.add_argument("--setup", type=Path, help="manifests that it needs")
    parser.add_argument("--label", help="KEY=VALUE, by which it takes a Job in")
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--plot", type=Path, help="lives over time; beside it FILE-use, with CPU time, writes and memory"
    )
    given = parser.parse_args()
    if unknown := set(given.rows) - set(known):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    queue = Queue(source=given.source.resolve())
    if given.manager:
        if any(not name.endswith("-jobs") for name in given.rows):
            parser.error("another queue takes rows with Jobs only")
        key, _, value = (given.label or "").partition("=")
        labels = {key: value} if key else {}
        queue = replace(queue, command=tuple(shlex.split(given.manager)), setup=given.setup, labels=labels)
    return given, queue


def main() -> None:
    given, queue = arguments()
    rows = {row.name: row for row in ROWS}
    found: list[Object] = []
    watched: dict[str, Watcher] = {}
    for name in given.rows:
        print(f"  {name}", file=sys.stderr, flush=True)
        result, watched[name] = asyncio.run(measure(scaled(rows[name], given.scale), queue, given.kubeconfig))
        found.append(result)
        print(json.dumps(result), flush=True)
        if given.output is not None:
            written = {
                "command": f"python {Path(__file__).relative_to(ROOT)} {' '.join(sys.argv[1:])}".strip(),
                "date": str(datetime.now(UTC).date()), "python": platform.python_version(), "cores": os.cpu_count(),
                "rows": found,
            }  # fmt: skip
            given.output.write_text(json.dumps(written, indent=1) + "\n")
    if given.plot is not None:
        plots.lives(watched, given.plot)
        plots.use(found, given.plot.with_stem(f"{given.plot.stem}-use"))


if __name__ == "__main__":
    main()
