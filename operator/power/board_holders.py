"""Which pods hold which board of a node. Pure but for what it remembers of simulated nodes.

The kubelet decides it when it starts a pod, and the node's agent asks the kubelet. Simulated nodes have no kubelet, so this
module plays its part for them: a pod keeps its boards until it ends, and a new one gets the first that are free, the older pod
first.

Where a node has another number of its pool's devices than of boards (slices, boards that are shared in time), or is in no pool,
only its kubelet knows.

A pod whose boards are not known yet, because the kubelet has not started it or the agent has not asked since, is found on no
board. It will be on boards that nobody holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from busbar.kube.informer import Key
from busbar.kube.types import AcceleratorPool
from busbar.operator.pools.nodes import NodePools
from busbar.operator.power.readings import Metered, Reading
from busbar.operator.watch.projections import Node, Pod

Boards = Mapping[str, tuple[Key, ...]]
"""The boards of a node, by uuid: the pods that hold each; empty: nobody does."""


class BoardHolders:
    """Remembers what it gave the pods of simulated nodes."""

    def __init__(self) -> None:
        self._pools = NodePools()
        self._given: dict[str, dict[str, str]] = {}  # by node: uid of the pod by board

    def look(
        self,
        readings: Mapping[str, Reading],
        nodes: Mapping[Key, Node],
        pods: Iterable[Pod],
        pools: tuple[AcceleratorPool, ...],
    ) -> dict[str, Boards]:
        """By node; a node is left out if nobody says who holds its boards.

        Args:
            readings: the last of each node, by name.
            nodes: of the cluster.
            pods: all of the cluster.
            pools: all of the cluster; a pod holds as many boards as it requests devices of the node's pool.
        """
        self._pools.use(pools)
        on: dict[str, list[Pod]] = {}
        for pod in pods:
            if pod.node in readings and not pod.ended and pod.requests.devices:
                on.setdefault(pod.node, []).append(pod)
        found: dict[str, Boards] = {}
        given: dict[str, dict[str, str]] = {}
        for node, reading in readings.items():
            boards = reading.boards
            if reading.is_simulated:
                known = nodes.get(Key("", node))
                resource = self._pools.resource(known) if known is not None else ""
                if known is None or known.device(resource) != len(boards):
                    continue
                here = {pod.uid: pod for pod in on.get(node, ())}
                given[node] = holds = self._give(node, boards, here.values(), resource)
                found[node] = {uuid: (here[holds[uuid]].key,) if uuid in holds else () for uuid in boards}
            elif boards and all(board.pods is not None for board in boards.values()):
                found[node] = {uuid: _keys(board) for uuid, board in boards.items()}
        self._given = given
        return found

    def _give(self, node: str, boards: Iterable[str], pods: Collection[Pod], resource: str) -> dict[str, str]:
        """The boards that pods hold, each with its pod's uid."""
        here = {pod.uid for pod in pods}
        held = {uuid: uid for uuid, uid in self._given.get(node, {}).items() if uid in here}
        free = [uuid for uuid in boards if uuid not in held]
        known = set(held.values())
        new = (pod for pod in pods if pod.uid not in known)
        for pod in sorted(new, key=lambda pod: (pod.created_at is None, pod.created_at or 0, pod.key)):
            count = pod.requests.device(resource)
            held |= dict.fromkeys(free[:count], pod.uid)
            free = free[count:]
        return held


def _keys(board: Metered) -> tuple[Key, ...]:
    return tuple(Key(*name.split("/", 1)) for name in board.pods or () if "/" in name)
