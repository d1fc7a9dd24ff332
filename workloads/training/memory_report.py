"""What a run's status says of memory: the plan's bytes by owner, and beside each phase what it used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from busbar.workloads.machine.limits import PeakMeter
from busbar.workloads.training.demand import Demand
from busbar.workloads.training.disk_plan import disk_owners
from busbar.workloads.training.plan import MemoryPlan
from busbar.workloads.training.status import Status


class MemoryReport:
    """Of one run; written to its status whenever it changes."""

    def __init__(self, plan: MemoryPlan, demand: Demand, keep: int, status: Status) -> None:
        """
        Args:
            keep: checkpoints that stay on the disk.
        """
        self.plan = plan
        self._demand, self._keep, self._status = demand, keep, status
        self._meter = PeakMeter()
        self._used: dict[str, int] = {}  # bytes of the host's memory by phase
        self._token_bytes = 0  # of the run's tokens on disk; 0: not known yet, or another rank's
        self._tell()

    @contextmanager
    def measuring(self, phase: str) -> Iterator[None]:
        """Compare the host memory that `phase` uses with the plan."""
        self._meter.reset()
        yield
        self._used[phase] = max(self._meter.peak_bytes(), self._used.get(phase, 0))
        self._tell()

    def has_tokens(self, size: int) -> None:
        """So many bytes of tokens are or will be on the disk."""
        self._token_bytes = size
        self._tell()

    def _tell(self) -> None:
        plan = self.plan
        self._status.update(
            memory={
                "phases": {
                    phase: {"plannedBytes": size, "measuredBytes": self._used.get(phase)}
                    for phase, size in plan.phases.items()
                },
                "deviceBytes": plan.device_bytes,
                "deviceLimitBytes": plan.limits.device_bytes,
                "hostBytes": plan.host_bytes,
                "deviceOwners": dict(plan.device),
                "hostOwners": dict(plan.host),
                "diskOwners": disk_owners(plan, self._demand, self._keep, self._token_bytes),
            }
        )
