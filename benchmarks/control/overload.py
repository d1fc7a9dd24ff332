"""The operator at full size while its API server is late, refuses or does not answer, and when it is killed itself.

    python benchmarks/control/overload.py [SITUATION ...] [--jobs 2000] [--source .src] [--output FILE]

    calm        nothing happens: the measure of the others
    paused      the API server's process is stopped for 1, 5, 15 and 30 s, and for 5 s works between
    late        each answer comes 5 s late for 30 s, and 10 s late for another 30 s
    refused     every second write is answered 429 for 60 s
    lost        every second write is done and answered 504 for 60 s
    killed      the operator is killed (SIGKILL) and started again at once

N one-pod jobs of two seconds wait for 80 places of a real control plane (see `queues.py`), with the operator as a process of
its own and production settings; a proxy between it and the API server makes what goes wrong. It begins when a twentieth of the
jobs have ended, so that nearly all of them wait. Each situation has to end in the state of the calm one: every job succeeded
in its first attempt, no pod made twice, and the operator not ended by itself. Writes are those that the operator has tried, also
where they were refused; their bar is twice those of the calm run. `over_calm_s` is the time to the last end beyond that of the calm run,
of which `fault_s` are those in which the fault was there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.control.operator_process import Process
from benchmarks.control.parts import Parts
from benchmarks.control.queue_rows import Queue, Row
from benchmarks.control.queues import Stage, many, one_job, prepare
from benchmarks.control.report import publish
from benchmarks.control.watching import Watcher
from tests.cluster.apiserver import ApiServer
from tests.cluster.proxy import FaultProxy, Write, every_second

from busbar.kube.client import KubeClient, Object
from busbar.kube.login import from_kubeconfig
from busbar.kube.resources import TRAINING_JOBS

ROOT = Path(__file__).resolve().parent.parent.parent
PAUSES_S, BETWEEN_S = (1.0, 5.0, 15.0, 30.0), 5.0
LATE_S, LATE_FOR_S, FAULT_S = (5.0, 10.0), 30.0, 60.0
WRITES_BAR = 2.0
WRITTEN = "/trainingjobs", "/pods"


@dataclass
class Scene:
    """Where something goes wrong."""

    server: ApiServer
    proxy: FaultProxy
    process: Process


async def calm(scene: Scene) -> None:
    """Nothing."""


async def paused(scene: Scene) -> None:
    for pause_s in PAUSES_S:
        scene.server.pause()
        try:
            await asyncio.sleep(pause_s)
        finally:
            scene.server.resume()
        await asyncio.sleep(BETWEEN_S)


async def late(scene: Scene) -> None:
    for scene.proxy.delay_s in LATE_S:
        await asyncio.sleep(LATE_FOR_S)
    scene.proxy.delay_s = 0.0


async def refused(scene: Scene) -> None:
    scene.proxy.answer(
        every_second(*WRITTEN), 429, "TooManyRequests", headers={"Retry-After": "1"}, times=10**9
    )
    await asyncio.sleep(FAULT_S)
    scene.proxy.forgive()


async def lost(scene: Scene) -> None:
    scene.proxy.answer_after(every_second(*WRITTEN), 504, "Timeout", times=10**9)
    await asyncio.sleep(FAULT_S)
    scene.proxy.forgive()


async def killed(scene: Scene) -> None:
    scene.process.restart()


SITUATIONS: dict[str, Callable[[Scene], Awaitable[None]]] = {
    made.__name__: made for made in (calm, paused, late, refused, lost, killed)
}


async def measure(happens: Callable[[Scene], Awaitable[None]], jobs: int, source: Path) -> Object:
    """One situation on a control plane of its own."""
    row = Row("overload", jobs, 1, 2.0, 20, 4)
    with ApiServer.start("--disable-admission-plugins=TaintNodesByCondition") as server:
        server.install_crds()
        kubeconfig = server.kubeconfig()
        client = KubeClient(from_kubeconfig(kubeconfig))
        parts, watcher = Parts(server, jobs=False), Watcher(client, of_pods=False)
        stage = Stage(row, Queue(), server, client, parts, watcher)
        async with FaultProxy(server.url, server.ca_file) as proxy:
            through = server.directory / "kubeconfig-proxy"
            through.write_text(kubeconfig.read_text().replace(server.url, proxy.url))
            tasks: list[asyncio.Task[Any]] = []
            try:
                await prepare(stage)
                tasks += [asyncio.create_task(informer.run()) for informer in watcher.informers]
                stage.process = process = Process(through, server.directory, source)
                tasks.append(asyncio.create_task(process.keep()))
                await one_job(stage)
                return await _story(stage, Scene(server, proxy, process), happens)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if stage.process is not None:
                    stage.process.stop()
                parts.stop()
                await client.close()


async def _story(stage: Stage, scene: Scene, happens: Callable[[Scene], Awaitable[None]]) -> Object:
    watcher, jobs = stage.watcher, stage.row.jobs
    cpu_s, ends, made = stage.cpu_s(), scene.process.ends, len(scene.proxy.writes)
    watcher.reset()
    await many(jobs, stage.submit)
    await watcher.until("ended", jobs // 20)
    waiting, began = jobs - watcher.count("admitted"), watcher.now_s
    await happens(scene)
    fault_s = watcher.now_s - began
    told = sum(map(_tells, scene.proxy.writes[made:]))
    complete = await watcher.until("ended", jobs)
    found, _ = await stage.client.list(TRAINING_JOBS, "team-0")
    names = {f"job-{number:05d}" for number in range(jobs)}
    status = [one.get("status") or {} for one in found if one["metadata"]["name"] in names]
    writes = scene.proxy.writes[made:]
    return {
        "jobs": jobs,
        "waited_when_it_began": waiting,
        "fault_s": round(fault_s, 1),
        "complete": complete,
        "all_ended_s": watcher.last("ended"),
        "phases": dict(Counter(str(one.get("phase")) for one in status)),
        "jobs_begun_again": sum(one.get("attempt") != 1 or bool(one.get("restarts")) for one in status),
        "pods_doubled": watcher.pods_doubled(),
        "operator_ended_by_itself": scene.process.ends - ends,
        "operator_cpu_s": round(stage.cpu_s() - cpu_s, 1),
        "operator_peak_mib": round(scene.process.peak_mib),
        "writes_tried": len(writes),
        "reasons_written": sum(map(_tells, writes)),
        "reasons_written_after": sum(map(_tells, writes)) - told,
        "answers": dict(sorted(Counter(str(write.status) for write in writes).items())),
    }


def _tells(write: Write) -> bool:
    """Whether it only says why a job waits."""
    body = write.body if isinstance(write.body, dict) else {}
    return write.path.endswith("/status") and (body.get("status") or {}).get("phase") == "Queued"


async def measure_all(names: list[str], jobs: int, source: Path) -> Object:
    """Each situation, with its bars beside the calm one."""
    rows: dict[str, Object] = {}
    for name in dict.fromkeys(("calm", *names)):
        print(f"  {name}", file=sys.stderr, flush=True)
        row = rows[name] = await measure(SITUATIONS[name], jobs, source)
        base = rows["calm"]
        row["over_calm_s"] = round((row["all_ended_s"] or 0.0) - (base["all_ended_s"] or 0.0), 1)
        row["writes_of_calm"] = round(row["writes_tried"] / base["writes_tried"], 2)
        row["met"] = {
            "ends as the calm one": row["complete"]
            and row["phases"] == base["phases"] == {"Succeeded": jobs},
            "no job begun again, no pod made twice": not row["jobs_begun_again"] and not row["pods_doubled"],
            "the operator did not end by itself": not row["operator_ended_by_itself"],
            f"at most {WRITES_BAR:g} times the writes": row["writes_of_calm"] <= WRITES_BAR,
        }
    return {"situations": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "situations", nargs="*", metavar="SITUATION", choices=[[], *SITUATIONS], help="default: all"
    )
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--source", type=Path, default=ROOT / ".src", help="another version's package folder")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    names = given.situations or list(SITUATIONS)
    command = (
        f"python benchmarks/control/overload.py {' '.join(given.situations)}".strip()
        + f" --jobs {given.jobs}"
    )
    publish(command, measure_all(names, given.jobs, given.source.resolve()), given.output)


if __name__ == "__main__":
    main()
