"""Maximum flow by shortest augmenting paths (Edmonds and Karp).

Fair shares are a flow problem (fair_share.py) on a few nodes per tenant and type, so nothing faster is
needed.
"""

from __future__ import annotations

from collections import deque

EPS = 1e-7


class Flow:
    """A flow network whose nodes have names; `source` and `sink` exist from the start."""

    def __init__(self) -> None:
        self.residual: dict[str, dict[str, float]] = {"source": {}, "sink": {}}
        """Residual capacity, by edge; `run` changes it."""
        self.capacity: dict[str, dict[str, float]] = {}

    def edge(self, u: str, v: str, amount: float) -> None:
        """Add capacity from u to v."""
        self.residual.setdefault(u, {})
        self.residual.setdefault(v, {}).setdefault(u, 0.0)
        self.residual[u][v] = self.residual[u].get(v, 0.0) + amount

    def run(self) -> float:
        """The maximum flow; afterwards `source_side` and `cut_capacity` describe a minimum cut."""
        self.capacity = {u: dict(out) for u, out in self.residual.items()}
        total = 0.0
        while True:
            parent = self._search("source")
            if "sink" not in parent:
                return total
            path, node = [], "sink"
            while node != "source":
                path.append((parent[node], node))
                node = parent[node]
            amount = min(self.residual[u][v] for u, v in path)
            for u, v in path:
                self.residual[u][v] -= amount
                self.residual[v][u] += amount
            total += amount

    def _search(self, start: str) -> dict[str, str]:
        parent = {start: start}
        queue = deque([start])
        while queue:
            u = queue.popleft()
            for v, amount in self.residual[u].items():
                if amount > EPS and v not in parent:
                    parent[v] = u
                    queue.append(v)
        return parent

    def reaches_sink(self, node: str) -> bool:
        """Whether more could flow from this node."""
        return "sink" in self._search(node)

    def source_side(self) -> set[str]:
        """The nodes on the source's side of the minimum cut."""
        return set(self._search("source"))

    def cut_capacity(self, side: set[str]) -> float:
        """Capacity of the edges that leave `side`, without those of the source."""
        return sum(
            amount
            for u in sorted(side)
            if u != "source"
            for v, amount in self.capacity[u].items()
            if v not in side and amount > 0
        )
