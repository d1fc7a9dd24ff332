"""Nodes by what is left of them, and the best node for a request.

Nodes with the same resources left form one bucket. For each kind of request the buckets are kept sorted by
what a placement there would cost the rest of the cluster (`packing.py`), and only new buckets are scored, so
finding a node means looking at the first bucket, however many nodes there are. Of equal costs the first node
is taken: the answer depends on the nodes as they are, not on their history.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .packing import Loss, NodeState, PodRequest

LOG = 50_000
"""Changes remembered before all orders are built again."""

Losses = Callable[[Sequence[NodeState], PodRequest], list[Loss | None]]
"""What a request costs in each state; None if it does not fit."""


@dataclass(slots=True)
class _Order:
    """Buckets by the loss of one kind of request. Some of them may be empty by now."""

    rows: list[tuple[float, NodeState]] = field(default_factory=list)
    listed: set[NodeState] = field(default_factory=set)
    seen: int = 0
    """Entries of the log that are included."""


class NodeIndex:
    """Nodes, by number, in buckets of equal state."""

    def __init__(self, losses: Losses) -> None:
        self.losses = losses
        self.nodes: dict[NodeState, set[int]] = {}
        self._log: list[NodeState] = []
        """Buckets in the order in which they got their first node."""
        self._orders: dict[PodRequest, _Order] = {}

    def put(self, node: int, state: NodeState) -> None:
        """Add a node to its bucket."""
        own = self.nodes.get(state)
        if own is None:
            self.nodes[state] = {node}
            self._log.append(state)
            if len(self._log) > LOG:
                self.reset()
        else:
            own.add(node)

    def take(self, node: int, state: NodeState) -> None:
        """Remove a node from its bucket."""
        own = self.nodes[state]
        own.discard(node)
        if not own:
            del self.nodes[state]

    def update_demand(self, losses: Losses) -> None:
        """The losses have changed."""
        self.losses = losses
        self.reset()

    def reset(self) -> None:
        """Forget the orders."""
        self._orders.clear()
        self._log = list(self.nodes)

    def best(self, kind: PodRequest, fits: Callable[[int], bool] | None = None) -> tuple[int, Loss] | None:
        """The node with the least loss, and the loss; None: it fits nowhere.

        Args:
            fits: what a node must satisfy besides its state.
        """
        order = self._order(kind)
        rows, at = order.rows, 0
        found, least, where = -1, 0.0, None
        while at < len(rows):
            loss, state = rows[at]
            if found >= 0 and loss > least:
                break
            nodes = self.nodes.get(state)
            if nodes is None:
                del rows[at]
                order.listed.discard(state)
                continue
            node = min(nodes) if fits is None else min(filter(fits, nodes), default=-1)
            if node >= 0 and (found < 0 or node < found):
                found, least, where = node, loss, state
            at += 1
        if where is None:
            return None
        loss_there = self.losses((where,), kind)[0]
        assert loss_there is not None
        return found, loss_there

    def _order(self, kind: PodRequest) -> _Order:
        """The order for this kind of request, with new buckets added."""
        order = self._orders.get(kind)
        if order is None:
            order = self._orders[kind] = _Order()
        if order.seen < len(self._log):
            new = [s for s in dict.fromkeys(self._log[order.seen :]) if s not in order.listed]
            order.seen = len(self._log)
            new = [state for state in new if state in self.nodes]
            order.listed.update(new)
            for state, loss in zip(new, self.losses(new, kind), strict=True):
                if loss is not None:
                    insort(order.rows, (loss[0], state))
        return order
