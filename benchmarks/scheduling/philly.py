"""Philly's jobs on 80 nodes of eight: the replay with which forecasts are compared.

The trace begins on 4 September, so that the measured window starts with a realistic queue. Until `EXACT_FROM` it is
replayed with the queue model of `busbar.scheduler.forecast.queue_model` and true durations; from then on the planner
decides as in a cluster: `react` at every arrival and every end, `plan` every ten minutes. It does not know durations.
A start after a job's first costs 30 s. Jobs save every ten minutes and when they are stopped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from busbar.scheduler import (
    ActionKind,
    Event,
    Job,
    JobId,
    Memo,
    Node,
    Placement,
    Plan,
    Policy,
    Pool,
    Resources,
    Run,
    Snapshot,
    Tenant,
    applied,
    plan,
    react,
)
from busbar.scheduler.forecast.queue_model import QueueModel
from busbar.scheduler.forecast.queue_types import (
    Arrival,
    QueuedJob,
    QueueRequest,
    QueueStart,
    Rules,
    RunOption,
    Share,
)
from busbar.scheduler.simulate.readers import philly
from busbar.scheduler.simulate.trace import TraceJob

JOBS = Path("philly") / "philly_jobs.csv"
NODES, PER_NODE = 80, 8
FIRST, LAST = datetime(2017, 10, 15).timestamp(), datetime(2017, 11, 15).timestamp()
"""Jobs submitted in between are measured."""
EXACT_FROM = datetime(2017, 10, 14).timestamp()
CHARGE_S = 30.0
ROUND_S = 600.0
"""Interval of full plans; events in between are answered by `react`."""


@dataclass(frozen=True)
class Load:
    """The trace, and the tenants' weights."""

    jobs: tuple[TraceJob, ...]
    weights: dict[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One event: a job started on these nodes, was stopped, or ended."""

    at: float
    kind: str
    job: str
    nodes: tuple[str, ...] = ()


def load(data: Path) -> Load:
    """All of the trace; weights are the virtual clusters' GPU time of October."""
    jobs = philly(data / JOBS, "gpu", PER_NODE).jobs
    weights = dict.fromkeys(sorted({job.tenant for job in jobs}), 0.0)
    for job in jobs:
        if datetime.fromtimestamp(job.arrival_s).month == 10:
            weights[job.tenant] += job.work * job.accelerators
    total = sum(weights.values())
    return Load(jobs, {name: max(amount / total, 1e-6) for name, amount in weights.items()})


def empty(weights: dict[str, float]) -> Snapshot:
    """The cluster without jobs."""
    nodes = tuple(Node(_name(i), "gpu", Resources(1000 * PER_NODE)) for i in range(NODES))
    tenants = tuple(Tenant(name, weight=weight) for name, weight in sorted(weights.items()))
    return Snapshot((Pool("gpu", "gpu"),), nodes, tenants)


def _name(node: int) -> str:
    return f"gpu-{node:05d}"


def as_seen(job: TraceJob) -> Job:
    """The job without its length, as the planner sees it."""
    return Job(
        JobId(job.id),
        job.id,
        job.tenant,
        job.tenant,
        min_pods=job.pods,
        max_pods=job.pods,
        per_pod=Resources(job.per_pod_m),
        submitted_at_s=job.arrival_s,
        restart_s=CHARGE_S,
    )


def size_m(job: Job) -> int:
    return job.min_pods * job.per_pod.accelerators_m


class Board:
    """The replayed cluster, event by event. The service that jobs have received is updated only in snapshots."""

    def __init__(self, trace: Load) -> None:
        self.base = empty(trace.weights)
        self.live: dict[str, Job] = {}

    def submit(self, job: TraceJob) -> None:
        self.live[job.id] = as_seen(job)

    def apply(self, row: Row) -> Job:
        """Apply one event; returns the job as it was before."""
        job = until(self.live[row.job], row.at)
        if row.kind == "end":
            del self.live[row.job]
        elif row.kind == "stop":
            preemptions = job.preemptions + 1
            self.live[row.job] = replace(job, run=None, preemptions=preemptions, last_move_at_s=row.at)
        else:
            placement = Placement("gpu", "gpu", "resident", row.nodes, job.per_pod)
            self.live[row.job] = replace(job, run=Run(placement, row.at, row.at))
        return job

    def snapshot(self, now: float) -> Snapshot:
        return replace(self.base, jobs=tuple(until(job, now) for job in self.live.values()))


def until(job: Job, now: float) -> Job:
    """A running job with its service counted until now and a checkpoint now."""
    run = job.run
    if run is None:
        return job
    since = run.started_at_s if run.saved_at_s is None else run.saved_at_s
    attained_s = job.attained_s + (now - since) * run.placement.accelerators_m / 1000
    return replace(job, attained_s=attained_s, run=replace(run, saved_at_s=now))


# The light replay


def light(trace: Load, policy: Policy, until_s: float) -> list[Row]:
    """The trace from an empty cluster by the light model, over true durations."""
    model = _Light(trace, policy)
    model.wait_s(model.arrivals(until_s), until_s - model.start.now)
    return model.rows


class _Light(QueueModel):
    def __init__(self, trace: Load, policy: Policy) -> None:
        self.trace = trace
        self.names = sorted(trace.weights)
        self.job_of: dict[int, str] = {}
        self.kept: list[QueuedJob] = []
        self.rows: list[Row] = []
        shares = tuple(Share(trace.weights[name], 0.0, float("inf")) for name in self.names)
        rules = Rules(
            policy.unknown_lateness_s, policy.min_run_s, policy.max_preemptions, policy.churn, 8, CHARGE_S
        )
        begin = trace.jobs[0].arrival_s
        never = QueuedJob(0, QueueRequest((RunOption(0, 1000 * PER_NODE + 1, 1, 9.0),), 9000), begin, 1.0)
        free = ((1000 * PER_NODE,) * NODES,)
        super().__init__(QueueStart(begin, free, float(NODES * PER_NODE), shares, rules), (), never)

    def arrivals(self, until_s: float) -> Iterator[Arrival]:
        requests: dict[tuple[int, int], QueueRequest] = {}
        for job in self.trace.jobs:
            if job.arrival_s >= until_s:
                return
            shape = job.pods, job.per_pod_m
            total_m = job.pods * job.per_pod_m
            if shape not in requests:
                requests[shape] = QueueRequest(
                    (RunOption(0, job.per_pod_m, job.pods, total_m / 1000),), total_m
                )
            self.coming = job
            yield job.arrival_s, self.names.index(job.tenant), requests[shape], job.work

    def _submit(self, arrival: Arrival) -> QueuedJob:
        item = super()._submit(arrival)
        self.kept.append(item)
        self.job_of[id(item)] = self.coming.id
        return item

    def _run(self, job: QueuedJob, option: RunOption, nodes: tuple[int, ...], now: float) -> None:
        super()._run(job, option, nodes, now)
        self.rows.append(Row(now, "start", self.job_of[id(job)], tuple(_name(i) for i in sorted(nodes))))

    def _stop(self, job: QueuedJob, now: float) -> None:
        super()._stop(job, now)
        self.rows.append(Row(now, "stop", self.job_of[id(job)]))

    def _ended(self, job: QueuedJob, now: float) -> None:
        super()._ended(job, now)
        self.rows.append(Row(now, "end", self.job_of[id(job)]))


# The planner


def exact(trace: Load, policy: Policy, past: list[Row], from_s: float) -> Iterator[Row]:
    """The planner's actions from a time on; `past` has the events before it."""
    return _Exact(trace, policy, past, from_s).run(from_s)


class _Exact:
    def __init__(self, trace: Load, policy: Policy, past: list[Row], from_s: float) -> None:
        self.trace, self.policy = trace, replace(policy, solver_seconds=None)
        self.board = Board(trace)
        for job in trace.jobs:
            if job.arrival_s < from_s:
                self.board.submit(job)
        for row in past:
            if row.at < from_s:
                self.board.apply(row)
        work = {job.id: job.work for job in trace.jobs}
        self.left_s: dict[str, float] = {}
        self.from_s: dict[str, float] = {}
        self.number: dict[str, int] = {}
        self.ends: list[tuple[float, int, str]] = []
        self.counter = 0
        for name, waiting in self.board.live.items():
            now = until(waiting, from_s)
            received_s = now.attained_s / (size_m(now) / 1000) - CHARGE_S * now.preemptions
            self.left_s[name] = max(1.0, work[name] - max(0.0, received_s))
            self.board.live[name] = now
            if now.run is not None:
                self._runs(name, from_s)
        self.last: tuple[Snapshot, Plan] | None = None
        self.memo: Memo | None = None
        self.round_at = from_s

    def _runs(self, job: str, at: float) -> None:
        self.counter += 1
        self.number[job], self.from_s[job] = self.counter, at
        heapq.heappush(self.ends, (at + self.left_s[job], self.counter, job))

    def run(self, begin: float) -> Iterator[Row]:
        coming = [job for job in self.trace.jobs if job.arrival_s >= begin]
        position = 0
        while position < len(coming) or self.ends:
            now = min(
                coming[position].arrival_s if position < len(coming) else float("inf"),
                self.ends[0][0] if self.ends else float("inf"),
            )
            changed = False
            while self.ends and self.ends[0][0] <= now:
                _, number, name = heapq.heappop(self.ends)
                if self.number.get(name) == number:
                    row = Row(now, "end", name)
                    self.board.apply(row)
                    changed = True
                    yield row
            while position < len(coming) and coming[position].arrival_s <= now:
                job = coming[position]
                self.board.submit(job)
                self.left_s[job.id] = job.work
                changed = True
                position += 1
            if changed:
                yield from self._decide(now)

    def _decide(self, now: float) -> Iterator[Row]:
        full = now >= self.round_at or self.last is None
        live = self.board.live
        if full:
            self.round_at = now + ROUND_S
            for name in list(live):
                live[name] = until(live[name], now)
        snapshot = replace(self.board.base, jobs=tuple(live.values()))
        if full or self.last is None:
            made, self.memo = plan(snapshot, self.policy, now, self.memo)
        else:
            event = Event.between(self.last[0], snapshot, now)
            made, self.memo = react(snapshot, self.last[1], event, self.memo)
        self.last = (snapshot, made)
        after = {job.id: job for job in applied(snapshot, made, now).jobs}
        for action in made.actions:
            name = str(action.job)
            again = live[name].attained_s > 0 or live[name].run is not None
            if action.assumed is not None:
                self.left_s[name] -= max(0.0, now - self.from_s[name])
                del self.number[name]
                yield Row(now, "stop", name)
            stopped = until(live[name], now)
            live[name] = replace(after[action.job], attained_s=stopped.attained_s)
            if action.kind is not ActionKind.PREEMPT and action.to is not None:
                self._runs(name, now + CHARGE_S if again else now)
                yield Row(now, "start", name, action.to.nodes)


def first_starts(rows: list[Row]) -> dict[str, float]:
    """When each job first started."""
    found: dict[str, float] = {}
    for row in rows:
        if row.kind == "start":
            found.setdefault(row.job, row.at)
    return found


def agreement(trace: Load, one: list[Row], other: list[Row], since: float, before: float) -> dict[str, float]:
    """The similarity of two replays: first starts of the jobs submitted in the window."""
    a, b = first_starts(one), first_starts(other)
    waits = [
        (a[job.id] - job.arrival_s, b[job.id] - job.arrival_s)
        for job in trace.jobs
        if since <= job.arrival_s < before and job.id in a and job.id in b
    ]
    long = [(x, y) for x, y in waits if max(x, y) > 60]
    close = sum(abs(x - y) <= max(60.0, 0.2 * x) for x, y in long)
    return {
        "jobs": len(waits),
        "same_side_of_60_s": sum((x > 60) == (y > 60) for x, y in waits) / max(len(waits), 1),
        "waits_within_20_percent": close / max(len(long), 1),
    }
