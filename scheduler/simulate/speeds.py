"""What the policy is told of speeds: the truth, or what a learner makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..model.snapshot import Placement
from ..model.table import Cell, PerformanceTable, Rate, Source
from .trace import Trace, TraceCluster, TraceJob


@dataclass
class Learner:
    """Keeps the table that the policy sees. This default knows the truth from the start; `learner.py` has one
    that learns."""

    table: PerformanceTable = field(default_factory=PerformanceTable)

    def observe(
        self, job: TraceJob, place: Placement, held_s: float, progress_s: float, speed: float
    ) -> None:
        """A job held this place for this long since the last call, and worked at this true speed for a part
        of it."""

    def repeats(self, job: TraceJob, work: float) -> None:
        """A job lost this much work and must do it again."""

    def ended(self, job: TraceJob) -> None:
        """A job has done all its work."""

    def remaining(self, job: TraceJob, left: float) -> float:
        """What the policy is told of the work that is left."""
        return left

    def current(self, jobs: Iterable[TraceJob]) -> PerformanceTable:
        """The table as the policy should see it now, with these jobs in the system."""
        return self.table


def true_table(trace: Trace, cluster: TraceCluster) -> PerformanceTable:
    """Every class on every type, exactly; classes with measured sizes at all that their jobs may have. A cell does
    not know of nodes: its speed is that on the fewest nodes that hold the size."""
    cells: dict[tuple[str, str, int], Cell] = {}
    for job in trace.jobs:
        for kind in cluster.nodes:
            most = (job.max_pods or job.pods) if job.measured else job.pods
            for pods in range(job.pods, most + 1):
                size = pods * job.per_pod_m
                speed = job.speed(kind, size, -(-size // (1000 * cluster.per_node(kind))))
                cells[job.workload_class, kind, size] = Cell(
                    job.workload_class, kind, size, speed=speed, low=speed, high=speed, source=Source.OVERRIDE
                )
    rates = tuple(Rate(kind, cluster.rates.get(kind, 1.0)) for kind in sorted(cluster.nodes))
    return PerformanceTable(tuple(cells[key] for key in sorted(cells)), rates)
