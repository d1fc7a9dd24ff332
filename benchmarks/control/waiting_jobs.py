"""What many waiting jobs cost the operator: writes, CPU time, and whether it keeps its lease and goes on admitting.

    python benchmarks/control/waiting_jobs.py [--jobs N] [--seconds S] [--delay S] [--source .src] [--output FILE]

A real API server with our kinds, one node with two places, and the operator as a process of its own with production
settings; nothing stands in for it. N jobs are submitted as fast as one client can, of which two run (a stand-in
kubelet starts them) and the others wait. After a third of the time one of the two is suspended: the time from there
to the next admission is what the others' sentences may not delay. Then the operator is killed and started again.

``--delay`` puts a proxy between the operator and the API server that answers so much later.

``--source`` names another version's package folder, so that two versions meet the same harness. Writes are counted by
the API server. CPU seconds are the operator's own and its children's; an operator that ends is started again after
back-offs as the kubelet's (10 s, 20 s, …).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.control.operator_process import Process, writes
from benchmarks.control.report import publish
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script

from busbar.kube.client import Object
from busbar.kube.resources import LEASES, TRAINING_JOBS

ROOT = Path(__file__).resolve().parent.parent.parent
LOOK_S = 0.5


class Lease:
    """The longest time between two renewals."""

    def __init__(self) -> None:
        self.longest_gap_s = 0.0
        self._last: datetime | None = None

    async def watch(self, cluster: Cluster) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            lease = await cluster.client.get(LEASES, "busbar-operator", "default")
            now = datetime.fromisoformat(lease["spec"]["renewTime"])
            if self._last is not None:
                self.longest_gap_s = max(self.longest_gap_s, (now - self._last).total_seconds())
            self._last = now


async def jobs(cluster: Cluster) -> list[Object]:
    items, _ = await cluster.client.list(TRAINING_JOBS, cluster.namespace)
    return items


def phase(job: Object) -> str:
    return str((job.get("status") or {}).get("phase", "New"))


async def until(cluster: Cluster, holds: Any, limit_s: float) -> float | None:
    """Seconds until it holds of all jobs; None where it takes longer."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if holds(await jobs(cluster)):
            return round(time.monotonic() - began, 1)
        await asyncio.sleep(LOOK_S)
    return None


async def measure(count: int, seconds: float, delay_s: float, source: Path) -> dict[str, Any]:
    with ApiServer.start() as server:
        server.install_crds()
        async with Cluster(server, script=lambda pod: Script(), cpu="2") as cluster:
            kubeconfig = server.kubeconfig()
            if delay_s:
                kubeconfig.write_text(kubeconfig.read_text().replace(server.url, cluster.proxy.url))
            process, lease = Process(kubeconfig, server.directory, source), Lease()
            tasks: list[asyncio.Task[None]] = []
            try:
                await cluster.create(gang_job("first", 1))
                started = await until(cluster, lambda found: all(phase(j) == "Running" for j in found), 120)
                if started is None:
                    raise SystemExit((server.directory / "operator.log").read_text()[-3000:])
                cluster.proxy.delay_s = delay_s
                tasks = [asyncio.create_task(process.keep()), asyncio.create_task(lease.watch(cluster))]
                return await _story(cluster, process, lease, count, seconds)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                process.stop()


async def _story(
    cluster: Cluster, process: Process, lease: Lease, count: int, seconds: float
) -> dict[str, Any]:
    before, cpu_s, ends = writes(cluster.server), process.cpu_s, process.ends
    for i in range(count):
        await cluster.create(gang_job(f"j{i:04d}", 1))
    submitted = time.monotonic()
    told_s = await until(cluster, lambda found: all(phase(j) != "New" for j in found), seconds)
    await asyncio.sleep(max(0.0, seconds / 3 - (time.monotonic() - submitted)))
    admitted = {
        j["metadata"]["name"] for j in await jobs(cluster) if (j.get("status") or {}).get("admission")
    }
    await cluster.client.patch(TRAINING_JOBS, "first", {"spec": {"suspend": True}}, cluster.namespace)

    def another(found: list[Object]) -> bool:
        now = {j["metadata"]["name"] for j in found if (j.get("status") or {}).get("admission")}
        return bool(now - admitted)

    freed_s = await until(cluster, another, seconds)
    await asyncio.sleep(max(0.0, seconds - (time.monotonic() - submitted)))
    after = writes(cluster.server)
    first = {"cpu_s": round(process.cpu_s - cpu_s, 1), "ends": process.ends - ends}
    cpu_s = process.cpu_s
    process.restart()
    await asyncio.sleep(seconds / 3)
    again = writes(cluster.server)
    return {
        "submitted_jobs": count,
        "seconds": seconds,
        **first,
        "longest_lease_gap_s": round(lease.longest_gap_s, 1),
        "s_until_all_were_told": told_s,
        "s_from_a_free_place_to_its_admission": freed_s,
        "writes": dict(sorted((after - before).items())),
        "after_a_restart": {
            "seconds": seconds / 3,
            "cpu_s": round(process.cpu_s - cpu_s, 1),
            "writes": dict(sorted((again - after).items())),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--source", type=Path, default=ROOT / ".src")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    command = f"python benchmarks/control/waiting_jobs.py --jobs {given.jobs} --seconds {given.seconds:g} --delay {given.delay:g}"
    made = measure(given.jobs, given.seconds, given.delay, given.source.resolve())
    publish(command, made, given.output)


if __name__ == "__main__":
    main()
