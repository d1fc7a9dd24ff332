"""How long a preview takes at the operator: snapshot, hand-over, one plan and the answer, as `POST /preview` does.

    python benchmarks/preview.py [--nodes N] [--jobs N] [--previews N]

A preview is made on what the last round leaves behind: its plan is made first, and not counted. Objects are those
that the operator watches (Node, Pod, TrainingJob, AcceleratorPool, Tenant); half of the jobs run and half wait. The
bar is p95 < 300 ms with 2,000 jobs on 1,000 nodes. Wall-clock time depends on what else the machine does, so CPU
seconds of both processes are reported too. No job has ended, so no forecast is made.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.operator.builders import NOW, SETTINGS, engine_of, job, pool, tenant

from busbar.kube.types import TrainingJob
from busbar.operator.forecasts.forecaster import Forecaster
from busbar.operator.forecasts.job_history import JobHistory
from busbar.operator.previews.worker import Previews
from busbar.operator.scheduling.rounds import policy_of
from busbar.operator.scheduling.snapshot import ClusterObjects, build
from busbar.operator.steady_clock import utc_now
from busbar.operator.watch.projections import Node
from busbar.scheduler import applied, plan

KINDS = {"H100": 80, "A100": 80, "L4": 24, "V100": 32}
PER_NODE = 8
TEAMS = 10
WIDTHS = (256, 512, 1024, 2048)
ROUND_S = 0.5
"""From the end of a round to the next preview."""


def pools() -> tuple[Any, ...]:
    return tuple(
        pool(
            kind.lower(), accelerator=kind, resourceName="nvidia.com/gpu", memoryGib=memory,
            nodeSelector={"busbar.dev/accelerator": kind}, tolerations=[],
        )
        for kind, memory in KINDS.items()
    )  # fmt: skip


def nodes(count: int) -> tuple[Node, ...]:
    kinds = list(KINDS)
    return tuple(
        Node(
            f"node-{i:05d}", (("busbar.dev/accelerator", kinds[i % len(kinds)]),), (), 128_000, 1_048_576,
            1_000_000, (("nvidia.com/gpu", PER_NODE),), True,
        )
        for i in range(count)
    )  # fmt: skip


def of_job(number: int, where: str | None, kind: str) -> TrainingJob:
    """A job of one accelerator's worth of eight, of one of a few sizes; running on a node or waiting."""
    width = WIDTHS[number % len(WIDTHS)]
    config = {
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": 8, "num_attention_heads": 8,
        "intermediate_size": 4 * width, "vocab_size": 32000,
    }  # fmt: skip
    status: dict[str, Any] = {"phase": "Queued"}
    if where is not None:
        status = {
            "phase": "Running",
            "attempt": 1,
            "admission": {
                "id": f"a{number}", "pool": kind.lower(), "accelerator": kind, "mode": "resident", "pods": 1,
                "acceleratorsPerPod": PER_NODE, "nodes": [where],
                "perPod": {"acceleratorsM": 1000 * PER_NODE, "cpuM": 8000, "memoryMib": 65536},
                "admittedAt": (NOW - timedelta(minutes=number % 300)).isoformat(),
                "startedAt": (NOW - timedelta(minutes=number % 300)).isoformat(),
            },
            "progress": {"step": 10, "totalSteps": 100_000, "tokensPerSecond": 20_000.0 + number % 7, "tokens": 1},
        }  # fmt: skip
    made = job(
        f"job-{number}",
        status=status,
        engine={**engine_of(config), "steps": 100_000, "mode": "resident"},
        shape={"acceleratorsPerPod": PER_NODE, "cpu": "8", "memory": "64Gi"},
    )
    made.metadata.namespace = f"team-{number % TEAMS}"
    return made


def cluster(node_count: int, job_count: int) -> ClusterObjects:
    places = nodes(node_count)
    kinds = list(KINDS)
    jobs = []
    for number in range(job_count):
        runs = number < job_count // 2 and number < node_count
        jobs.append(of_job(number, places[number].name if runs else None, kinds[number % len(kinds)]))
    tenants = tuple(tenant(f"team-{i}", [f"team-{i}"]) for i in range(TEAMS))
    return ClusterObjects(jobs=tuple(jobs), pools=pools(), tenants=tenants, nodes=places)


def child_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(seen: ClusterObjects, previews: int, *, held: bool) -> tuple[list[float], float, float]:
    """Seconds of each preview, and the mean CPU seconds of one here and in the child.

    Args:
        held: the child got the snapshot when its round ended, as it does while people request previews.
    """
    policy = policy_of(SETTINGS)
    nobody: Any = None
    now = utc_now()  # the previews' clock: nothing has happened since the round but the draft
    first = build(seen, now)
    decided, _ = plan(first, replace(policy, solver=False), now.timestamp())
    last = [applied(first, decided, now.timestamp())]
    forecasts = Forecaster(nobody, nobody, JobHistory(), SETTINGS, nobody, policy)
    made = Previews(lambda: seen, lambda: last[0], forecasts, policy, SETTINGS.forecast_draft_s)
    await made.of(of_job(0, None, "H100"), admin=False)  # starts the process
    assert made.worker._child is not None
    child = made.worker._child.pid
    own, theirs = time.process_time(), child_cpu_s(child)
    seconds = []
    for number in range(previews):
        draft = of_job(number, None, "H100")
        draft.metadata.name, draft.metadata.uid = f"draft-{number}", ""
        last[0] = replace(last[0])  # a round has run since
        if held:
            await made.worker.hold(last[0])
            await asyncio.sleep(ROUND_S)
        start = time.perf_counter()
        found = await made.of(draft, admin=False)
        seconds.append(time.perf_counter() - start)
        assert found.reason, found
    spent = ((time.process_time() - own) / previews, (child_cpu_s(child) - theirs) / previews)
    await made.close()
    return seconds, *spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--previews", type=int, default=40)
    given = parser.parse_args()
    seen = cluster(given.nodes, given.jobs)
    print(
        f"{given.jobs} jobs on {given.nodes} nodes, {given.previews} previews, Python {platform.python_version()}"
    )
    for held in (True, False):
        seconds, own, theirs = asyncio.run(measure(seen, given.previews, held=held))
        ordered = sorted(seconds)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        print("the round's snapshot is held" if held else "the snapshot is sent with the question")
        print(
            f"  wall ms: p50 {1000 * statistics.median(seconds):.0f}, p95 {1000 * p95:.0f}, "
            f"worst {1000 * ordered[-1]:.0f}"
        )
        print(
            f"  CPU ms of a preview and its round: operator {1000 * own:.0f}, its child {1000 * theirs:.0f}"
        )


if __name__ == "__main__":
    main()
