"""Results of a simulation, and the numbers made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from ..model.codec import Json
from .trace import Trace, TraceCluster, TraceJob


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of one job."""

    id: str
    arrival_s: float
    end_s: float
    restarts: int = 0
    lost_s: float = 0.0
    """Seconds without progress: restarts, and work repeated after failures."""
    first_start_s: float | None = None
    held_s: float = 0.0
    """Accelerator-seconds held."""
    cost: float | None = None
    """Money for them; None: the cluster has no prices, or it was not recorded."""
    deadline_s: float | None = None
    promised: bool = False
    """Whether its deadline was promised."""

    @property
    def is_in_time(self) -> bool:
        return self.deadline_s is not None and self.end_s <= self.deadline_s

    @property
    def jct_s(self) -> float:
        return self.end_s - self.arrival_s


@dataclass(frozen=True)
class Result:
    """One run."""

    name: str
    jobs: tuple[JobResult, ...]
    """Measured jobs only, by id."""
    makespan_s: float
    utilisation: float
    """Accelerator-seconds held over those there were until the makespan."""
    ratios: tuple[float, ...]
    """Finish-time-fairness ratio per measured job: JCT over the time with an equal share to itself."""
    notes: Mapping[str, Json] = field(default_factory=dict)
    series: tuple[tuple[float, int, float], ...] = ()
    """(time, waiting jobs, accelerators busy) after every event."""
    work_utilisation: float = 0.0
    """Accelerator-seconds that the work of all jobs needs at the smallest size, at the mean speed over the accelerators that
    can run it, over those there were until the makespan. Above 1 if jobs run mostly where they are fast."""
    largest_wait_s: float | None = None
    """Mean wait until the first start of the largest tenth of the measured jobs, by accelerators; None: not recorded."""
    jain: float | None = None
    """Jain's index of work per weight over the tenants that waited, mean over the time in which at least two did
    (`Shares`); None: that never happened."""

    @property
    def cost_per_job(self) -> float | None:
        """Money; None if it is not known of every job."""
        costs = [job.cost for job in self.jobs if job.cost is not None]
        return mean(costs) if costs and len(costs) == len(self.jobs) else None

    def to_json(self) -> Json:
        """The numbers people compare; hours unless the name says otherwise."""
        hours = [job.jct_s / 3600 for job in self.jobs]
        restarts = [job.restarts for job in self.jobs]
        return (
            {
                "name": self.name,
                "jobs": len(self.jobs),
                "mean_h": mean(hours),
                "median_h": percentile(hours, 50),
                "p99_h": percentile(hours, 99),
                "max_h": max(hours, default=0.0),
                "makespan_h": self.makespan_s / 3600,
                "worst_ftf": max(self.ratios, default=0.0),
                "p99_ftf": percentile(list(self.ratios), 99),
                "moves_per_job": mean([float(count) for count in restarts]),
                "lost_h_per_job": mean([job.lost_s / 3600 for job in self.jobs]),
                "utilisation": self.utilisation,
                "work_utilisation": self.work_utilisation,
                "accelerator_h_per_job": mean([job.held_s / 3600 for job in self.jobs]),
                "cost_per_job": self.cost_per_job,
                "largest_wait_h": None if self.largest_wait_s is None else self.largest_wait_s / 3600,
                "jain": self.jain,
            }
            | self.deadlines()
            | dict(self.notes)
        )

    def deadlines(self) -> dict[str, Json]:
        """How many deadlines there were, were promised, and were kept; nothing where no job has one."""
        own = [job for job in self.jobs if job.deadline_s is not None]
        promised = [job for job in own if job.promised]
        if not own:
            return {}
        return {
            "deadlines": len(own),
            "deadlines_kept": sum(job.is_in_time for job in own),
            "promises": len(promised),
            "promises_kept": sum(job.is_in_time for job in promised),
        }


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def percentile(values: list[float], percent: float) -> float:
    """Linear interpolation between order statistics."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def isolated_s(job: TraceJob, cluster: TraceCluster, sharers: float) -> float:
    """Seconds the job takes with 1/sharers of every type to itself (Themis' and Gavel's isolated share)."""
    fractions = {kind: count / (sharers * job.accelerators) for kind, count in cluster.capacity().items()}
    total = sum(fractions.values())
    scale = 1 / total if total > 1 else 1.0
    speed = sum(fractions[kind] * scale * job.speeds.get(kind, 0.0) for kind in fractions)
    return job.work / speed if speed > 0 else float("inf")


def summarise(
    name: str,
    trace: Trace,
    cluster: TraceCluster,
    done: Mapping[str, JobResult],
    busy_s: float,
    notes: Mapping[str, Json] | None = None,
    series: tuple[tuple[float, int, float], ...] = (),
    jain: float | None = None,
) -> Result:
    """Numbers of the measured jobs."""
    measured = trace.measured_jobs()
    missing = [job.id for job in measured if job.id not in done]
    if missing:
        raise ValueError(f"{len(missing)} jobs of {trace.name} never finished, {missing[0]} first")
    first = min(job.arrival_s for job in trace.jobs)
    makespan = max(result.end_s for result in done.values()) - first
    sharers = _sharers(trace, done)
    ratios = tuple(
        done[job.id].jct_s / isolated_s(job, cluster, max(sharers[job.id], 1.0)) for job in measured
    )
    total = sum(cluster.capacity().values()) * makespan
    return Result(
        name,
        tuple(done[job.id] for job in measured),
        makespan,
        busy_s / total if total > 0 else 0.0,
        ratios,
        notes or {},
        series,
        _needed_s(trace, cluster) / total if total > 0 else 0.0,
        _largest_wait_s(measured, done),
        jain,
    )


def jain_index(amounts: Sequence[float]) -> float:
    """Jain's index: 1 if all have the same, 1/n if one of n has everything (Jain, Chiu, Hawe 1984). All without
    anything are equal."""
    squares = math.fsum(amount**2 for amount in amounts)
    return math.fsum(amounts) ** 2 / (len(amounts) * squares) if squares > 0 else 1.0


class Shares:
    """How evenly tenants that want more than they have share the work, in windows of an hour.

    Work is counted in accelerator-seconds of the job's smallest size at the mean speed of the accelerators that can run
    it (as `Result.work_utilisation` counts), so that an hour on a type that suits a job is more than one on another. A
    tenant counts in a window in which one of its jobs waited at every plan; its work is divided by its weight. Work
    counts in the window of the plan before, so a window's ends are off by the time between two plans.
    """

    WINDOW_S = 3600.0

    def __init__(self, cluster: TraceCluster) -> None:
        self._cluster = cluster
        self._window = -math.inf
        self._work: dict[str, float] = {}
        self._backlogged: set[str] | None = None
        self._indexes: list[float] = []
        self._scale: dict[int, float] = {}

    def add(self, job: TraceJob, done: float) -> None:
        """A job did so much of its work."""
        scale = self._scale.get(id(job))
        if scale is None:
            scale = self._scale[id(job)] = job.accelerators / mean_speed(job, self._cluster)
        self._work[job.tenant] = self._work.get(job.tenant, 0.0) + done * scale

    def planned(self, now: float, waiting: Set[str]) -> None:
        """A plan was made, after which jobs of these tenants wait."""
        window = now // self.WINDOW_S
        if window != self._window:
            self._close()
            self._window, self._work, self._backlogged = window, {}, None
        self._backlogged = set(waiting) if self._backlogged is None else self._backlogged & waiting

    def _close(self) -> None:
        names = self._backlogged or ()
        if len(names) > 1:
            weights = self._cluster.weights
            found = [self._work.get(name, 0.0) / weights.get(name, 1.0) for name in sorted(names)]
            self._indexes.append(jain_index(found))

    def jain(self) -> float | None:
        """The mean over all windows that have ended; None: in none did two tenants wait all the time."""
        return mean(self._indexes) if self._indexes else None


def mean_speed(job: TraceJob, cluster: TraceCluster) -> float:
    """Mean over the accelerators that can run the job at its smallest size."""
    usable = {
        kind: count for kind, count in cluster.capacity().items() if count and job.speeds.get(kind, 0.0) > 0
    }
    return sum(job.speeds[kind] * count for kind, count in usable.items()) / sum(usable.values())


def _needed_s(trace: Trace, cluster: TraceCluster) -> float:
    """Accelerator-seconds of all jobs at the smallest size."""
    needed_s = 0.0
    for job in trace.jobs:
        needed_s += job.accelerators * job.work / mean_speed(job, cluster)
    return needed_s


def _largest_wait_s(measured: tuple[TraceJob, ...], done: Mapping[str, JobResult]) -> float | None:
    largest = sorted(measured, key=lambda job: (-job.accelerators, job.id))[: -(-len(measured) // 10)]
    waits = [
        start - done[job.id].arrival_s for job in largest if (start := done[job.id].first_start_s) is not None
    ]
    return mean(waits) if waits else None


def _sharers(trace: Trace, done: Mapping[str, JobResult]) -> dict[str, float]:
    """Mean number of jobs in the system during each job's life."""
    events: list[tuple[float, int]] = []
    for job in trace.jobs:
        if job.id in done:
            events += [(job.arrival_s, 1), (done[job.id].end_s, -1)]
    events.sort()
    times, counts, areas = [0.0], [0], [0.0]
    for at, change in events:
        areas.append(areas[-1] + counts[-1] * (at - times[-1]))
        times.append(at)
        counts.append(counts[-1] + change)
    from bisect import bisect_right

    def area(at: float) -> float:
        i = bisect_right(times, at) - 1
        return areas[i] + counts[i] * (at - times[i])

    return {
        key: (area(result.end_s) - area(result.arrival_s)) / max(result.jct_s, 1e-9)
        for key, result in done.items()
    }
