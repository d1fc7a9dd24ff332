"""How long nobody leads when the operator's leader dies or stops, with a second replica that stands by.

    python benchmarks/control/take_over.py [--kills N] [--stops N] [--jobs N] [--lease S] [--output FILE]

A real API server with our kinds, one node, and two operators as processes of their own with production settings and the
chart's lease for two replicas; a stand-in kubelet runs the pods. N jobs of two seconds wait for twenty places, and
as many are submitted again as end, so there is always something to admit, to start and to finish. The leader is
killed (SIGKILL: no last words, the lease is not given back) or stopped (SIGTERM, as by the kubelet), and times count from
there: until the standby holds the lease, until its first write, and until its first admission. Then the lost one is
started again and stands by. At the end no job may have been admitted twice and no pod made twice.

Both operators reach the API server through a proxy each, which sees their writes, in the process of this script.
Memory is resident memory just before each loss. Watch the load: all of it shares this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.control.report import publish
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script
from tests.cluster.replicas import Replica, admissions, holder, nothing_doubled, two
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.resources import TRAINING_JOBS

PLACES = 20
RUN_S = 2.0
LOOK_S = 0.02
LIMIT_S = 120.0
SETTLED = 5
"""Admissions that a leader has made before it is lost."""


@dataclass(frozen=True)
class Loss:
    """One loss of the leader; times are seconds from the signal."""

    how: str
    lease_s: float
    write_s: float
    admission_s: float
    leader_mib: float
    standby_mib: float
    waiting: int


def resident_mib(replica: Replica) -> float:
    status = Path(f"/proc/{replica.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return round(int(found.group(1)) / 1024, 1) if found is not None else 0.0


async def submitting(cluster: Cluster, count: int, waiting: list[int]) -> None:
    """Keeps so many jobs waiting, until cancelled."""
    numbers = itertools.count()
    while True:
        items, _ = await cluster.client.list(TRAINING_JOBS, cluster.namespace)
        waiting[0] = sum((i.get("status") or {}).get("phase", "New") in ("New", "Queued") for i in items)
        for _ in range(count - waiting[0]):
            await cluster.create(gang_job(f"j{next(numbers):06d}", 1))
        await asyncio.sleep(1.0)


async def after(began: float, holds: Callable[[], Any]) -> float:
    """Seconds from `began` until it holds."""
    while True:
        found = holds()
        if await found if asyncio.iscoroutine(found) else found:
            return round(time.monotonic() - began, 2)
        assert time.monotonic() - began < LIMIT_S, "the standby did not take over"
        await asyncio.sleep(LOOK_S)


async def lose(leader: Replica, standby: Replica, how: signal.Signals, waiting: int) -> Loss:
    """Ends the leader, and waits until the standby has admitted something."""
    before, writes = len(admissions(standby)), len(standby.proxy.writes)
    memory = resident_mib(leader), resident_mib(standby)
    began = time.monotonic()
    leader.process.send_signal(how)

    async def held() -> bool:
        return (await holder(leader.cluster)).startswith(standby.name)

    times = await asyncio.gather(
        after(began, held),
        after(began, lambda: len(standby.proxy.writes) > writes),
        after(began, lambda: len(admissions(standby)) > before),
    )
    await asyncio.to_thread(leader.process.wait)
    return Loss(how.name, *times, *memory, waiting)


async def measure(kills: int, stops: int, jobs: int, lease_s: float, folder: Path) -> dict[str, Any]:
    losses: list[Loss] = []
    ways = [signal.SIGKILL] * kills + [signal.SIGTERM] * stops

    def script(pod: Object) -> Script:
        return Script(run_s=RUN_S)

    with ApiServer.start() as server:
        server.install_crds()
        version = server.admin.get("/version").expect()["gitVersion"]
        async with (
            Cluster(server, script=script, cpu=str(PLACES)) as cluster,
            two(cluster, folder, lease_s) as (leader, standby),
        ):
            waiting = [0]
            load = asyncio.create_task(submitting(cluster, jobs, waiting))
            try:
                for number, how in enumerate(ways, 1):
                    await _more(leader, SETTLED)
                    await becomes(standby.is_ready, bool)
                    losses.append(await lose(leader, standby, how, waiting[0]))
                    print(f"{number}/{len(ways)} {losses[-1]}", file=sys.stderr, flush=True)
                    leader.start()
                    leader, standby = standby, leader
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
            nothing_doubled(cluster, leader, standby)
            admitted = len(admissions(leader)) + len(admissions(standby))
    return {
        "kubernetes": version,
        "jobs_waiting": jobs,
        "lease_s": lease_s,
        "admitted": admitted,
        "admitted_or_made_twice": 0,
        "summary": {
            way.name: _summary([loss for loss in losses if loss.how == way.name]) for way in set(ways)
        },
        "losses": [asdict(loss) for loss in losses],
    }


async def _more(replica: Replica, count: int) -> None:
    """Waits until it has made so many more admissions."""
    wanted = len(admissions(replica)) + count

    async def look() -> int:
        return len(admissions(replica))

    await becomes(look, lambda found: found >= wanted)


def _summary(losses: list[Loss]) -> dict[str, dict[str, float]]:
    names = ("lease_s", "write_s", "admission_s", "leader_mib", "standby_mib")
    return {
        name: {
            "median": round(statistics.median(getattr(loss, name) for loss in losses), 2),
            "worst": max(getattr(loss, name) for loss in losses),
        }
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--lease", type=float, default=12.0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    command = (
        f"python benchmarks/control/take_over.py --kills {given.kills} --stops {given.stops} "
        f"--jobs {given.jobs} --lease {given.lease:g}"
    )
    with tempfile.TemporaryDirectory() as folder:
        made = measure(given.kills, given.stops, given.jobs, given.lease, Path(folder))
        publish(command, made, given.output)


if __name__ == "__main__":
    main()
