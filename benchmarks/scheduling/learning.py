"""The table's row: T1 with 60 % of the cells and every P100 rate hidden, and 10 % noise in the reports.

Hidden are three in five of the (class, shape, type) cells of V100 and K80, drawn per seed, and all of the P100's; the
others are given as one measurement with the same noise. That a job does not fit a type is known. The policy has only
data sheets and reports.

Rows
    learning    one per seed and for steps known and unknown, against the same policy that knows every speed;
                and their mean, with how many true rates lie in the table's 90 % intervals: over all cells, at
                every plan of all seeds. Beside it the same with an error that every report of a run shares
    lies        the same trace shared out among four tenants in turn, of which one reports falsely, and forges
                its progress to match: its mean time and the others', over those when it is honest. Every lie
                is told by each tenant in turn under each seed; single pairs differ by 5 % either way because of the
                different schedule, so the mean over the pairs and its standard error count
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

from busbar.scheduler import Policy
from busbar.scheduler.model.table import Cell, PerformanceTable, Source
from busbar.scheduler.performance.learning import quarantined
from busbar.scheduler.performance.reports import distrusted
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.learner import Lie, TableLearner, honest
from busbar.scheduler.simulate.metrics import Result
from busbar.scheduler.simulate.speeds import true_table
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

NOISE = 0.1
HIDDEN = 0.6
UNSEEN = "p100"
SEEDS = range(1, 9)
LIE_SEEDS = range(1, 4)
TENANTS = 4
LIES: dict[str, dict[str, float]] = {
    "all twice as fast": {"v100": 2.0, "p100": 2.0, "k80": 2.0},
    "all half as fast": {"v100": 0.5, "p100": 0.5, "k80": 0.5},
    "V100 five times as fast": {"v100": 5.0},
    "half as fast but on V100": {"p100": 0.5, "k80": 0.5},
    "a little of both": {"v100": 1.15, "p100": 0.9, "k80": 0.9},
    "too little to be noticed": {"v100": 1.04, "p100": 0.97, "k80": 0.97},
}

Row = dict[str, Any]


def shaped(trace: Trace) -> Trace:
    """The classes without their size, because the size is the cell's shape."""
    jobs = tuple(
        replace(job, workload_class=job.workload_class.removesuffix(f" x{job.pods}")) for job in trace.jobs
    )
    return replace(trace, jobs=jobs)


def hidden(trace: Trace, cluster: TraceCluster, seed: int) -> PerformanceTable:
    """The table at the start."""
    truth = true_table(trace, cluster)
    random = Random(seed)
    possible = [cell for cell in truth.cells if cell.speed > 0]
    others = sorted((c for c in possible if c.accelerator != UNSEEN), key=_key)
    shown = random.sample(others, len(others) - round(HIDDEN * len(others)))
    cells = [
        replace(
            cell,
            speed=cell.speed * math.exp(random.gauss(0.0, NOISE)),
            low=None,
            high=None,
            source=Source.MEASURED,
            samples=1,
        )
        for cell in sorted(shown, key=_key)
    ]
    cells += [cell for cell in truth.cells if cell.speed <= 0]
    return replace(truth, cells=tuple(cells))


def _key(cell: Cell) -> tuple[str, str, int]:
    return (cell.workload_class, cell.accelerator, cell.accelerators_m)


class Watched(TableLearner):
    """Counts, at each plan, how many true rates are in their intervals."""

    def __init__(
        self, trace: Trace, table: PerformanceTable, seed: int, lie: Lie = honest, lasting: bool = False
    ) -> None:
        super().__init__(table, NOISE, seed, lie, lasting)
        self.truth = {
            (job.workload_class, kind, job.pods * job.per_pod_m): speed
            for job in trace.jobs
            for kind, speed in job.speeds.items()
        }
        self.rows = {(name, size, "resident", 1.0, 0) for name, _, size in self.truth}
        self.counts: list[dict[str, tuple[int, int]]] = []

    def current(self, jobs: Iterable[TraceJob]) -> PerformanceTable:
        table = super().current(jobs)
        counts: dict[str, tuple[int, int]] = {}
        for cell in table.learned:
            true = self.truth.get(_key(cell))
            if true is None or cell.tenant or cell.low is None or cell.high is None:
                continue
            for name in ("all", str(cell.source), UNSEEN if cell.accelerator == UNSEEN else "others"):
                inside, of = counts.get(name, (0, 0))
                counts[name] = (inside + (cell.low <= true <= cell.high), of + 1)
        self.counts.append(counts)
        return table


def run(
    trace: Trace,
    cluster: TraceCluster,
    seed: int,
    known: bool = True,
    lie: Lie = honest,
    lasting: bool = False,
) -> tuple[Result, Watched]:
    learner = Watched(trace, hidden(trace, cluster, seed), seed, lie, lasting)
    return simulate(trace, cluster, Policy(), Settings(steps_known=known), learner=learner), learner


def coverage(learners: list[Watched]) -> dict[str, float]:
    """Share of true rates inside their interval, over all plans and at the ends."""
    found: dict[str, float] = {}
    for name in ("all", UNSEEN, "others", "ratio", "measured"):
        pairs = [counts[name] for learner in learners for counts in learner.counts if name in counts]
        found[name] = sum(i for i, _ in pairs) / max(1, sum(n for _, n in pairs))
    for label, at in (("first plan", 1), ("last plan", -1)):
        pairs = [learner.counts[at]["all"] for learner in learners]
        found[label] = sum(i for i, _ in pairs) / max(1, sum(n for _, n in pairs))
    return found


def rows(trace: Trace, cluster: TraceCluster) -> list[Row]:
    """All rows of the case."""
    trace = shaped(trace)
    return [*_learning_rows(trace, cluster), *_lie_rows(trace, cluster)]


def _learning_rows(trace: Trace, cluster: TraceCluster) -> list[Row]:
    found: list[Row] = []
    for known, lasting in ((True, False), (False, False), (True, True)):
        full = simulate(trace, cluster, Policy(), Settings(steps_known=known)).to_json()
        setting = {"steps_known": known, "error": "of a run" if lasting else "of a report"}
        found.append({"name": "every speed known"} | setting | _numbers(full))
        learners: list[Watched] = []
        seeds: list[Row] = []
        for seed in SEEDS:
            result, learner = run(trace, cluster, seed, known, lasting=lasting)
            numbers = _numbers(result.to_json())
            more = {
                "over_full_knowledge": round(numbers["mean_h"] / full["mean_h"], 4),
                "explored": round(learner.table.explored.share, 4),
                "coverage": round(coverage([learner])["all"], 4),
                "quarantined": len(quarantined(learner.table)),
            }
            seeds.append({"name": "learning", "seed": seed} | setting | numbers | more)
            learners.append(learner)
        found += [*seeds, {"name": "learning, all seeds"} | setting | _mean_row(seeds, learners)]
    return found


def _numbers(result: Row) -> Row:
    names = (
        "mean_h",
        "median_h",
        "p99_h",
        "worst_ftf",
        "moves_per_job",
        "lost_h_per_job",
        "policy",
        "decision_ms_p50",
    )
    return {name: round(v, 4) if isinstance(v := result[name], float) else v for name in names}


def _mean_row(seeds: list[Row], learners: list[Watched]) -> Row:
    row: Row = {"over_full_knowledge": round(statistics.mean(s["over_full_knowledge"] for s in seeds), 4)}
    row["worst_seed_over_full_knowledge"] = max(s["over_full_knowledge"] for s in seeds)
    row["coverage"] = {name: round(share, 4) for name, share in coverage(learners).items()}
    row["explored_most"] = max(s["explored"] for s in seeds)
    row["bars"] = {
        "over_full_knowledge": {"at_most": 1.1, "met": row["over_full_knowledge"] <= 1.1},
        "coverage": {"from": 0.85, "to": 0.95, "met": 0.85 <= row["coverage"]["all"] <= 0.95},
        "explored_most": {"at_most": 0.05, "met": row["explored_most"] <= 0.05},
    }
    return row


def _lie_rows(trace: Trace, cluster: TraceCluster) -> list[Row]:
    names = [f"tenant-{number}" for number in range(TENANTS)]
    shared = replace(
        trace, jobs=tuple(replace(job, tenant=names[i % TENANTS]) for i, job in enumerate(trace.jobs))
    )
    true = {seed: _means(shared, run(shared, cluster, seed)[0]) for seed in LIE_SEEDS}
    found: list[Row] = []
    for what, factors in LIES.items():
        mine: list[float] = []
        others: list[float] = []
        caught = 0
        for seed in LIE_SEEDS:
            for liar in names:
                result, learner = run(shared, cluster, seed, lie=_lying(liar, factors))
                means, before = _means(shared, result), true[seed]
                mine.append(means[liar] / before[liar])
                rest = [name for name in names if name != liar]
                others.append(sum(means[n] for n in rest) / sum(before[n] for n in rest))
                caught += liar in distrusted(learner.table)
        gain = statistics.mean(mine)
        found.append(
            {
                "name": "lies",
                "lie": what,
                "pairs": len(mine),
                "liars_mean_over_honest": round(gain, 4),
                "standard_error": round(statistics.stdev(mine) / math.sqrt(len(mine)), 4),
                "every_pair": [round(value, 3) for value in mine],
                "others_mean_over_honest": round(statistics.mean(others), 4),
                "caught": caught,
                "bars": {"liars_mean_over_honest": {"at_least": 1.0, "met": gain >= 1.0}},
            }
        )
    return found


def _lying(liar: str, factors: dict[str, float]) -> Lie:
    return lambda job, kind: factors.get(kind, 1.0) if job.tenant == liar else 1.0


def _means(trace: Trace, result: Result) -> dict[str, float]:
    """Mean completion time by tenant (all tenants have nearly the same number of jobs)."""
    times = {job.id: job.jct_s for job in result.jobs}
    by_tenant: dict[str, list[float]] = {}
    for job in trace.jobs:
        by_tenant.setdefault(job.tenant, []).append(times[job.id])
    return {name: statistics.mean(values) for name, values in by_tenant.items()}
