"""The nodes of all pools while a plan is being made, and the demand that packing is tuned to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..candidates.candidate import Candidate
from ..model.snapshot import Job, Node, Placement, Pool, Snapshot
from .demand_mix import DemandMix
from .feeds import LATER, NOW, Feeds, Lack
from .packing import Scorer
from .pool import PoolNodes, request


class Cluster:
    """All pools."""

    def __init__(self, snapshot: Snapshot) -> None:
        by_pool: dict[str, list[Node]] = {}
        for node in snapshot.nodes:
            by_pool.setdefault(node.pool, []).append(node)
        self._models = sorted(pool.name for pool in snapshot.pools if not pool.is_cpu)
        self._scorer = Scorer(self._models, (), 0)
        self.pools: dict[str, PoolNodes] = {}
        self.feeds: Feeds | None = None
        """Power domains that limit; None: there are none."""
        for pool in snapshot.pools:
            self.open_pool(pool, by_pool.get(pool.name, ()))

    def open_pool(self, pool: Pool, nodes: Iterable[Node]) -> PoolNodes:
        """Build (or rebuild) one pool from its nodes."""
        model = 0 if pool.is_cpu else self._models.index(pool.name)
        found = self.pools[pool.name] = PoolNodes(pool, nodes, self._scorer, model)
        return found

    def hang_on(self, feeds: Feeds | None) -> None:
        """Place nothing more from now on than these power domains carry; nothing is taken of them yet."""
        self.feeds = feeds
        for pool in self.pools.values():
            pool.hang_on(feeds)

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
        if self.feeds is not None:
            self.feeds.take(placement, sign, sign)

    def take_releasing(self, placement: Placement, sign: int = -1) -> None:
        """Take the resources of a job that is being stopped (sign=1: it is gone)."""
        for pool in self._pools_of(placement):
            pool.take_releasing(placement, sign)
        if self.feeds is not None:
            self.feeds.take(placement, sign, 0)

    def _pools_of(self, placement: Placement) -> Iterable[PoolNodes]:
        """The pool of a placement; all of them for a gang that started on pools which are not alike any more."""
        own = self.pools.get(placement.pool)
        if own is None:
            return ()
        if len(placement.nodes) == 1 or all(map(own.index.__contains__, placement.nodes)):
            return (own,)
        return [pool for pool in self.pools.values() if any(name in pool.index for name in placement.nodes)]

    def is_releasing(self, pool: str) -> bool:
        """Whether more room in this pool, or more watts for it, come with the end of jobs that are being stopped."""
        return self.pools[pool].releasing > 0 or (
            self.feeds is not None and any(one.releasing for one in self.pools.values())
        )

    def by_pool(self, prices: Mapping[str, float]) -> dict[str, float]:
        """The highest of these prices of power domains among those above each pool's nodes."""
        feeds = self.feeds
        if feeds is None or not prices:
            return {}
        above = {
            name: [prices.get(feeds.domains[number].name, 0.0) for number in pool.limiting]
            for name, pool in self.pools.items()
        }
        return {name: max(own) for name, own in above.items() if own and max(own) > 0}

    def on_feeds_of(self, pools: set[str]) -> set[str]:
        """These pools, and those that share a power domain with them."""
        numbers = {name: pool.limiting for name, pool in self.pools.items()}
        freed = frozenset[int]().union(*(numbers[name] for name in pools & numbers.keys()))
        return pools | {name for name, own in numbers.items() if not freed.isdisjoint(own)}

    def begin(self) -> None:
        """The round begins."""
        for pool in self.pools.values():
            pool.begin()
        if self.feeds is not None:
            self.feeds.begin()

    def rewind(self) -> None:
        """Restore what was free when the round began."""
        for pool in self.pools.values():
            pool.rewind()
        if self.feeds is not None:
            self.feeds.rewind()

    def find(self, job: Job, candidate: Candidate, later: bool) -> tuple[str, ...] | None:
        """Nodes for a candidate of the job, or None."""
        nodes, per_pod, watts = self.pools[candidate.pool], candidate.per_pod, candidate.draw_w
        allowed = nodes.open_to(job, candidate)
        if candidate.pods == 1:
            best = nodes.best(per_pod, later, allowed, watts)
            return None if best is None else (nodes.nodes[best[0]].name,)
        depth, most = job.required_domain, candidate.nodes
        return nodes.gang(candidate.pods, per_pod, later, allowed, depth, watts, most)

    def nearest(self, job: Job, candidate: Candidate, later: bool = False) -> Placement | None:
        """Where a candidate has room and lacks the least watts (for a gang: one such place); None: it has no room."""
        feeds, nodes = self.feeds, self.pools[candidate.pool]
        bare = replace(candidate, draw_w=0)
        found = self.find(job, bare, later)
        if found is not None and feeds is not None and candidate.pods == 1:
            for own in nodes.by_headroom(nodes.open_to(job, candidate), LATER if later else NOW):
                best = nodes.best(candidate.per_pod, later, own)
                if best is not None:
                    found = (nodes.nodes[best[0]].name,)
                    break
        return None if found is None else candidate.placed(found)

    def lack(self, job: Job, candidate: Candidate) -> Lack | None:
        """What watts are missing for a candidate that has room now; None: there is no room, or nothing is missing."""
        if self.feeds is None or not candidate.draw_w or self.find(job, candidate, later=False) is not None:
            return None
        place = self.nearest(job, candidate)
        return None if place is None else self.feeds.lack(place, candidate.draw_w, NOW)

    def could_hold(self, job: Job, candidate: Candidate) -> bool:
        """Whether a candidate of the job would have room if no other job ran."""
        nodes = self.pools[candidate.pool]
        ask = request(candidate.per_pod, nodes.pool.is_cpu)
        places = nodes.places_if_empty(
            ask, job.node_selector, job.required_domain, watts=candidate.draw_w, most=candidate.nodes
        )
        return places >= candidate.pods

    def loss(self, job: Job, candidate: Candidate, later: bool) -> float:
        """What one pod of the job costs the rest of the cluster in this pool, if it fits there."""
        nodes = self.pools[candidate.pool]
        allowed = nodes.open_to(job, candidate)
        best = nodes.best(candidate.per_pod, later, allowed, candidate.draw_w)
        return math.inf if best is None else best[1][0]

    def capacity_m(self) -> dict[str, int]:
        """Accelerators of usable nodes, by accelerator key."""
        total: dict[str, int] = {}
        for pool in self.pools.values():
            key = pool.pool.accelerator
            total[key] = total.get(key, 0) + pool.capacity_m()
        return total
