"""Which running jobs to stop so that a gang fits: least cost per place gained.

The cost of a victim is given by the caller (work lost since its last checkpoint, or value). For one pod every
node is looked at, and the cheapest set on one node wins. For a gang, places are bought one node at a time
where a place is cheapest; a victim that spans several nodes makes its other nodes cheaper. At the end victims
that turned out not to be needed are spared, dearest first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .cluster import PoolNodes, request
from .columns import Candidate
from .round import Seat
from .types import JobId


@dataclass(frozen=True, slots=True)
class Victim:
    """A job that may be stopped, and what that costs."""

    seat: Seat
    cost: float

    @property
    def id(self) -> JobId:
        return self.seat.job.id


def choose(
    nodes: PoolNodes, column: Candidate, eligible: Mapping[JobId, Victim], allowed: frozenset[int] | None
) -> list[Victim] | None:
    """The cheapest victims found whose end makes room for the column; None if there are none.

    The result ignores topology domains: the caller tries the placement and gives up if it does not hold.
    """
    search = _Search(nodes, column, eligible, allowed)
    return search.one() if column.pods == 1 else search.many()


class _Search:
    def __init__(
        self,
        nodes: PoolNodes,
        column: Candidate,
        eligible: Mapping[JobId, Victim],
        allowed: frozenset[int] | None,
    ) -> None:
        self.nodes = nodes
        self.pods = column.pods
        self.ask = request(column.per_pod, nodes.pool.is_cpu)
        self.on_node: dict[int, list[tuple[Victim, tuple[int, ...]]]] = {}
        self.at: dict[JobId, list[int]] = {}
        for job in sorted(eligible):
            self._add(eligible[job])
        self.candidates = [
            i for i in range(len(nodes.nodes)) if nodes.usable[i] and (allowed is None or i in allowed)
        ]
        self.extra: dict[int, list[int]] = {}
        """What the chosen victims free, by node."""

    def _add(self, victim: Victim) -> None:
        placement = victim.seat.placement
        if placement is None or placement.pool != self.nodes.pool.name:
            return
        amounts = request(placement.per_pod, self.nodes.pool.is_cpu)
        counts: dict[int, int] = {}
        for name in placement.nodes:
            i = self.nodes.index.get(name)
            if i is not None:
                counts[i] = counts.get(i, 0) + 1
        for i, count in counts.items():
            self.on_node.setdefault(i, []).append((victim, tuple(count * amount for amount in amounts)))
        self.at[victim.id] = sorted(counts)

    def _room(self, i: int, more: tuple[int, ...] | list[int] = (0, 0, 0, 0)) -> int:
        free, extra = self.nodes.later[i], self.extra.get(i, (0, 0, 0, 0))
        most = 1 << 30
        for k in range(4):
            if self.ask[k] > 0:
                most = min(most, (free[k] + extra[k] + more[k]) // self.ask[k])
        return max(0, most)

    def _cheapest(self, i: int, need: int, gone: set[JobId]) -> tuple[float, int, list[Victim]] | None:
        """Cost per place, places gained and victims on node i, by the best prefix in order of cost per unit."""
        here = [(v, freed) for v, freed in self.on_node.get(i, []) if v.id not in gone]
        here.sort(key=lambda item: (item[0].cost / max(item[1][self.nodes.key], 1), item[0].id))
        base = self._room(i)
        more, cost, taken = [0, 0, 0, 0], 0.0, []
        best: tuple[float, int, list[Victim]] | None = None
        for victim, freed in here:
            more = [a + b for a, b in zip(more, freed, strict=True)]
            cost += victim.cost
            taken.append(victim)
            gained = min(self._room(i, more) - base, need)
            if gained > 0 and (best is None or cost / gained < best[0] - 1e-12):
                best = (cost / gained, gained, list(taken))
        return best

    def one(self) -> list[Victim] | None:
        best: tuple[float, int, list[Victim]] | None = None
        for i in self.candidates:
            if i not in self.on_node:
                continue
            found = self._cheapest(i, 1, set())
            if found is not None and (best is None or found[0] < best[0] - 1e-12):
                best = found
        return None if best is None else self._spared(best[2], {i for v in best[2] for i in self.at[v.id]})

    def many(self) -> list[Victim] | None:
        chosen: list[Victim] = []
        gone: set[JobId] = set()
        total = sum(self._room(i) for i in self.candidates)
        known = set(self.candidates)
        offers = {
            i: offer
            for i in sorted(self.on_node)
            if i in known and (offer := self._cheapest(i, self.pods, gone))
        }
        while total < self.pods:
            if not offers:
                return None
            i = min(offers, key=lambda i: (offers[i][0], i))
            touched: set[int] = set()
            for victim in offers[i][2]:
                chosen.append(victim)
                gone.add(victim.id)
                touched |= set(self._free(victim))
            total = sum(self._room(i) for i in self.candidates)
            for j in sorted(touched | {i}):
                offer = self._cheapest(j, self.pods, gone)
                offers.pop(j, None)
                if offer is not None:
                    offers[j] = offer
        return self._spared(chosen, set(self.candidates))

    def _free(self, victim: Victim, sign: int = 1) -> list[int]:
        for i in self.at[victim.id]:
            freed = next(freed for v, freed in self.on_node[i] if v.id == victim.id)
            extra = self.extra.setdefault(i, [0, 0, 0, 0])
            for k in range(4):
                extra[k] += sign * freed[k]
        return self.at[victim.id]

    def _spared(self, chosen: list[Victim], where: set[int]) -> list[Victim]:
        """The chosen without those that are not needed."""
        where &= set(self.candidates)
        self.extra = {}
        for victim in chosen:
            self._free(victim)
        kept = list(chosen)
        total = sum(self._room(i) for i in where)
        for victim in sorted(chosen, key=lambda v: (-v.cost, v.id)):
            before = sum(self._room(i) for i in self.at[victim.id] if i in where)
            self._free(victim, sign=-1)
            after = sum(self._room(i) for i in self.at[victim.id] if i in where)
            if total - before + after >= self.pods:
                total += after - before
                kept.remove(victim)
            else:
                self._free(victim)
        return kept
