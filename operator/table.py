"""What the snapshot says about speed and memory: the workload of each job, and the performance table.

The formulas are the scheduler's (``busbar.scheduler.fit``); this module only reads them for the objects at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from busbar.kube.types import AcceleratorPool, ModelService, TrainingJob
from busbar.kube.types.training_engine import EngineMode
from busbar.scheduler import PerformanceTable


@dataclass(frozen=True)
class Workload:
    """A job as the performance table knows it."""

    workload_class: str = ""
    modes: tuple[str, ...] = ("resident",)
    work_per_step: float = 0.0
    steps: int = 0

    def remaining(self, step: int) -> float | None:
        """Work left, in the class's unit; None where it is not known."""
        return max(0, self.steps - step) * self.work_per_step if self.work_per_step else None


def workload(job: TrainingJob) -> Workload:
    """The class and modes of a job."""
    engine = job.spec.engine
    if engine is None:
        return Workload()
    if engine.mode is not EngineMode.AUTO:
        return Workload(modes=(str(engine.mode),), steps=engine.steps)
    return Workload(modes=(EngineMode.RESIDENT.value, EngineMode.OPTIMIZER_OFFLOAD.value), steps=engine.steps)


def performance_table(
    jobs: Iterable[TrainingJob],
    pools: Iterable[AcceleratorPool],
    draft: TrainingJob | ModelService | None = None,
) -> PerformanceTable:
    """The table for these jobs on these pools."""
    return PerformanceTable()
