"""The nodes of all pools while a plan is being made, and the demand that packing is tuned to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ..model.snapshot import Job, Node, Placement, Pool, Resources, Snapshot
from .demand_mix import DemandMix
from .packing import Scorer
from .pool import PoolNodes


class Cluster:
    """All pools."""

    def __init__(self, snapshot: Snapshot) -> None:
        by_pool: dict[str, list[Node]] = {}
        for node in snapshot.nodes:
            by_pool.setdefault(node.pool, []).append(node)
        self._models = sorted(pool.name for pool in snapshot.pools if not pool.is_cpu)
        self._scorer = Scorer(self._models, (), 0)
        self.pools: dict[str, PoolNodes] = {}
        for pool in snapshot.pools:
            self.open_pool(pool, by_pool.get(pool.name, ()))

    def open_pool(self, pool: Pool, nodes: Iterable[Node]) -> PoolNodes:
        """Build (or rebuild) one pool from its nodes."""
        model = 0 if pool.is_cpu else self._models.index(pool.name)
        found = self.pools[pool.name] = PoolNodes(pool, nodes, self._scorer, model)
        return found

    def update_demand(self, demand: DemandMix, prices: Mapping[int, float] | None) -> dict[int, float]:
        """Set the demand. Returns the prices of shares (`prices`: of an earlier plan; None: compute them from
        what is free now)."""
        pools = [self.pools[name] for name in self._models]
        capacity_m = sum(pool.capacity_m() for pool in pools)
        self._scorer = Scorer(self._models, demand.workload(), capacity_m, prices)
        if prices is None and self._scorer.shares:
            self._scorer.price([left for pool in pools for left in pool.parts])
        for pool in pools:
            pool.update_demand(self._scorer)
        return self._scorer.prices if prices is None else dict(prices)

    def take(self, placement: Placement, sign: int = -1) -> None:
        """Take the resources of a placement (sign=1: give them back)."""
        for pool in self._pools_of(placement):
            pool.take(placement, sign)

    def take_releasing(self, placement: Placement, sign: int = -1) -> None:
        """Take the resources of a job that is being stopped (sign=1: it is gone)."""
        for pool in self._pools_of(placement):
            pool.take_releasing(placement, sign)

    def _pools_of(self, placement: Placement) -> Iterable[PoolNodes]:
        """The pool of a placement; all of them for a gang that started on pools which are not alike any more."""
        own = self.pools.get(placement.pool)
        if own is None:
            return ()
        if len(placement.nodes) == 1 or all(name in own.index for name in placement.nodes):
            return (own,)
        return [pool for pool in self.pools.values() if any(name in pool.index for name in placement.nodes)]

    def begin(self) -> None:
        """The round begins."""
        for pool in self.pools.values():
            pool.begin()

    def rewind(self) -> None:
        """Restore what was free when the round began."""
        for pool in self.pools.values():
            pool.rewind()

    def find(self, job: Job, pool: str, pods: int, per_pod: Resources, later: bool) -> tuple[str, ...] | None:
        """Nodes for a gang of the job in this pool, or None."""
        nodes = self.pools[pool]
        allowed = nodes.selected_nodes(job)
        if pods == 1:
            best = nodes.best(per_pod, later, allowed)
            return None if best is None else (nodes.nodes[best[0]].name,)
        return nodes.gang(pods, per_pod, later, allowed, job.required_domain)

    def loss(self, job: Job, pool: str, per_pod: Resources, later: bool) -> float:
        """What one pod of the job costs the rest of the cluster in this pool, if it fits there."""
        nodes = self.pools[pool]
        best = nodes.best(per_pod, later, nodes.selected_nodes(job))
        return math.inf if best is None else best[1][0]

    def capacity_m(self) -> dict[str, int]:
        """Accelerators of usable nodes, by accelerator key."""
        total: dict[str, int] = {}
        for pool in self.pools.values():
            key = pool.pool.accelerator
            total[key] = total.get(key, 0) + pool.capacity_m()
        return total
