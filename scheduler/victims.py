"""Which running jobs to stop so that a gang fits: least cost per place gained.

The cost of a victim is given by the caller (work lost since its last checkpoint, or value). For one pod every
node is looked at, and the cheapest set on one node wins. For a gang, places are bought one node at a time
where a place is cheapest; a victim that spans several nodes makes its other nodes cheaper. Then victims that
turned out not to be needed are spared, dearest first, and the search is made again without one of the chosen, as
long as that finds cheaper ones.

Victims come in groups (those of one tenant, say) that know what each of them frees on which node, so that a
group can serve many searches; and a node whose cheapest unit is too dear is not looked at more closely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from .books import Seat
from .columns import Candidate, Part
from .devices import leaving
from .pool_nodes import PoolNodes, request
from .types import JobId

Floats = NDArray[np.float64]
_Amounts = tuple[int, ...]
"""As the nodes' books count (`pool_nodes.py`)."""
SWAPS = 480
"""Nodes looked at, at most, in the search for a gang's cheaper victims, once per pod: what it may cost, whatever the
cluster."""
SLACK = 1e-9
"""So much, relatively, a bound stays below what it bounds, whatever was rounded."""


class Victim:
    """A job that may be stopped or shrunk, what that costs, and what it frees on which node."""

    __slots__ = ("_offers", "amount_m", "cost", "frees", "id", "nodes", "part", "placement", "seat")

    def __init__(self, seat: Seat, cost: float, nodes: PoolNodes, part: Part | None = None) -> None:
        self.seat = seat
        self.cost = cost
        self.part = part
        """What may be taken of it; None: all."""
        self.nodes = nodes
        self._offers: list[tuple[int, Offer]] | None = None
        self.id: JobId = seat.job.id
        self.frees: dict[int, _Amounts] = {}
        """By index of the node."""
        placement = self.placement = seat.placement
        self.amount_m = 0 if placement is None else placement.accelerators_m
        """All that it holds."""
        if placement is not None and placement.pool == nodes.pool.name:
            self.frees = nodes.holds(placement if part is None else leaving(placement, part.leaves))

    @property
    def offers(self) -> list[tuple[int, Offer]]:
        """What each of its nodes sees of it."""
        if self._offers is None:
            key = self.nodes.key
            self._offers = [
                (i, Offer(self.cost / max(frees[key], 1), self.id, self, frees))
                for i, frees in self.frees.items()
            ]
        return self._offers


@dataclass(slots=True)
class Offer:
    """One victim as one node sees it: what a unit costs if it goes."""

    unit_cost: float
    id: JobId
    victim: Victim
    frees: _Amounts


class Group:
    """Victims by the nodes they stand on, cheapest per unit first."""

    def __init__(self, victims: Iterable[Victim], nodes: PoolNodes) -> None:
        self._nodes = nodes
        self._least: Floats | None = None
        self.on_node: dict[int, list[Offer]] = {}
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

    @property
    def least(self) -> Floats:
        """What a unit costs at least, by node; infinite where no victim is."""
        if self._least is None:
            self._least = np.full(len(self._nodes.nodes), np.inf)
            self._least[list(self.on_node)] = [offers[0].unit_cost for offers in self.on_node.values()]
        return self._least


def _by_cost(offer: Offer) -> tuple[float, JobId]:
    return offer.unit_cost, offer.id


def choose(
    nodes: PoolNodes,
    column: Candidate,
    groups: Sequence[Group],
    allowed: frozenset[int] | None,
    thorough: bool = False,
) -> list[Victim] | None:
    """The cheapest victims found whose end makes room for the column; None if there are none.

    Args:
        allowed: indices of the nodes that the job may use; None: all. Topology domains are the caller's: where one
            is required, it asks for each.
        thorough: for a gang, look for cheaper victims than the first found.
    """
    search = _Search(nodes, column, groups, allowed)
    if column.pods == 1:
        return search.one()
    return search.best() if thorough else search.many()


def _cost(victims: Iterable[Victim]) -> float:
    return math.fsum(victim.cost for victim in victims)


def _dearest(victims: Iterable[Victim]) -> list[Victim]:
    return sorted(victims, key=lambda victim: (-victim.cost, victim.id))


_Bought = tuple[float, int, list[Victim]]
"""Cost per place, places gained, and who goes."""
_Offered = dict[int, _Bought]
_Heap = list[tuple[float, int]]
"""Cost per place (or less, where it is only guessed), and the node."""


class _Search:
    def __init__(
        self,
        nodes: PoolNodes,
        column: Candidate,
        groups: Sequence[Group],
        allowed: frozenset[int] | None,
    ) -> None:
        self.nodes = nodes
        self.pods = column.pods
        self.ask = request(column.per_pod, nodes.pool.is_cpu)
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
        free, extra = self.nodes.later[i], self.extra.get(i, self.nothing)
        more = self.nothing if more is None else more
        if self.nodes.width:
            return self.nodes.room_in(
                [a + b + c for a, b, c in zip(free, extra, more, strict=True)], self.ask
            )
        most = 1 << 30
        for k in self.asked:
            most = min(most, (free[k] + extra[k] + more[k]) // self.ask[k])
        return max(0, most)

    def _offers(self, i: int) -> list[Offer]:
        rows = [offers for on_node in self.maps if (offers := on_node.get(i)) is not None]
        if len(rows) == 1:
            return rows[0]
        here = [offer for row in rows for offer in row]
        here.sort(key=_by_cost)
        return here

    def _cheapest(self, i: int, need: int, gone: set[JobId]) -> _Bought | None:
        """What node i sells for: the best prefix of its victims in order of cost per unit, or one of them alone
        (a small one that is just enough costs less than a large one that is cheaper per unit)."""
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
        """The best so far, or a single victim that sells for less."""
        for offer in self._offers(i):
            cost = offer.victim.cost
            if offer.id not in gone and cost < best[0] * need - 1e-12:
                gained = min(self._room(i, offer.frees) - base, need)
                if gained > 0 and cost / gained < best[0] - 1e-12:
                    best = (cost / gained, gained, [offer.victim])
        return best

    def one(self) -> list[Victim] | None:
        """The cheapest on one node. A node cannot be had for less than what is missing on it times its
        cheapest unit, so nodes are looked at in this order until none can be cheaper."""
        best: _Bought | None = None
        where = -1
        for bound, i in self._bounds():
            if best is not None and bound > best[0]:
                break
            found = self._cheapest(i, 1, set())
            if found is not None and (best is None or (found[0], i) < (best[0], where)):
                best, where = found, i
        return None if best is None else self._spared(best[2])

    def best(self) -> list[Victim] | None:
        """A gang's places. Where there is just enough if all victims went there is nothing to choose. Otherwise:
        bought one by one, from whatever node it begins, or left when everybody is spared who can be; the cheapest
        of these, made better with or without one victim again and again while that helps. On small clusters this
        comes near the least; on large ones only few or no alternatives are looked at."""
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
        """Those who might go instead of others (True), and those who might stay (False)."""
        own = {victim.id for victim in chosen}
        most = _cost(chosen)
        others = [victim for victim in self._all() if victim.id not in own and victim.cost < most]
        return [(v, True) for v in others] + [(v, False) for v in _dearest(chosen)]

    def _all(self) -> list[Victim]:
        found = {o.id: o.victim for on_node in self.maps for offers in on_node.values() for o in offers}
        return [found[name] for name in sorted(found)]

    def _bounds(self) -> list[tuple[float, int]]:
        """Usable nodes with victims, and what one place there costs at least, cheapest first."""
        if self._priced is not None:
            return self._priced
        key = self.nodes.key
        least = np.minimum.reduce([group.least for group in self.groups])
        some = np.flatnonzero(np.isfinite(least))
        later = self.nodes.later
        free = np.array([later[i][key] for i in some.tolist()], np.int64)
        bounds = np.maximum(0, self.ask[key] - np.maximum(0, free)) * least[some] * (1 - SLACK)
        order = np.argsort(bounds, kind="stable")
        found = zip(bounds[order].tolist(), some[order].tolist(), strict=True)
        self._priced = [(bound, i) for bound, i in found if self._open(i)]
        return self._priced

    def many(self, banned: frozenset[JobId] = frozenset(), first: int | None = None) -> list[Victim] | None:
        """A gang's places, one node at a time (this one first), without these victims."""
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
        """Find out what node i sells for, if that is only guessed."""
        if i in guessed:
            guessed.discard(i)
            offer = self._cheapest(i, self.pods, gone)
            if offer is not None:
                offers[i] = offer
                heappush(heap, (offer[0], i))

    def _next(self, heap: _Heap, guessed: set[int], offers: _Offered, gone: set[JobId]) -> int | None:
        """The node where a place is cheapest. A node is only looked at closely (no longer `guessed`) once nothing
        else costs less than a place there costs at least."""
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
        """Room if all victims on these nodes went; no further than more than enough."""
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
        """Places if all victims went, or at least one more than the gang needs."""
        self.extra = {}
        total = sum(room for _, room in self.nodes.rooms(self.ask, True, self.allowed))
        return self._gained(total, [i for _, i in self._bounds()])

    def _free(self, victim: Victim, sign: int = 1) -> None:
        for i, frees in victim.frees.items():
            extra = self.extra.setdefault(i, [0] * self.width)
            for k in range(self.width):
                extra[k] += sign * frees[k]

    def _spared(self, chosen: list[Victim], fixed: Victim | None = None) -> list[Victim]:
        """The chosen without those that are not needed."""
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
