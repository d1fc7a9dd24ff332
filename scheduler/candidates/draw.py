"""What jobs add to the power domains of their nodes (`PowerDomain` says what is counted)."""

from __future__ import annotations

import math
from dataclasses import replace

from ..model.snapshot import Job, Placement, Snapshot
from ..model.table import Estimate, TableView


class Draws:
    """Counts watts if a domain of the snapshot limits; else everything is 0."""

    def __init__(self, snapshot: Snapshot, table: TableView) -> None:
        self.counts = any(domain.limits for domain in snapshot.domains)
        self._table = table
        self._hosts = {pool.name for pool in snapshot.pools if pool.is_cpu}
        self._keys = {pool.name: pool.key for pool in snapshot.pools}

    def watts(self, accelerator: str, estimate: Estimate | None, power_cap: float = 1.0) -> float:
        """What one accelerator of a job draws: as the table has it, or else the nameplate, and no more than its limit."""
        nameplate_w = self._table.nameplate_watts(accelerator)
        watts = nameplate_w if estimate is None else estimate.watts
        return min(watts, power_cap * nameplate_w) if power_cap < 1 and nameplate_w else watts

    def per_pod(self, pool: str, accelerator: str, accelerators_m: int, watts: float) -> int:
        """What one pod adds, whose accelerators draw so much each: more than they draw while idle."""
        if not self.counts or pool in self._hosts:
            return 0
        more = max(0.0, watts - self._table.idle_watts(accelerator))
        return math.ceil(accelerators_m * more / 1000)

    def counted(self, job: Job, placement: Placement) -> Placement:
        """The placement of a running job with its watts: as the table has them now, or else the nameplate."""
        if not self.counts:
            return placement
        key, size_m = self._keys.get(placement.pool, placement.key), placement.accelerators_m
        cap = placement.power_cap
        found = self._table.estimate(job.workload_class, key, placement.mode, size_m, job.tenant, cap)
        watts = self.watts(key, found, cap)
        amount_m = placement.per_pod.accelerators_m
        return replace(placement, watts=self.per_pod(placement.pool, key, amount_m, watts))
