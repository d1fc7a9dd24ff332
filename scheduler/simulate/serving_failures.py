"""Failures of replicas and nodes in the serving simulator: when they come, where replicas stand, and what is seen when.

A node fails and is repaired, over and over: the times between are exponential with mean `node_mtbf_s`, drawn from the seed and
the node's name, so each fleet on one load meets the same failures. Or the outages are listed. All replicas of a node are lost
at once and their accelerators are away until it is back. A replica's process ends by itself after exponential times with mean
`replica_mtbf_s`, and hangs after those with mean `hang_mtbf_s`.

What the product makes of it is in `serving_losses.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from ..autoscale.reach import NODE_LOST_S, NODE_UNREADY_S
from ..errors import ServingModelError, TraceError
from .csv_rows import fault, named_rows
from .serving_pools import Pool

LEAST_MTBF_S = 60.0


@dataclass(frozen=True, slots=True)
class Outage:
    """A node is away for some time."""

    at_s: float
    pool: str
    node: int
    """From 0 on, in its pool."""
    until_s: float


@dataclass(frozen=True, slots=True)
class Failures:
    """What fails."""

    node_mtbf_s: float | None = None
    replica_mtbf_s: float | None = None
    """Its process ends."""
    hang_mtbf_s: float | None = None
    """It runs on and answers nobody."""
    repair_s: float = 3600.0
    """How long a node is away."""
    listed: tuple[Outage, ...] = ()
    """In place of `node_mtbf_s`."""
    seed: int = 0
    unready_s: float = NODE_UNREADY_S
    """Until Kubernetes says that a node that is away does not answer, and its pods are not ready."""

    def __post_init__(self) -> None:
        for name, value in (
            ("failures of a node", self.node_mtbf_s),
            ("failures of a replica", self.replica_mtbf_s),
            ("hangs of a replica", self.hang_mtbf_s),
        ):
            if value is not None and not (math.isfinite(value) and value >= LEAST_MTBF_S):
                raise ServingModelError(
                    f"the mean time between {name} is {value:g} s; it must be at least {LEAST_MTBF_S:.0f} s"
                )
        if not (math.isfinite(self.repair_s) and self.repair_s >= 0):
            raise ServingModelError(f"the time of a repair is {self.repair_s:g} s; it must be zero or more")
        if self.listed and self.node_mtbf_s is not None:
            raise ServingModelError("nodes fail either as listed or at random: give one of the two, not both")

    @property
    def any(self) -> bool:
        """Whether anything can fail."""
        means = (self.node_mtbf_s, self.replica_mtbf_s, self.hang_mtbf_s)
        return bool(self.listed) or any(mean_s is not None for mean_s in means)

    @property
    def of_nodes(self) -> bool:
        """Whether nothing but nodes can fail."""
        return self.replica_mtbf_s is None and self.hang_mtbf_s is None

    @property
    def lost_s(self) -> float:
        """Until the operator gives up the replicas of a node that is away."""
        return self.unready_s + NODE_LOST_S

    def outages(self, nodes: Mapping[str, int], end_s: float) -> list[Outage]:
        """All of them until the end, by time, for so many nodes by pool."""
        if self.node_mtbf_s is None:
            return sorted(
                (row for row in self.listed if row.node < nodes.get(row.pool, 0)), key=lambda row: row.at_s
            )
        found = []
        for pool, count in sorted(nodes.items()):
            for node in range(count):
                rng, at = Random(f"{self.seed}/{pool}/{node}"), 0.0
                while (at := at + rng.expovariate(1 / self.node_mtbf_s)) < end_s:
                    found.append(Outage(at, pool, node, at + self.repair_s))
                    at += self.repair_s
        return sorted(found, key=lambda row: (row.at_s, row.pool, row.node))


@dataclass(slots=True)
class NodePlaces:
    """The nodes of a service's pools (`serving_cluster.Places`): replicas fill one node after the other, as the scheduler
    packs them, and wait where none has room."""

    pools: Sequence[Pool]
    accelerators: Mapping[str, int]
    """By pool: the fleets of one type may have more than the stock."""
    outages: list[Outage]
    _away: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Nodes, and how many listed outages keep each away."""
    _back: list[Outage] = field(default_factory=list)
    _next: int = 0
    _asked: int = 0
    _waiting: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Name -> pool, and since when."""
    _held: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Name -> its node."""

    @classmethod
    def of(
        cls, pools: Sequence[Pool], failures: Failures, end_s: float, most: Mapping[str, int] | None = None
    ) -> NodePlaces:
        """With the pools' stock, or more where a fleet is not bound by it.

        Args:
            most: replicas that a fleet may have, by pool; each such pool has one node more than these need.
        """
        accelerators = {pool.name: pool.stock for pool in pools}
        for pool in pools:
            wanted = (most or {}).get(pool.name, 0)
            if wanted:
                accelerators[pool.name] = max(pool.stock, wanted) + pool.per_node
        counts = {pool.name: math.ceil(accelerators[pool.name] / pool.per_node) for pool in pools}
        return cls(pools, accelerators, failures.outages(counts, end_s))

    def ask(self, pool: str, now_s: float) -> str:
        """One more replica is wanted; returns its name."""
        self._asked += 1
        name = f"replica-{self._asked:06d}"
        self._waiting[name] = (pool, now_s)
        return name

    def give_back(self, name: str, now_s: float) -> None:
        """A replica has left, or is not wanted any more."""
        self._waiting.pop(name, None)
        self._held.pop(name, None)

    def advance(self, now_s: float) -> list[tuple[str, float]]:
        """Nodes fail and return; replicas that have a place since the last call, and from when."""
        while self._next < len(self.outages) and self.outages[self._next].at_s <= now_s:
            row = self.outages[self._next]
            self._next += 1
            self._away[row.pool, row.node] += 1
            self._back.append(row)
        for row in [row for row in self._back if row.until_s <= now_s]:
            self._back.remove(row)
            self._away[row.pool, row.node] -= 1
        placed = []
        for name, (pool, since_s) in list(self._waiting.items()):
            node = self._room(pool)
            if node is not None:
                del self._waiting[name]
                self._held[name] = (pool, node)
                placed.append((name, since_s))
        return placed

    def failed(self, now_s: float) -> set[str]:
        """Replicas whose nodes are away now."""
        if not self._back:
            return set()
        return {name for name, node in self._held.items() if self._away[node] > 0}

    def stock(self) -> dict[str, int]:
        """Accelerators by pool without those of nodes that are away."""
        return {
            pool.name: sum(
                size for node, size in enumerate(self._sizes(pool)) if self._away[pool.name, node] <= 0
            )
            for pool in self.pools
        }

    def others_answer(self) -> bool:
        """There are none."""
        return False

    @property
    def node_failures(self) -> int:
        """Until now."""
        return self._next

    def _sizes(self, pool: Pool) -> list[int]:
        whole, rest = divmod(self.accelerators[pool.name], pool.per_node)
        return [pool.per_node] * whole + ([rest] if rest else [])

    def _room(self, name: str) -> int | None:
        """The fullest node that has room and is not away."""
        pool = next(pool for pool in self.pools if pool.name == name)
        used = Counter(node for of, node in self._held.values() if of == name)
        free = [
            (used[node], -node)
            for node, size in enumerate(self._sizes(pool))
            if used[node] < size and self._away[name, node] <= 0
        ]
        return -max(free)[1] if free else None


def nodes_of(pools: Sequence[Pool]) -> dict[str, int]:
    """How many nodes each pool has."""
    return {pool.name: math.ceil(pool.stock / pool.per_node) for pool in pools}


def outages_csv(path: Path, nodes: Mapping[str, int]) -> tuple[Outage, ...]:
    """Listed outages: columns second, pool, node (from 0 on, or * for all nodes of the pool) and until, in seconds.

    Args:
        nodes: how many each pool has.

    Raises:
        TraceError: a line is no outage; says which and why.
    """
    found: list[Outage] = []
    for line, row in named_rows(path):
        where = f"{path}:{line}"
        try:
            at, until, pool = float(row["second"]), float(row["until"]), row["pool"].strip()
            which = list(range(nodes.get(pool, 0))) if row["node"].strip() == "*" else [int(row["node"])]
        except (KeyError, ValueError) as error:
            raise TraceError(
                f"{where}: this line is no outage ({fault(error)}); the columns are second, pool, node, until"
            ) from error
        if pool not in nodes:
            raise TraceError(f"{where}: there is no pool {pool!r}; there are {', '.join(sorted(nodes))}")
        if not (math.isfinite(at) and math.isfinite(until) and 0 <= at < until):
            raise TraceError(
                f"{where}: the node is away from {at:g} to {until:g} s; the end must come after the beginning, and both be"
                " finite"
            )
        if not all(0 <= node < nodes[pool] for node in which):
            raise TraceError(f"{where}: pool {pool} has nodes 0 to {nodes[pool] - 1}, not {row['node']}")
        found += [Outage(at, pool, node, until) for node in which]
    if not found:
        raise TraceError(f"{path}: there is no outage in it")
    return tuple(found)
