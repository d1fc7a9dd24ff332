"""Power-capped columns: the same place with the boards under a limit, slower, for fewer watts.

A training job is offered them where a power domain limits its nodes and the performance table has cells of its class for
caps below 1 on the same accelerators. A replica has one cap, which its service has chosen (`autoscale/caps.py`), and there
only that column. The cap that the plan counts with must be the one that the boards get, and no other job may be slowed by it:

* the node's agent sets limits (`Node.limits_boards`);
* where it is also known which pods hold which boards (`Node.tells_boards`), the pods take whole boards, on any of these nodes;
* elsewhere a limit holds for all boards of a node. So the pods take all accelerators of nodes as large as the pool's
  largest: one such pod each, or several together (`Candidate.nodes`).

Placement leaves other nodes out (`PoolNodes.open_to`).
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
        gpus = {pool.name for pool in snapshot.pools if not pool.is_cpu} if draws.counts else set()
        able = [node for node in snapshot.nodes if node.limits_boards and node.domain and node.pool in gpus]
        self._draws = draws
        self.whole_m = {name: largest_m[name] for name in sorted({node.pool for node in able})}
        """By pool with boards that take limits: what a pod must ask for to have its node to itself."""
        self.shared = frozenset(node.pool for node in able if node.tells_boards)
        """Pools with nodes of which each board can be limited by itself."""
        self.mixed = self.shared.intersection(node.pool for node in able if not node.tells_boards)
        """Those of them that also have nodes of which only all boards can be limited."""

    def alike(self, other: PowerCaps) -> bool:
        """Whether jobs have the same columns by the other one."""
        return (self.whole_m, self.shared, self.mixed) == (other.whole_m, other.shared, other.mixed)

    def allow(self, job: Job) -> bool:
        """Whether this job may run under a cap at all."""
        if job.kind is JobKind.SERVING:
            return bool(self.whole_m) and job.power_cap < 1
        return bool(self.whole_m) and job.kind is JobKind.TRAINING

    def nodes(self, pool: Pool, pods: int, per_pod_m: int) -> tuple[int, ...]:
        """On how many nodes such pods may stand under a cap (`Candidate.nodes`), one for each way; none: they may not.

        0 is any number: each pod fills its own, or they stand on nodes of which each board can be limited by itself.
        """
        whole_m = self.whole_m.get(pool.name, 0)
        if not whole_m or per_pod_m <= 0:
            return ()
        if per_pod_m == whole_m:
            return (0,)
        shared = (0,) if pool.name in self.shared and per_pod_m % 1000 == 0 else ()
        fills = whole_m % per_pod_m == 0 and pods * per_pod_m % whole_m == 0
        if not fills or (shared and pool.name not in self.mixed):
            return shared
        return *shared, pods * per_pod_m // whole_m

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
