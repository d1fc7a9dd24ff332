"""The makespan of lists that are there from the beginning, over a lower bound: jobs of Gavel's generator, all submitted
at once, on three types of equal number. The load decides when all is done, not the longest job.

The bound is a linear program of this module's own over the time that each job spends on each type: a job may be split
between types, be interrupted for nothing, and use any accelerators of a type. No schedule ends earlier. A gang that needs
more than half of a type excludes others there at every moment, which the load of the types does not say; so the bound has
rows for that, and `over_plain_bound` is the ratio to the same program without them.

About ten minutes of one core.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scheduling import parts
from benchmarks.scheduling.gavel_generator import generate

from busbar.scheduler import Objective, Policy, highs
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.readers import gavel_throughputs
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

SIZES = ((100, 8), (300, 24))
"""Jobs, and accelerators of each type."""
SEEDS = range(1, 6)
CHARGE_S = 30.0
BAR = 1.04


def least_s(
    jobs: Sequence[TraceJob], cluster: TraceCluster, *, split: bool = False, gangs: bool = False
) -> float:
    """The shortest time in which the accelerators do the work of these jobs; no schedule ends earlier.

    Args:
        split: one job may run on several types at once, so that only the sum of the work counts.
        gangs: count what gangs that need more than half of a type exclude; else only the load of each type.
    """
    program = highs.Program()
    most = program.variable(1.0, 0.0, 1e9)
    used: dict[str, list[tuple[int, float]]] = {kind: [] for kind in cluster.capacity()}
    for job in jobs:
        times = {kind: program.variable(0.0, 0.0, 1e9) for kind in job.speeds if kind in used}
        program.row([(x, job.speeds[kind] / job.work) for kind, x in times.items()], low=1.0)
        if not split:
            program.row([*((x, 1.0) for x in times.values()), (most, -1.0)], high=0.0)
        for kind, x in times.items():
            used[kind].append((x, float(job.accelerators)))
    for kind, count in cluster.capacity().items():
        program.row([*used[kind], (most, -float(count))], high=0.0)
        large = [(x, 1.0) for x, size in used[kind] if 2 * size > count]
        least = min((size for _, size in used[kind] if 2 * size > count), default=0.0)
        program.row([*large, (most, -1.0)] if gangs else [], high=0.0)
        for x, size in used[kind] if gangs and large else ():
            if 2 * size <= count < size + least:
                program.row([*large, (x, 1.0), (most, -1.0)], high=0.0)
    found = highs.solve(program)
    assert found is not None
    return found.objective


def listed(data: Path, jobs: int, each: int, seed: int) -> tuple[Trace, TraceCluster]:
    """A list of jobs, and the cluster."""
    cluster = TraceCluster(dict.fromkeys(("v100", "p100", "k80"), each))
    table = gavel_throughputs(data / "gavel" / "simulation_throughputs.json")
    trace = generate(table, cluster, seed, jobs, (0, jobs))
    return replace(trace, jobs=tuple(replace(job, arrival_s=0.0) for job in trace.jobs)), cluster


def rows(data: Path) -> list[dict[str, Any]]:
    """One row for each list; those of an interrupted run are kept (`parts.py`)."""
    folder = parts.folder(
        "static-makespan", data / "gavel" / "simulation_throughputs.json", Policy().hash, CHARGE_S
    )
    found: list[dict[str, Any]] = []
    for jobs, each in SIZES:
        for seed in SEEDS:
            found += parts.kept(folder / f"{jobs}-{seed}.jsonl", _row(data, jobs, each, seed))
    return found


def _row(data: Path, jobs: int, each: int, seed: int) -> Iterator[dict[str, Any]]:
    begin = time.perf_counter()
    trace, cluster = listed(data, jobs, each, seed)
    bound_s = least_s(trace.jobs, cluster, gangs=True)
    settings = Settings(charge_s=CHARGE_S, steps_known=True)
    ours = simulate(trace, cluster, Policy(objective=Objective.MAKESPAN), settings)
    ratio = ours.makespan_s / bound_s
    numbers = ours.to_json()
    yield {
        "jobs": jobs,
        "accelerators_of_each_type": each,
        "seed": seed,
        "charge_s": CHARGE_S,
        "bound_h": round(bound_s / 3600, 2),
        "makespan_h": round(ours.makespan_s / 3600, 2),
        "over_bound": round(ratio, 4),
        "over_plain_bound": round(ours.makespan_s / least_s(trace.jobs, cluster), 4),
        "mean_h": round(numbers["mean_h"], 2),
        "moves_per_job": round(numbers["moves_per_job"], 2),
        "bars": {"over_bound": {"at_most": BAR, "met": ratio <= BAR}},
    }
    what = f"{jobs} jobs, seed {seed}"
    print(f"  {what}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
