"""What a simulation replays: jobs with their true lengths, and a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..model.table import SCALING_EXPONENT

Measured = Mapping[str, Mapping[tuple[int, int], float]]
"""Accelerator -> (accelerators, nodes) -> work per second of the whole job."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A later part of a job's life, in which it makes progress at other speeds."""

    from_work: float
    """Begins when so much of the job's work is done."""
    workload_class: str
    """Speeds of different phases are different rows of the performance table."""
    measured: Measured


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job as it really is. The policy sees of it only what a snapshot shows."""

    id: str
    arrival_s: float
    work: float
    """Steps to do (or seconds at speed 1 where the trace gives durations)."""
    speeds: Mapping[str, float]
    """True work per second of the whole job, by accelerator; 0 or missing: impossible there."""
    workload_class: str = ""
    pods: int = 1
    per_pod_m: int = 1000
    """Thousandths of an accelerator per pod."""
    tenant: str = "all"
    user: str = ""
    priority: int = 100
    max_pods: int | None = None
    measured: Measured = field(default_factory=dict)
    """Speeds at other sizes, and on more or fewer nodes; without it, a larger size is faster by
    `SCALING_EXPONENT`."""
    restart_s: float | None = None
    """Seconds without progress that a start costs; None: as the settings say."""
    deadline_s: float | None = None
    """When it should be done."""
    phases: tuple[Phase, ...] = ()
    """In order of their beginnings; before the first one `workload_class` and `measured` hold."""

    def __post_init__(self) -> None:
        """Raises ValueError for a job that no simulation could end."""
        for what, value in (("arrival", self.arrival_s), ("deadline", self.deadline_s or 0.0)):
            if not math.isfinite(value):
                raise ValueError(f"its {what} is {value:g} s; give a finite number")
        if not (math.isfinite(self.work) and self.work > 0):
            raise ValueError(f"its work is {self.work:g}; give a finite number above 0")
        if self.pods < 1 or self.per_pod_m < 1:
            raise ValueError("it asks for no accelerator; give 1 or more")
        if not any(speed > 0 for speed in self.speeds.values()):
            raise ValueError("it makes no progress on any accelerator; give it a speed above 0 on one")

    def phase(self, done: float) -> Phase | None:
        """The phase after so much work; None: none has begun yet."""
        return next((one for one in reversed(self.phases) if done >= one.from_work), None)

    def class_after(self, done: float) -> str:
        """The workload class after so much work."""
        phase = self.phase(done)
        return self.workload_class if phase is None else phase.workload_class

    def next_change(self, done: float) -> float | None:
        """How much work will be done when the next phase begins; None: this is the last one."""
        return next((one.from_work for one in self.phases if one.from_work > done), None)

    @property
    def accelerators(self) -> float:
        return self.pods * self.per_pod_m / 1000

    def speed(self, accelerator: str, accelerators_m: int, nodes: int, done: float = 0.0) -> float:
        """True work per second at this size on so many nodes, after so much work.

        Between two measured sizes the speed follows the power law that leads from one to the other; outside of them the
        job cannot run. If this number of nodes was not measured for a size, the nearest that was stands for it."""
        phase = self.phase(done)
        cells = (self.measured if phase is None else phase.measured).get(accelerator)
        if not cells:
            full_m = self.pods * self.per_pod_m
            return self.speeds.get(accelerator, 0.0) * float((accelerators_m / full_m) ** SCALING_EXPONENT)
        count = accelerators_m / 1000
        sizes = {size for size, _ in cells}
        if not min(sizes) <= count <= max(sizes):
            return 0.0
        below = max(size for size in sizes if size <= count)
        above = min(size for size in sizes if size >= count)
        low, high = _nearest(cells, below, nodes), _nearest(cells, above, nodes)
        if low <= 0 or high <= 0:
            return 0.0
        if below == above:
            return low
        return low * float((count / below) ** (math.log(high / low) / math.log(above / below)))

    def best_s(self) -> float:
        """Seconds it takes alone on its fastest accelerator."""
        return self.work / max(self.speeds.values())


def _nearest(cells: Mapping[tuple[int, int], float], size: int, nodes: int) -> float:
    """The speed at a measured size, on the number of nodes that is nearest (of two, the smaller)."""
    found = min((n for count, n in cells if count == size), key=lambda n: (abs(n - nodes), n))
    return cells[size, found]


@dataclass(frozen=True, slots=True)
class TraceCluster:
    """Nodes per accelerator type."""

    nodes: Mapping[str, int]
    accelerators_per_node: Mapping[str, int] = field(default_factory=dict)
    """Default 1."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Exchange rates; default 1."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Money per accelerator-hour."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Tenants' weights; default 1."""

    def per_node(self, accelerator: str) -> int:
        return self.accelerators_per_node.get(accelerator, 1)

    def holds(self, job: TraceJob) -> bool:
        """Whether the job, at its smallest, fits the empty nodes of a type on which it makes progress."""
        return any(
            speed > 0 and self.nodes.get(kind, 0) * (1000 * self.per_node(kind) // job.per_pod_m) >= job.pods
            for kind, speed in job.speeds.items()
        )

    def capacity(self) -> dict[str, int]:
        """Accelerators per type."""
        return {kind: count * self.per_node(kind) for kind, count in self.nodes.items()}


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of arrival."""

    name: str
    jobs: tuple[TraceJob, ...]
    measured: tuple[int, int] | None = None
    """Half-open range of job numbers that statistics are made of; None: all."""

    def measured_jobs(self) -> tuple[TraceJob, ...]:
        return self.jobs if self.measured is None else self.jobs[slice(*self.measured)]
