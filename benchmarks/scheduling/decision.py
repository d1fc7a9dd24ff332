"""Decision time: 1,000 nodes x 8, 2,000 running and 2,000 waiting jobs, 10 tenants."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from typing import Any

from benchmarks.scheduling.generator import NOW, generate

from busbar.scheduler import Job, JobId, Policy, Resources, check_plan, plan, react
from busbar.scheduler.simulate.metrics import percentile

RUNS = 20


def rows(nodes: int = 1000, runs: int = RUNS) -> list[dict[str, Any]]:
    """CPU seconds of `plan` and `react` over seeds, and of the reclaim of a quarter of the cluster."""
    plans, quick, reclaims, wrong = [], [], [], 0
    for seed in range(runs):
        snapshot = generate(nodes, 2 * nodes, 2 * nodes, seed=seed)
        begin = time.process_time()
        result, _ = plan(snapshot, Policy(), NOW)
        plans.append(time.process_time() - begin)
        wrong += len(check_plan(snapshot, result))
        begin = time.process_time()
        react(snapshot, Policy(), NOW)
        quick.append(time.process_time() - begin)
    for seed in range(3):
        snapshot = generate(nodes, 2 * nodes, 2 * nodes, seed=seed)
        gang = nodes // 4
        owner = snapshot.tenants[0].name
        guaranteed = tuple(replace(q, guaranteed_m=q.guaranteed_m * 100) for q in snapshot.tenants[0].quotas)
        tenants = (replace(snapshot.tenants[0], quotas=guaranteed), *snapshot.tenants[1:])
        job = Job(
            JobId("reclaim"),
            "reclaim",
            "ns",
            owner,
            min_pods=gang,
            max_pods=gang,
            per_pod=Resources(8000),
            accelerators=("H100",),
            priority=1000,
            submitted_at_s=NOW,
        )
        begin = time.process_time()
        plan(replace(snapshot, tenants=tenants, jobs=(*snapshot.jobs, job)), Policy(), NOW)
        reclaims.append(time.process_time() - begin)
    memory_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return [
        {
            "nodes": nodes,
            "runs": runs,
            "plan_cpu_s": {"p50": round(percentile(plans, 50), 3), "p99": round(percentile(plans, 99), 3)},
            "react_cpu_s": {"p50": round(percentile(quick, 50), 3), "p99": round(percentile(quick, 99), 3)},
            "reclaim_quarter_cpu_s": round(max(reclaims), 3),
            "violations": wrong,
            "peak_memory_gib": round(memory_gib, 3),
            "solver_runs": 0,
            "bars": {
                "plan_p99_s": {"at_most": 1.0, "met": percentile(plans, 99) <= 1.0},
                "react_p99_s": {"at_most": 0.05, "met": percentile(quick, 99) <= 0.05},
                "peak_memory_gib": {"at_most": 1.0, "met": memory_gib <= 1.0},
            },
        }
    ]
