"""Jobs of Gavel's generator at 0.9, 1.0 and 1.1 of what the accelerators can do, beside two published policies.

The load is that of the jobs whose completion is measured, while they arrive: the shortest time in which the
accelerators could do their work (a linear program over the time of each job on each type: jobs may be split, stopped
and spread at will), divided by the time over which they arrive. 1.0 is therefore more than any scheduler carries: at
1.0 and 1.1 the queue grows from the first arrival to the last.

Peers decide a new allocation every six minutes and pay the same 30 s for each restart. They know the remaining work of
each job where it is known to ours, and always know every speed.

`utilisation_window` is the part of the accelerators that ours holds between the first and the last measured arrival,
`waiting_window` the jobs that wait then.

Every load and seed is a part that a later run takes up again. One part takes three to five minutes of one core.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.progress import shown
from benchmarks.scheduling.gavel_generator import generate
from benchmarks.scheduling.parts import folder, kept
from benchmarks.scheduling.peers import finish_time, max_min
from benchmarks.scheduling.static_makespan import least_s

from busbar.scheduler import Policy
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.metrics import Result
from busbar.scheduler.simulate.readers import Throughputs, gavel_throughputs
from busbar.scheduler.simulate.rounds import simulate_rounds
from busbar.scheduler.simulate.trace import Trace, TraceCluster

CLUSTER = TraceCluster({"v100": 36, "p100": 36, "k80": 36})
ORDER = ("v100", "p100", "k80")
LOADS = (0.9, 1.0, 1.1)
SEEDS = range(1, 6)
JOBS = 900
MEASURED = (400, 650)
CHARGE_S = 30.0
BARS = {"mean_h": 0.95, "p99_h": 1.0, "worst_ftf": 1.0}
"""Ours at most so many times the better peer."""


def loaded(throughputs: Throughputs, seed: int, load: float) -> Trace:
    """A trace whose measured jobs ask for `load` of the capacity while they arrive."""
    trace = generate(throughputs, CLUSTER, seed, JOBS, MEASURED)
    first, last = MEASURED
    inside = trace.jobs[first:last]
    span_s = trace.jobs[last].arrival_s - inside[0].arrival_s
    stretch = least_s(inside, CLUSTER, split=True) / load / span_s
    jobs = tuple(replace(job, arrival_s=job.arrival_s * stretch) for job in trace.jobs)
    return replace(trace, name=f"{trace.name} at {load}", jobs=jobs)


def rows(data: Path, loads: Iterable[float] = LOADS, seeds: Iterable[int] = SEEDS) -> list[dict[str, Any]]:
    """One row per load, seed and who decided."""
    table = data / "gavel" / "simulation_throughputs.json"
    place = folder("contended", table, JOBS, MEASURED)
    cases = [(load, seed) for load in loads for seed in seeds]

    def parts() -> Iterator[tuple[float, list[dict[str, Any]]]]:
        for number, (load, seed) in enumerate(cases, 1):
            trace = loaded(gavel_throughputs(table), seed, load)
            yield number / len(cases), kept(place / f"{round(100 * load)}-{seed}", _part(trace, load, seed))

    return [row for part in shown("contended", parts()) for row in part]


def _part(trace: Trace, load: float, seed: int) -> Iterator[dict[str, Any]]:
    """The peers', then ours with steps known and unknown, with the bars that the better peer sets."""
    same = {"load": load, "seed": seed, "charge_s": CHARGE_S}
    best = dict.fromkeys(BARS, float("inf"))
    for name, policy in (("max-min, aware", max_min(True)), ("finish-time, aware", finish_time())):
        row = simulate_rounds(trace, CLUSTER, policy, ORDER, CHARGE_S).to_json()
        best = {key: min(value, row[key]) for key, value in best.items()}
        yield _rounded(row | same | {"name": name, "who": "peer"})
    for known in (True, False):
        settings = Settings(charge_s=CHARGE_S, steps_known=known)
        result = simulate(trace, CLUSTER, Policy(), settings)
        row = result.to_json() | _window(trace, result)
        ratios = {key: round(row[key] / best[key], 4) for key in BARS}
        bars = {key: {"at_most": most, "met": ratios[key] <= most} for key, most in BARS.items()}
        yield _rounded(row | same | {"who": "busbar", "steps_known": known}) | {
            "ratios": ratios,
            "bars": bars,
        }


def _window(trace: Trace, result: Result) -> dict[str, float]:
    """Means over the time in which the measured jobs arrive."""
    measured = trace.measured_jobs()
    begin, end = measured[0].arrival_s, measured[-1].arrival_s
    waited = held = 0.0
    for (at, waiting, busy), (until, _, _) in pairwise(result.series):
        seconds = max(0.0, min(until, end) - max(at, begin))
        waited += waiting * seconds
        held += busy * seconds
    total = sum(CLUSTER.capacity().values())
    return {"utilisation_window": held / total / (end - begin), "waiting_window": waited / (end - begin)}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
