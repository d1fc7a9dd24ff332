"""What each node leaves to the jobs of the snapshot, kept in step with nodes, pools and pods.

A change marks the nodes that it concerns, and only these are counted again. A pod stands at the node that it is bound
or pinned to, with the use that is made of its requests (`Use`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum, auto

from busbar.kube.types import AcceleratorPool
from busbar.operator.accounting.allocations import HeldElsewhere, Overlap, PoolRemarks
from busbar.operator.pools.held_elsewhere import held_on_node, total
from busbar.operator.pools.nodes import lacks_fabric, pool_of_node, pools_selecting, scheduler_node
from busbar.operator.watch.projections import HOSTNAME, Node, Pod
from busbar.scheduler import Node as SNode


class Use(Enum):
    """Who accounts for what a pod requests."""

    JOB = auto()
    """A job of the snapshot counts it, so it is not taken from its node as well."""
    OTHER = auto()
    """Taken from its node."""
    NOBODY = auto()
    """The same, and no job accounts for it (pods/foreign_pods.py, `is_unaccounted`)."""


class Capacities:
    """See the module's head."""

    def __init__(self) -> None:
        self.pools: tuple[AcceleratorPool, ...] = ()
        self._nodes: dict[str, Node] = {}
        self._hosts: dict[str, set[str]] = {}
        """Host name to the names of its nodes."""
        self._pods: dict[str, dict[str, tuple[Pod, Use]]] = {}
        """By place and uid."""
        self._made: dict[str, SNode] = {}
        """The nodes of pools."""
        self._names: list[str] = []
        """Of these, in order, as of the last `nodes`."""
        self._held: dict[str, tuple[str, HeldElsewhere]] = {}
        """By node: its pool, and what pods of no job hold of it."""
        self._selected: dict[str, tuple[str, ...]] = {}
        """By node that several pools select: their names; it belongs to the first."""
        self._without_fabric: dict[str, str] = {}
        """By ready node with too few devices of its pool's network: the pool."""
        self._stale: set[str] = set()
        self._current: tuple[SNode, ...] = ()

    def set_pools(self, pools: Iterable[AcceleratorPool]) -> None:
        """Other pools, or pools with other specs: every node is counted again."""
        self.pools = tuple(pools)
        self._stale |= self._nodes.keys()

    def set_node(self, name: str, node: Node | None) -> None:
        """The node changed; None: it is gone."""
        for host in _hosts(self._nodes.get(name)):
            self._hosts[host].discard(name)
        for host in _hosts(node):
            self._hosts.setdefault(host, set()).add(name)
        if node is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = node
        self._stale.add(name)

    def put(self, pod: Pod, use: Use) -> None:
        """A pod that is new, changed, or accounted for otherwise. One that has ended holds nothing."""
        if pod.ended:
            self.remove(pod)
            return
        if not pod.place or self._pods.setdefault(pod.place, {}).get(pod.uid) == (pod, use):
            return
        self._pods[pod.place][pod.uid] = pod, use
        self._stale.add(pod.place)

    def remove(self, pod: Pod) -> None:
        """A pod as it was put: it is gone, or stands elsewhere now."""
        here = self._pods.get(pod.place)
        if here is not None and here.pop(pod.uid, None) is not None:
            self._stale.add(pod.place)
            if not here:
                del self._pods[pod.place]

    def node_of(self, pod: Pod) -> Node | None:
        """The node that a pod is bound or pinned to, by its name or its host name."""
        name = pod.place if pod.place in self._nodes else min(self._hosts.get(pod.place, ()), default="")
        return self._nodes.get(name)

    def pool_of(self, node: Node) -> AcceleratorPool | None:
        """The pool that a node belongs to."""
        return pool_of_node(node, self.pools)

    def pods_at(self, node: Node | None) -> list[Pod]:
        """The pods that are bound or pinned to a node."""
        places = {node.name, *_hosts(node)} if node is not None else set()
        return [pod for place in places for pod, _ in self._pods.get(place, {}).values()]

    def nodes(self) -> tuple[SNode, ...]:
        """The nodes that a pool selects, by name, each with the capacity that other pods leave."""
        differs = [name for name in sorted(self._stale) if self._count(name)]
        self._stale.clear()
        if differs:
            if len(self._names) != len(self._made) or not self._made.keys() >= set(differs):
                self._names = sorted(self._made)
            self._current = tuple(map(self._made.__getitem__, self._names))
        return self._current

    def remarks(self) -> PoolRemarks:
        """What pods of no job hold, and nodes that several pools select or that lack devices; as of the last `nodes`."""
        elsewhere = total(self._held[name] for name in sorted(self._held))
        counts: Counter[tuple[str, str, bool]] = Counter()
        for first, *others in self._selected.values():
            counts.update((first, other, True) for other in others)
            counts.update((other, first, False) for other in others)
        overlaps: dict[str, tuple[Overlap, ...]] = {}
        for (pool, other, ours), nodes in sorted(counts.items()):
            overlaps[pool] = (*overlaps.get(pool, ()), Overlap(other, nodes, ours))
        return PoolRemarks(elsewhere, overlaps, Counter(self._without_fabric.values()))

    def _count(self, name: str) -> bool:
        """Counts one node again; returns whether the scheduler's node differs."""
        node, was = self._nodes.get(name), self._made.get(name)
        selecting = pools_selecting(node, self.pools) if node is not None else []
        pool = selecting[0] if selecting else None
        self._held.pop(name, None)
        self._selected.pop(name, None)
        self._without_fabric.pop(name, None)
        if len(selecting) > 1:
            self._selected[name] = tuple(each.metadata.name for each in selecting)
        if node is None or pool is None:
            return self._made.pop(name, None) is not None
        if node.ready and lacks_fabric(node, pool):
            self._without_fabric[name] = pool.metadata.name
        here = self._pods.get(name, {}).values()
        made = scheduler_node(node, pool, (pod.requests for pod, use in here if use is not Use.JOB))
        nobodys = [pod for pod, use in here if use is Use.NOBODY and pod.node]
        held = held_on_node(pool, nobodys) if nobodys and node.ready else None
        if held is not None:
            self._held[name] = pool.metadata.name, held
        if made == was:
            return False
        self._made[name] = made
        return True


def _hosts(node: Node | None) -> tuple[str, ...]:
    return tuple(value for key, value in node.labels if key == HOSTNAME) if node is not None else ()
