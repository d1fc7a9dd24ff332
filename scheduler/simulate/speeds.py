"""What the policy is told of speeds: the truth, or what a learner makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..model.snapshot import Placement
from ..model.table import Cell, PerformanceTable, Place, Rate, Source, named_nodes
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
    """Every class on every type, exactly; classes with measured sizes at all that their jobs may have, on all numbers of
    nodes that were measured."""
    cells: dict[Place, Cell] = {}
    asked: dict[tuple[str, int, int, int], TraceJob] = {}
    for job in trace.jobs:
        most = (job.max_pods or job.pods) if job.measured else job.pods
        asked[job.workload_class, job.pods, most, job.per_pod_m] = job
    for (_, least, most, _), job in asked.items():
        for kind in cluster.nodes:
            for pods in range(least, most + 1):
                for begin in (0.0, *(phase.from_work for phase in job.phases)):
                    for cell in _cells(job, kind, pods, cluster, begin):
                        cells[cell.place] = cell
    rates = tuple(Rate(kind, cluster.rates.get(kind, 1.0)) for kind in sorted(cluster.nodes))
    return PerformanceTable(tuple(cells[key] for key in sorted(cells)), rates)


def _cells(job: TraceJob, kind: str, pods: int, cluster: TraceCluster, done: float) -> Iterator[Cell]:
    """A job at one size after so much work: on the fewest nodes that hold it, and on as many more as were measured."""
    size, per_node = pods * job.per_pod_m, 1000 * cluster.per_node(kind)
    fewest = -(-pods // max(1, per_node // job.per_pod_m))
    counts = {fewest}
    if job.measured.get(kind):
        counts |= {nodes for _, nodes in job.measured[kind] if fewest <= nodes <= pods}
    for nodes in sorted(counts):
        speed = job.speed(kind, size, nodes, done)
        yield Cell(
            job.class_after(done), kind, size, speed=speed, low=speed, high=speed, source=Source.OVERRIDE,
            nodes=named_nodes(size, nodes) if job.measured else 0,
        )  # fmt: skip
