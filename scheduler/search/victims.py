"""Which running jobs to stop so that a request fits: least cost per pod that then fits.

The caller gives the cost of a victim (work lost since its last checkpoint, or value). For one pod every node
is considered, and the cheapest set of victims on one node wins. For a gang, room is bought one node at a time
where one more pod costs least; a victim that spans several nodes makes its other nodes cheaper. Then victims
that turned out not to be needed are spared, dearest first, and the search is repeated without one of the
chosen as long as that finds a cheaper set.

Victims come in groups (those of one tenant, for example) that know what each victim frees on which node, so
one group serves many searches. A node whose lower bound is too dear is not examined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ..candidates.candidates import Candidate
from ..model.snapshot import JobId
from ..placement.pool import PoolNodes, request
from ..placement.sharing import leaving
from .state import Assignment

Floats = NDArray[np.float64]
_Amounts = tuple[int, ...]
"""Resources of a node, in the order of `pool.py`."""
SWAPS = 480
"""Effort limit: nodes examined, at most, in the search for cheaper victims of a gang, counted once per pod."""
SLACK = 1e-9
"""Relative margin by which a lower bound stays below the true cost in spite of rounding."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an elastic job that is given back: the smaller candidate, the nodes of the pods that stay
    and of those that leave."""

    candidate: Candidate
    stays: tuple[str, ...]
    leaves: tuple[str, ...]

    @property
    def freed_m(self) -> int:
        """Thousandths of an accelerator given back."""
        return len(self.leaves) * self.candidate.per_pod.accelerators_m


class Victim:
    """A job that may be stopped or shrunk, the cost of that, and what it frees on which node."""

    __slots__ = ("_offers", "amount_m", "assignment", "cost", "frees", "id", "nodes", "part", "placement")

    def __init__(
        self, assignment: Assignment, cost: float, nodes: PoolNodes, part: Part | None = None
    ) -> None:
        self.assignment = assignment
        self.cost = cost
        self.part = part
        """The part that may be taken; None: all."""
        self.nodes = nodes
        self._offers: list[tuple[int, NodeOffer]] | None = None
        self.id: JobId = assignment.job.id
        self.frees: dict[int, _Amounts] = {}
        """By index of the node."""
        placement = self.placement = assignment.placement
        self.amount_m = 0 if placement is None else placement.accelerators_m
        """All that it holds."""
        if placement is not None and placement.pool == nodes.pool.name:
            self.frees = nodes.holds(placement if part is None else leaving(placement, part.leaves))

    @property
    def offers(self) -> list[tuple[int, NodeOffer]]:
        """The victim as each of its nodes sees it."""
        if self._offers is None:
            key = self.nodes.key
            self._offers = [
                (i, NodeOffer(self.cost / max(frees[key], 1), self.id, self, frees))
                for i, frees in self.frees.items()
            ]
        return self._offers


@dataclass(slots=True)
class NodeOffer:
    """One victim as one node sees it: the cost per accelerator freed there."""

    unit_cost: float
    id: JobId
    victim: Victim
    frees: _Amounts


class VictimGroup:
    """Victims by the nodes they run on, cheapest per accelerator first."""

    def __init__(self, victims: Iterable[Victim], nodes: PoolNodes) -> None:
        self._nodes = nodes
        self._least: Floats | None = None
        self.on_node: dict[int, list[NodeOffer]] = {}
        self.count = 0
        on_node, shared = self.on_node, set()
        for victim in victims:
            self.count += 1
            for i, offer in victim.offers:
                here = on_node.get(i)
                if here is None:
                    on_node[i] = [offer]
                else:
                    here.append(offer)
                    shared.add(i)
        for i in shared:
            on_node[i].sort(key=_by_cost)

    def without(self, jobs: Set[JobId]) -> VictimGroup:
        """The group less these jobs; itself if it has none of them."""
        gone = {offer.id: offer.victim for row in self.on_node.values() for offer in row if offer.id in jobs}
        if not gone:
            return self
        found = VictimGroup((), self._nodes)
        found.count = self.count - len(gone)
        found.on_node = dict(self.on_node)
        for i in {i for victim in gone.values() for i in victim.frees}:
            left = [offer for offer in self.on_node[i] if offer.id not in gone]
            if left:
                found.on_node[i] = left
            else:
                del found.on_node[i]
        return found

    @property
    def least(self) -> Floats:
        """Lowest cost per accelerator, by node; infinite for nodes without victims."""
        if self._least is None:
            self._least = np.full(len(self._nodes.nodes), np.inf)
            self._least[list(self.on_node)] = [offers[0].unit_cost for offers in self.on_node.values()]
        return self._least


def _by_cost(offer: NodeOffer) -> tuple[float, JobId]:
    return offer.unit_cost, offer.id


def choose_victims(
    nodes: PoolNodes,
    candidate: Candidate,
    groups: Sequence[VictimGroup],
    allowed: frozenset[int] | None,
    thorough: bool = False,
) -> list[Victim] | None:
    """The cheapest victims found whose end makes room for the candidate; None if there are none.

    Args:
        allowed: indices of the nodes that the job may use; None: all. A required topology domain is the caller's business: it searches each domain by itself.
        thorough: for a gang, search on for cheaper victims than the first set found.
    """
    search = _Search(nodes, candidate, groups, allowed)
    if candidate.pods == 1:
        return search.one()
    return search.best() if thorough else search.many()


def _cost(victims: Iterable[Victim]) -> float:
    return math.fsum(victim.cost for victim in victims)


def _dearest(victims: Iterable[Victim]) -> list[Victim]:
    return sorted(victims, key=lambda victim: (-victim.cost, victim.id))


_Bought = tuple[float, int, list[Victim]]
"""Cost per pod gained, pods gained, and the victims."""
_Offered = dict[int, _Bought]
_Heap = list[tuple[float, int]]
"""Cost per pod gained (or a lower bound), and the node."""


class _Search:
    def __init__(
        self,
        nodes: PoolNodes,
        candidate: Candidate,
        groups: Sequence[VictimGroup],
        allowed: frozenset[int] | None,
    ) -> None:
        self.nodes = nodes
        self.pods = candidate.pods
        self.ask = request(candidate.per_pod, nodes.pool.is_cpu)
        self.asked = [k for k in range(4) if self.ask[k] > 0]
        self.width = 4 + nodes.width
        self.nothing = (0,) * self.width
        self.groups = [group for group in groups if group.on_node]
        self.maps = [group.on_node for group in self.groups]
        self.allowed = allowed
        self._priced: list[tuple[float, int]] | None = None
        self.extra: dict[int, list[int]] = {}
        """What the chosen victims free, by node."""

    def _open(self, i: int) -> bool:
        return self.nodes.usable[i] and (self.allowed is None or i in self.allowed)

    def _room(self, i: int, more: Sequence[int] | None = None) -> int:
        free, extra = self.nodes.free_later[i], self.extra.get(i, self.nothing)
        more = self.nothing if more is None else more
        if self.nodes.width:
            return self.nodes.room_in(
                [a + b + c for a, b, c in zip(free, extra, more, strict=True)], self.ask
            )
        most = 1 << 30
        for k in self.asked:
            most = min(most, (free[k] + extra[k] + more[k]) // self.ask[k])
        return max(0, most)

    def _offers(self, i: int) -> list[NodeOffer]:
        rows = [offers for on_node in self.maps if (offers := on_node.get(i)) is not None]
        if len(rows) == 1:
            return rows[0]
        here = [offer for row in rows for offer in row]
        here.sort(key=_by_cost)
        return here

    def _cheapest(self, i: int, need: int, gone: set[JobId]) -> _Bought | None:
        """The cheapest way to gain pods on node i: the best prefix of its victims in order of cost per
        accelerator, or one victim alone (a small one that is just enough may cost less than a large one that
        is cheaper per accelerator)."""
        base = self._room(i)
        more, cost, taken = [0] * self.width, 0.0, []
        best: _Bought | None = None
        for offer in self._offers(i):
            if offer.id in gone:
                continue
            frees = offer.frees
            for k in range(self.width):
                more[k] += frees[k]
            cost += offer.victim.cost
            taken.append(offer.victim)
            gained = min(self._room(i, more) - base, need)
            if gained > 0 and (best is None or cost / gained < best[0] - 1e-12):
                best = (cost / gained, gained, list(taken))
            if gained == need:
                break
        return None if best is None else self._alone(i, need, gone, base, best)

    def _alone(self, i: int, need: int, gone: set[JobId], base: int, best: _Bought) -> _Bought:
        """The best so far, or a single victim that costs less per pod."""
        for offer in self._offers(i):
            cost = offer.victim.cost
            if offer.id not in gone and cost < best[0] * need - 1e-12:
                gained = min(self._room(i, offer.frees) - base, need)
                if gained > 0 and cost / gained < best[0] - 1e-12:
                    best = (cost / gained, gained, [offer.victim])
        return best

    def one(self) -> list[Victim] | None:
        """The cheapest set on one node. A node costs at least what is missing on it times its cheapest
        accelerator, so nodes are examined in that order until none can be cheaper."""
        best: _Bought | None = None
        where = -1
        for bound, i in self._bounds():
            if best is not None and (bound, i) > (best[0], where):
                break
            found = self._cheapest(i, 1, set())
            if found is not None and (best is None or (found[0], i) < (best[0], where)):
                best, where = found, i
        return None if best is None else self._spared(best[2])

    def best(self) -> list[Victim] | None:
        """Victims for a gang. If all victims together free just enough there is no choice. Otherwise several
        sets are built: room bought node by node from each starting node, and all victims less those that can
        be spared. The cheapest set is improved with or without one victim as long as that helps. On small
        clusters this comes near the minimum; on large ones few alternatives or none are examined (`SWAPS`)."""
        room = self._room_if_all_went()
        if room <= self.pods:
            return self._spared(self._all()) if room == self.pods else None
        bought = self.many()
        if bought is None:
            return None
        touched = sorted(i for _, i in self._bounds())
        tries = SWAPS // max(1, len(touched) * self.pods)
        if not tries:
            return bought
        starts = [bought, self._spared(self._all())]
        starts += [found for i in touched[:tries] if (found := self.many(first=i)) is not None]
        chosen = min(starts, key=_cost)
        banned: frozenset[JobId] = frozenset()
        queue = self._swaps(chosen)
        while queue and tries > 0:
            tries -= 1
            victim, comes = queue.pop(0)
            without = banned if comes else banned | {victim.id}
            other = self._spared([*chosen, victim], victim) if comes else self.many(without)
            if other is not None and _cost(other) < _cost(chosen) - 1e-9:
                chosen, banned = other, without
                queue = self._swaps(chosen)
        return chosen

    def _swaps(self, chosen: list[Victim]) -> list[tuple[Victim, bool]]:
        """Victims that may be added in exchange for others (True), and chosen ones that may be left out
        (False)."""
        own = {victim.id for victim in chosen}
        most = _cost(chosen)
        others = [victim for victim in self._all() if victim.id not in own and victim.cost < most]
        return [(v, True) for v in others] + [(v, False) for v in _dearest(chosen)]

    def _all(self) -> list[Victim]:
        found = {o.id: o.victim for on_node in self.maps for offers in on_node.values() for o in offers}
        return [found[name] for name in sorted(found)]

    def _bounds(self) -> list[tuple[float, int]]:
        """Usable nodes with victims, and a lower bound on the cost of one pod there, cheapest first."""
        if self._priced is not None:
            return self._priced
        key = self.nodes.key
        least = np.minimum.reduce([group.least for group in self.groups])
        some = np.flatnonzero(np.isfinite(least))
        later = self.nodes.free_later
        free = np.array([later[i][key] for i in some.tolist()], np.int64)
        bounds = np.maximum(0, self.ask[key] - np.maximum(0, free)) * least[some] * (1 - SLACK)
        order = np.argsort(bounds, kind="stable")
        found = zip(bounds[order].tolist(), some[order].tolist(), strict=True)
        self._priced = [(bound, i) for bound, i in found if self._open(i)]
        return self._priced

    def many(self, banned: frozenset[JobId] = frozenset(), first: int | None = None) -> list[Victim] | None:
        """Victims for a gang, one node at a time (node `first` first), without the banned ones."""
        chosen: list[Victim] = []
        gone: set[JobId] = set(banned)
        self.extra = {}
        total = sum(room for _, room in self.nodes.rooms(self.ask, True, self.allowed))
        heap = list(self._bounds())
        if self._gained(total, [i for _, i in heap]) < self.pods:
            return None
        guessed = {i for _, i in heap}
        offers: _Offered = {}
        while total < self.pods:
            i = self._next(heap, guessed, offers, gone)
            if i is None:
                return None
            if first is not None:
                self._look(first, heap, guessed, offers, gone)
                i, first = (first if first in offers else i), None
            changed = {i}
            for victim in offers[i][2]:
                chosen.append(victim)
                gone.add(victim.id)
                changed.update(victim.frees)
            total -= sum(self._room(j) for j in changed if self._open(j))
            for victim in offers[i][2]:
                self._free(victim)
            total += sum(self._room(j) for j in changed if self._open(j))
            guessed -= changed
            for j in sorted(changed):
                offers.pop(j, None)
                offer = self._cheapest(j, self.pods, gone) if self._open(j) else None
                if offer is not None:
                    offers[j] = offer
                    heappush(heap, (offer[0], j))
        return self._spared(chosen)

    def _look(self, i: int, heap: _Heap, guessed: set[int], offers: _Offered, gone: set[JobId]) -> None:
        """Compute what room on node i costs, if only a bound is known."""
        if i in guessed:
            guessed.discard(i)
            offer = self._cheapest(i, self.pods, gone)
            if offer is not None:
                offers[i] = offer
                heappush(heap, (offer[0], i))

    def _next(self, heap: _Heap, guessed: set[int], offers: _Offered, gone: set[JobId]) -> int | None:
        """The node where one more pod costs least. A node is examined (and no longer `guessed`) only when no
        other costs less than its lower bound."""
        while heap:
            price, i = heap[0]
            if i in guessed:
                heappop(heap)
                self._look(i, heap, guessed, offers, gone)
            elif i in offers and offers[i][0] == price:
                return i
            else:
                heappop(heap)
        return None

    def _gained(self, total: int, touched: Iterable[int]) -> int:
        """Pods that fit if all victims on these nodes go; counts no further than needed."""
        for i in touched:
            if total > self.pods:
                break
            more = [0] * self.width
            for offers in self.maps:
                for offer in offers.get(i, ()):
                    for k in range(self.width):
                        more[k] += offer.frees[k]
            total += self._room(i, more) - self._room(i)
        return total

    def _room_if_all_went(self) -> int:
        """Pods that fit if all victims go, or at least one more than the gang needs."""
        self.extra = {}
        total = sum(room for _, room in self.nodes.rooms(self.ask, True, self.allowed))
        return self._gained(total, [i for _, i in self._bounds()])

    def _free(self, victim: Victim, sign: int = 1) -> None:
        for i, frees in victim.frees.items():
            extra = self.extra.setdefault(i, [0] * self.width)
            for k in range(self.width):
                extra[k] += sign * frees[k]

    def _spared(self, chosen: list[Victim], fixed: Victim | None = None) -> list[Victim]:
        """The chosen victims without those that are not needed."""
        where = [i for i in sorted({i for victim in chosen for i in victim.frees}) if self._open(i)]
        self.extra = {}
        for victim in chosen:
            self._free(victim)
        kept = {victim.id: victim for victim in chosen}
        total = sum(self._room(i) for i in where)
        if self.pods > 1:
            own = set(where)
            total += sum(r for i, r in self.nodes.rooms(self.ask, True, self.allowed) if i not in own)
        for victim in _dearest(chosen):
            if victim is fixed:
                continue
            there = [i for i in victim.frees if self._open(i)]
            before = sum(self._room(i) for i in there)
            self._free(victim, sign=-1)
            after = sum(self._room(i) for i in there)
            if total - before + after >= self.pods:
                total += after - before
                del kept[victim.id]
            else:
                self._free(victim)
        return list(kept.values())
