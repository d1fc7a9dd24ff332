"""Deadlines: ElasticFlow's own trace and speeds, beside ElasticFlow's algorithm re-implemented from its paper.

195 jobs over two days (models, batch sizes, iterations, deadlines) at the iterations per second that ElasticFlow measured
on T4; each may have from one accelerator up to the largest size that is faster than all smaller ones, at most 16. A
deadline is 0.5 to 1.5 times the time that the job takes with the accelerators that the trace names, so that not all can
be kept on any cluster. Clusters: 16, 32 and 48 nodes of 4. A start, the first one too, costs nothing or 30 s, for both
alike; the peer does not know of it, as in the paper. Both plan at arrivals and ends, and else every 240 s, its slot.

The peer (`ElasticFlow`): at a job's arrival, with the admitted jobs in order of deadline and sizes that are powers of two,
the least x with which min(x, what is free) in each slot is enough is the job's share; if any job has none, the new one is
refused. In the present slot each has its share, and the rest goes where a doubling saves most accelerator-time later. A
refused job gets what is left after that: it counts if it is in time all the same.

Bars: at least as many deadlines kept as by the peer, and at least 95 % of what was promised. `in_reach` is the bound: so
many jobs can keep their deadline alone, started at once with the fastest of their sizes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.progress import shown
from benchmarks.scheduling.elastic_peers import Config, actions, place
from numpy.typing import NDArray

from busbar.scheduler import Job, JobId, Plan, Policy, Snapshot
from busbar.scheduler.simulate.engine import Decide, Settings, simulate
from busbar.scheduler.simulate.metrics import Result
from busbar.scheduler.simulate.scaling import elasticflow
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

TYPE = "t4"
PER_NODE = 4
NODES = (16, 32, 48)
RESTARTS_S = (0.0, 30.0)
SLOT_S = 240.0
PROMISES_KEPT = 0.95
NUMBERS = ("deadlines", "deadlines_kept", "promises", "promises_kept", "mean_h", "p99_h", "moves_per_job")


@dataclass
class ElasticFlow:
    """A decider for the simulator (`simulate(..., decide=...)`)."""

    trace: Trace
    cluster: TraceCluster
    admitted: dict[JobId, bool] = field(default_factory=dict)
    _truth: dict[str, TraceJob] = field(default_factory=dict)

    def __call__(self, snapshot: Snapshot, policy: Policy, now: float) -> tuple[Plan, None]:
        jobs = {job.id: job for job in snapshot.jobs}
        for job in sorted(jobs.values(), key=lambda job: (job.submitted_at_s, job.id)):
            if job.id not in self.admitted:
                kept = [one for one in jobs.values() if self.admitted.get(one.id)]
                self.admitted[job.id] = self._filled([*kept, job], now) is not None
        own = [job for job in jobs.values() if self.admitted[job.id]]
        counts = self._filled(own, now)
        if counts is None:  # one is late by now: it keeps what it has, the others are filled again
            counts = self._filled(own, now, late=True)
        assert counts is not None
        free = self.cluster.capacity()[TYPE] - sum(counts.values())
        free = self._extended(counts, jobs, free)
        rest = {job.id: 0 for job in jobs.values() if not self.admitted[job.id]}
        for name in sorted(rest, key=lambda name: (jobs[name].submitted_at_s, name)):
            if free:
                rest[name], free = 1, free - 1
        self._extended(rest, jobs, free)
        chosen: dict[JobId, Config] = {
            name: (TYPE, count) for name, count in (counts | rest).items() if count
        }
        held = {job.id: job.run.placement for job in snapshot.jobs if job.run is not None}
        return Plan(id=f"{now}", at_s=now, actions=actions(held, place(snapshot, chosen, held))), None

    def _speeds(self, job: Job) -> NDArray[np.float64]:
        """Of 1, 2, 4, ... accelerators; sizes beyond the fastest are left out."""
        if not self._truth:
            self._truth = {one.id: one for one in self.trace.jobs}
        truth = self._truth[job.id]
        sizes = [2**i for i in range(int(math.log2(truth.max_pods or 1)) + 1)]
        found = np.array([truth.speed(TYPE, 1000 * n, -(-n // PER_NODE)) for n in sizes])
        return found[: int(np.argmax(found)) + 1]

    def _filled(self, jobs: list[Job], now: float, *, late: bool = False) -> dict[JobId, int] | None:
        """The accelerators of each job in the present slot; None: not all are in time."""
        last = max((job.deadline_s or now for job in jobs), default=now)
        slots = max(1, math.ceil((last - now) / SLOT_S))
        free = np.full(slots, self.cluster.capacity()[TYPE])
        found: dict[JobId, int] = {}
        for job in sorted(jobs, key=lambda job: (job.deadline_s or 0.0, job.id)):
            share = self._share(job, free, now)
            if share is None:
                if not late:
                    return None
                share = np.minimum(free[:1], 2 ** (len(self._speeds(job)) - 1))
                share[0] = 2 ** int(math.log2(share[0])) if share[0] else 0
            free[: len(share)] -= share
            found[job.id] = int(share[0])
        return found

    def _share(self, job: Job, free: NDArray[np.int64], now: float) -> NDArray[np.int64] | None:
        """What the least sufficient size takes of each slot."""
        assert job.deadline_s is not None
        assert job.remaining_work is not None
        seconds = np.clip(job.deadline_s - now - SLOT_S * np.arange(len(free)), 0.0, SLOT_S)
        speeds = np.concatenate([[0.0], self._speeds(job)])
        steps = np.floor(np.log2(np.maximum(free, 0.5))).astype(np.int64) + 1
        for most in range(1, len(speeds)):
            sizes = np.minimum(steps, most)
            done = np.cumsum(speeds[sizes] * seconds)
            if done[-1] >= job.remaining_work - 1e-6:
                end = int(np.searchsorted(done, job.remaining_work - 1e-6)) + 1
                return np.where(sizes > 0, 2 ** np.maximum(sizes - 1, 0), 0)[:end]
        return None

    def _extended(self, counts: dict[JobId, int], jobs: dict[JobId, Job], free: int) -> int:
        """Double jobs while accelerators are free, where that saves most per accelerator; what is left."""
        while free > 0:
            best: tuple[float, JobId] | None = None
            for name, count in counts.items():
                if not 0 < count <= free:
                    continue
                speeds, step = self._speeds(jobs[name]), int(math.log2(count))
                if step + 1 < len(speeds):
                    gain = (speeds[step + 1] - speeds[step]) / speeds[0] / count
                    best = max(best or (0.0, name), (float(gain), name))
            if best is None or best[0] <= 0:
                break
            free -= counts[best[1]]
            counts[best[1]] *= 2
        return free


def rows(data: Path) -> list[dict[str, Any]]:
    """Per cluster and restart cost: the peer, then ours with its bars."""
    return list(shown("deadlines", _measured(data / "elasticflow")))


def _measured(data: Path) -> Iterator[tuple[float, dict[str, Any]]]:
    path = data / "traces_for_ElasticFlow" / "elasticVpollux_e.csv"
    found = elasticflow(path, {TYPE: data / "throughputs_T4"}, {TYPE: PER_NODE})
    cases = [(nodes, restart_s) for nodes in NODES for restart_s in RESTARTS_S]
    for number, (nodes, restart_s) in enumerate(cases):
        cluster = TraceCluster({TYPE: nodes}, {TYPE: PER_NODE})
        trace = replace(found, jobs=tuple(replace(job, restart_s=restart_s) for job in found.jobs))
        bound = in_reach(trace, cluster, restart_s)
        about = {"accelerators": nodes * PER_NODE, "restart_s": restart_s, "in_reach": bound}
        peer = about | _replayed("elasticflow", trace, cluster, ElasticFlow(trace, cluster))
        yield (number + 0.5) / len(cases), peer
        ours = about | _replayed("busbar", trace, cluster, None)
        yield (number + 1) / len(cases), _judged(ours, peer)


def in_reach(trace: Trace, cluster: TraceCluster, restart_s: float) -> int:
    """Deadlines that each could be kept if its job had the cluster for itself."""

    def fastest(job: TraceJob) -> float:
        most = min(job.max_pods or 1, cluster.capacity()[TYPE])
        return max(job.speed(TYPE, 1000 * size, -(-size // PER_NODE)) for size in range(1, most + 1))

    return sum(
        job.deadline_s is not None and job.arrival_s + restart_s + job.work / fastest(job) <= job.deadline_s
        for job in trace.jobs
    )


def _replayed(who: str, trace: Trace, cluster: TraceCluster, peer: Decide | None) -> dict[str, Any]:
    begin = time.process_time()
    settings = Settings(round_s=SLOT_S, charge_first=True, check=peer is None)
    if peer is None:
        result = simulate(trace, cluster, Policy(), settings, who)
    else:
        result = simulate(trace, cluster, Policy(), settings, who, decide=peer)
    return _row(who, result, peer, time.process_time() - begin)


def _row(who: str, result: Result, peer: Decide | None, seconds: float) -> dict[str, Any]:
    numbers = result.to_json()
    assert isinstance(numbers, dict)
    if isinstance(peer, ElasticFlow):
        own = [job for job in result.jobs if peer.admitted[JobId(job.id)]]
        numbers |= {"promises": len(own), "promises_kept": sum(job.is_in_time for job in own)}
    row = {name: round(float(str(numbers[name])), 4) for name in NUMBERS}
    return {"who": who, **row, "cpu_seconds": round(seconds, 1)}


def _judged(row: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    part = row["promises_kept"] / row["promises"]
    kept = {"at_least": peer["deadlines_kept"], "met": row["deadlines_kept"] >= peer["deadlines_kept"]}
    promises = {"at_least": PROMISES_KEPT, "part": round(part, 4), "met": part >= PROMISES_KEPT}
    return row | {"bars": {"deadlines_kept": kept, "promises_kept": promises}}
