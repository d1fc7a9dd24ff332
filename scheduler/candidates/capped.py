"""Power-capped columns: the same place with the boards under a limit, slower, for fewer watts.

A training job is offered them where a power domain limits its nodes and the performance table has cells of its class for
caps below 1 on the same accelerators. A replica has one cap, which its service has chosen (`autoscale/caps.py`), and there
only that column. Two more conditions make sure that the cap that the plan counts with is the one that the boards get:

* its pods take all accelerators of nodes as large as the pool's largest: one such pod each, or several together
  (`Candidate.nodes`). So it has its nodes to itself: nobody says which boards of a node a pod holds, and a limit on all of
  them slows nobody else;
* the node's agent sets limits (`Node.limits_boards`); placement leaves other nodes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..model.snapshot import Job, JobKind, Pool, Snapshot
from ..model.table import Estimate, TableView
from .draw import Draws

MOST_CAPS = 4
"""The most caps that are offered for one place."""


class PowerCaps:
    """The caps under which jobs may start; none without a power domain that limits."""

    def __init__(self, snapshot: Snapshot, draws: Draws, largest_m: Mapping[str, int]) -> None:
        """
        Args:
            largest_m: accelerators of each pool's largest node, in thousandths.
        """
        able = {node.pool for node in snapshot.nodes if node.limits_boards and node.domain}
        gpus = {pool.name for pool in snapshot.pools if not pool.is_cpu}
        self._draws = draws
        self.whole_m = {name: largest_m[name] for name in sorted(able & gpus)} if draws.counts else {}
        """By pool with boards that take limits: what a pod must ask for to have its node to itself."""

    def allow(self, job: Job) -> bool:
        """Whether this job may run under a cap at all."""
        if job.kind is JobKind.SERVING:
            return bool(self.whole_m) and job.power_cap < 1
        return bool(self.whole_m) and job.kind is JobKind.TRAINING

    def fills(self, pool: Pool, pods: int, per_pod_m: int) -> int | None:
        """How many nodes the pods fill if they stand on as few as they can; 0: each fills its own. None: they leave others
        room on one, or boards there take no limits."""
        whole_m = self.whole_m.get(pool.name, 0)
        if not whole_m or per_pod_m <= 0 or whole_m % per_pod_m or pods * per_pod_m % whole_m:
            return None
        return 0 if per_pod_m == whole_m else pods * per_pod_m // whole_m

    def of(
        self, job: Job, pool: Pool, mode: str, pods: int, per_pod_m: int, full: Estimate, table: TableView
    ) -> list[tuple[float, Estimate]]:
        """Caps for one place, the highest first, with what the job does and draws there.

        A cap is left out if it saves no watts beside the next higher one that is kept. A replica has as much value under its
        cap as without: its service has counted what it does there.

        Args:
            full: the same place without a cap.
        """
        if not self.allow(job):
            return []
        found: list[tuple[float, Estimate]] = []
        last_w, size_m = self._draws.watts(pool.key, full), pods * per_pod_m
        if job.kind is JobKind.SERVING:
            watts = self._draws.watts(pool.key, full, job.power_cap)
            return [(job.power_cap, replace(full, watts=watts))] if watts < last_w else []
        for cap in table.power_caps(job.workload_class, pool.key, mode, job.tenant):
            under = table.estimate(job.workload_class, pool.key, mode, size_m, job.tenant, cap)
            if under is None or under.speed <= 0:
                continue
            watts = self._draws.watts(pool.key, under, cap)
            if watts < last_w:
                last_w = watts
                slow = min(under.speed, full.speed)
                found.append((cap, replace(full, speed=slow, low=min(under.low, slow), watts=watts)))
        return _spread(found)


def _spread(found: list[tuple[float, Estimate]]) -> list[tuple[float, Estimate]]:
    """At most `MOST_CAPS` of them, evenly from the highest to the lowest."""
    if len(found) <= MOST_CAPS:
        return found
    last = len(found) - 1
    return [found[round(i * last / (MOST_CAPS - 1))] for i in range(MOST_CAPS)]
