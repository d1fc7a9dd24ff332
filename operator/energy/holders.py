"""Which part of each node's boards the pods hold. Pure but for a memo.

What counts are the devices that pods request from the node's pool: the kubelet gives a board to one pod only, from
when the pod is bound until it has ended. Of slices (MIG) and shared boards it is the part of the node's devices.
Pods that request none pay for nothing there. On nodes of a CPU pool cores count in their place, for the host alone.

Where it is known which boards a pod holds (`on_boards`), these count in place of its part of the node's boards.

Of a time that has passed without an operator (`over`), a pod holds its part from its start to its end. A pod that is
gone meanwhile is not known any more: its part is nobody's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from busbar.kube.informer import Key
from busbar.kube.types import AcceleratorPool
from busbar.operator.energy.shares import NOBODY, HeldBoard, Holder, Owner
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING
from busbar.operator.pools.nodes import NodePools
from busbar.operator.power.board_holders import Boards
from busbar.operator.watch.projections import Node, Pod

KINDS = {KIND_TRAINING: "job", KIND_SERVICE: "service"}


class Holders:
    """Remembers the nodes' pools."""

    def __init__(self) -> None:
        self._pools = NodePools()

    def of(
        self,
        nodes: Mapping[str, Node],
        pods: Iterable[Pod],
        pools: tuple[AcceleratorPool, ...],
        tenant_of: Mapping[str, str],
    ) -> dict[str, list[Holder]]:
        """By node; nodes of no pool have no holders.

        Args:
            nodes: those that are metered, by name.
            tenant_of: tenants by namespace.
        """
        self._pools.use(pools)
        found: dict[str, list[Holder]] = {}
        for pod in pods:
            node = nodes.get(pod.node)
            if node is None or pod.ended:
                continue
            boards, host = _parts(pod, node, self._pools.resource(node))
            if host > 0:
                found.setdefault(node.name, []).append(Holder(_owner(pod, tenant_of), boards, host))
        return found

    def over(
        self,
        nodes: Mapping[str, tuple[Node, float, float]],
        pods: Iterable[Pod],
        pools: tuple[AcceleratorPool, ...],
        tenant_of: Mapping[str, str],
    ) -> dict[str, list[Holder]]:
        """The same for a time: the parts are the mean of it.

        Args:
            nodes: with the time's beginning and end, in seconds since 1970.
        """
        self._pools.use(pools)
        found: dict[str, list[Holder]] = {}
        for pod in pods:
            if pod.node not in nodes:
                continue
            node, begin_s, end_s = nodes[pod.node]
            boards, host = _parts(pod, node, self._pools.resource(node))
            part = _part_of(pod, begin_s, end_s)
            if host * part > 0:
                holder = Holder(_owner(pod, tenant_of), boards * part, host * part)
                found.setdefault(node.name, []).append(holder)
        return found

    def on_boards(
        self, node: Node, boards: Boards, pods: Mapping[Key, Pod], tenant_of: Mapping[str, str]
    ) -> dict[str, HeldBoard]:
        """By board of a node: who holds it now, where that is known.

        A pod of which nothing is known here, such as one that was deleted and is not gone yet, is nobody. Pods that share a
        board hold of it what they request of the node's devices, divided by the boards that they are on.
        """
        resource = self._pools.resource(node)
        on = Counter(key for keys in boards.values() for key in keys)
        divided = node.device(resource) != len(boards)
        found: dict[str, HeldBoard] = {}
        for uuid, keys in boards.items():
            parts: list[tuple[Owner, float]] = []
            for key in keys:
                pod = pods.get(key)
                if pod is None or pod.node != node.name:
                    parts.append((NOBODY, 1.0))
                elif not pod.ended:
                    part = pod.requests.device(resource) / on[key]
                    parts.append((_owner(pod, tenant_of), part or 1.0))
            found[uuid] = HeldBoard(tuple(parts), len(parts) > 1 or (divided and bool(parts)))
        return found

    def pool(self, node: Node) -> AcceleratorPool | None:
        """The pool that the node was counted to at the last call of `of` or `over`."""
        return self._pools.pool(node)


def _parts(pod: Pod, node: Node, resource: str) -> tuple[float, float]:
    """The parts of the boards and of the host."""
    if resource == "cpu":
        return 0.0, pod.requests.cpu_m / node.cpu_m if node.cpu_m else 0.0
    devices = node.device(resource)
    part = pod.requests.device(resource) / devices if devices else 0.0
    return part, part


def _part_of(pod: Pod, begin_s: float, end_s: float) -> float:
    """The part of a time in which the pod held what it requests."""
    since = pod.started_at if not pod.restarts else None  # a container that was started again says when
    since = since or pod.created_at
    until = pod.exit.finished_at if pod.exit is not None else None
    if pod.ended and until is None:
        return 0.0
    first_s = max(begin_s, since.timestamp()) if since is not None else begin_s
    last_s = min(end_s, until.timestamp()) if pod.ended and until is not None else end_s
    return max(0.0, last_s - first_s) / (end_s - begin_s) if end_s > begin_s else 1.0


def _owner(pod: Pod, tenant_of: Mapping[str, str]) -> Owner:
    tenant = tenant_of.get(pod.key.namespace, "")
    if not tenant:
        return NOBODY
    kind = KINDS.get(pod.kind, "pod")
    return Owner(tenant, kind, pod.owner_uid if kind != "pod" else "")
