"""Which running jobs to stop so that a request fits: least cost per pod that then fits.

The caller gives the cost of a victim (work lost since its last checkpoint, or value). For one pod every node
is considered, and the cheapest set of victims on one node wins. For a gang, room is bought one node at a time
where one more pod costs least; a victim that spans several nodes makes its other nodes cheaper. Then victims
that turned out not to be needed are spared, dearest first, and the search is repeated without one of the
chosen as long as that finds a cheaper set.

Victims come in groups (`victim_groups.py`), which know a lower bound for each node; a node whose bound is too dear is not
examined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from heapq import heappop, heappush

import numpy as np

from ..candidates.candidate import Candidate
from ..model.snapshot import JobId
from ..placement.pool import PoolNodes, request
from .victim_groups import Floats, Ints, NodeOffer, Victim, VictimGroup, by_cost

SWAPS = 480
"""Effort limit: nodes examined, at most, in the search for cheaper victims of a gang, counted once per pod."""
FIRST = 64
"""Nodes that are sorted at first in the search for one pod: seldom are more looked at."""
SLACK = 1e-9
"""Relative margin by which a lower bound stays below the true cost in spite of rounding."""


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


def _different(amounts: Ints) -> Iterator[int]:
    """The different ones of these amounts, of which there are few."""
    while len(amounts):
        amount = int(amounts[0])
        yield amount
        amounts = amounts[amounts != amount]


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
        self.most_m = {tenant: m for group in self.groups for tenant, m in group.most_m.items()}
        self.chosen: list[Victim] = []
        """Who goes whatever is taken next."""
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
        here.sort(key=by_cost)
        return here

    def _cheapest(self, i: int, need: int, gone: set[JobId]) -> _Bought | None:
        """The cheapest way to gain pods on node i: the best prefix of its victims in order of cost per
        accelerator, or one victim alone (a small one that is just enough may cost less than a large one that
        is cheaper per accelerator). Where that takes too much of a tenant, the largest come first."""
        base, offers = self._room(i), [offer for offer in self._offers(i) if offer.id not in gone]
        best = self._prefix(i, need, base, offers)
        if best is None and self.most_m:
            best = self._prefix(i, need, base, sorted(offers, key=lambda offer: -offer.frees_m))
        return None if best is None else self._alone(i, need, base, offers, best)

    def _prefix(self, i: int, need: int, base: int, offers: Iterable[NodeOffer]) -> _Bought | None:
        more, cost = [0] * self.width, 0.0
        taken: list[Victim] = []
        best: _Bought | None = None
        for offer in offers:
            if self.most_m and not self._within_most(*self.chosen, *taken, offer.victim):
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
        return best

    def _alone(self, i: int, need: int, base: int, offers: Iterable[NodeOffer], best: _Bought) -> _Bought:
        """The best so far, or a single victim that costs less per pod."""
        for offer in offers:
            cost = offer.victim.cost
            if cost < best[0] * need - 1e-12 and self._within_most(*self.chosen, offer.victim):
                gained = min(self._room(i, offer.frees) - base, need)
                if gained > 0 and cost / gained < best[0] - 1e-12:
                    best = (cost / gained, gained, [offer.victim])
        return best

    def one(self) -> list[Victim] | None:
        """The cheapest set on one node. A node costs at least what is missing on it times its cheapest
        accelerator, so nodes are examined in that order until none can be cheaper."""
        best: _Bought | None = None
        where = -1
        for bound, i in self._cheapest_first():
            if bound == math.inf or (best is not None and (bound, i) > (best[0], where)):
                break
            found = self._cheapest(i, 1, set())
            if found is not None and (best is None or (found[0], i) < (best[0], where)):
                best, where = found, i
        return None if best is None else self._spared(best[2])

    def best(self) -> list[Victim] | None:
        """Victims for a gang. If all victims together free just enough there is no choice. Otherwise several
        sets are built: room bought node by node from each starting node, and all victims less those that can
        be spared. The cheapest set is improved with or without one victim as long as that helps. On small
        clusters this comes near the minimum; on large ones few alternatives or none are examined (`SWAPS`).
        Without it 5 and 11 % more work is lost on two of ten seeds of the row `reclaim`."""
        room = self._room_if_all_went()
        if room < self.pods:
            return None
        if room == self.pods:
            every = self._all()
            return self._spared(every) if self._within_most(*every) else None
        bought = self.many()
        if bought is None:
            return None
        touched = sorted(i for _, i in self._bounds())
        tries = SWAPS // max(1, len(touched) * self.pods)
        if not tries:
            return bought
        starts, every = [bought], self._all()
        if self._within_most(*every):
            starts.append(self._spared(every))
        starts += [found for i in touched[:tries] if (found := self.many(first=i)) is not None]
        chosen = min(starts, key=_cost)
        banned: frozenset[JobId] = frozenset()
        queue = self._swaps(chosen)
        while queue and tries > 0:
            tries -= 1
            victim, comes = queue.pop(0)
            without = banned if comes else banned | {victim.id}
            other = self._spared([*chosen, victim], victim) if comes else self.many(without)
            if other is not None and self._within_most(*other) and _cost(other) < _cost(chosen) - 1e-9:
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
        found = {victim.id: victim for group in self.groups for victim in group.standing}
        return [found[name] for name in sorted(found)]

    def _bounds(self) -> list[tuple[float, int]]:
        """Usable nodes with victims, and a lower bound on the cost of one pod there, cheapest first."""
        if self._priced is None:
            self._priced = list(self._cheapest_first())
        return self._priced

    def _cheapest_first(self) -> Iterator[tuple[float, int]]:
        """The same, sorted as far as they are looked at."""
        some, bounds = self._lower_bounds()
        rest = np.arange(len(bounds))
        if len(bounds) > 2 * FIRST:
            cut = np.partition(bounds, FIRST)[FIRST]
            yield from self._in_order(some, bounds, np.flatnonzero(bounds <= cut))
            rest = np.flatnonzero(bounds > cut)
        yield from self._in_order(some, bounds, rest)

    def _in_order(self, some: Ints, bounds: Floats, which: Ints) -> Iterator[tuple[float, int]]:
        own = which[np.argsort(bounds[which], kind="stable")]
        found = zip(bounds[own].tolist(), some[own].tolist(), strict=True)
        return (pair for pair in found if self._open(pair[1]))

    def _lower_bounds(self) -> tuple[Ints, Floats]:
        """Nodes with victims, and a lower bound on the cost per pod there."""
        ask, nodes = self.ask[self.nodes.key], self.nodes
        if not self.groups:
            return np.zeros(0, np.int64), np.zeros(0)
        amounts = [group.amounts for group in self.groups]
        every: Ints = reduce(np.add, (own for own, _ in amounts))
        gratis: Ints = reduce(np.add, (own for _, own in amounts))
        some = np.flatnonzero(every)
        left = ask - np.maximum(0, nodes.accelerators_later()[some])
        missing = np.maximum(0, left - gratis[some])
        bounds = np.zeros(len(some))
        # Whoever leaves is paid for one pod alone where no node holds two.
        alone = not nodes.pool.is_cpu and (self.pods == 1 or 2 * ask > nodes.largest)
        for missing_m in _different(missing) if alone else (0,):
            here = missing == missing_m if alone else missing > 0
            if not alone or missing_m:
                own = some[here]
                least = reduce(np.minimum, (group.least(missing_m) for group in self.groups))[own]
                bounds[here] = least if alone else least * missing[here]
        bounds[left > every[some]] = np.inf
        return some, bounds * (1 - SLACK)

    def many(self, banned: frozenset[JobId] = frozenset(), first: int | None = None) -> list[Victim] | None:
        """Victims for a gang, one node at a time (node `first` first), without the banned ones."""
        chosen: list[Victim] = []
        gone: set[JobId] = set(banned)
        self.extra, self.chosen = {}, chosen
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
            if not self._within_most(*chosen, *offers[i][2]):
                self._offer(i, offers, heap, gone)
                continue
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
                self._offer(j, offers, heap, gone)
        return self._spared(chosen)

    def _within_most(self, *victims: Victim) -> bool:
        """Whether as much may be taken of their tenants."""
        taken_m: dict[str, int] = {}
        for victim in victims if self.most_m else ():
            tenant = victim.assignment.job.tenant
            taken_m[tenant] = taken_m.get(tenant, 0) + victim.freed_m
        return all(amount_m <= self.most_m.get(tenant, amount_m) for tenant, amount_m in taken_m.items())

    def _offer(self, i: int, offers: _Offered, heap: _Heap, gone: set[JobId]) -> None:
        """Compute what room on node i costs now."""
        offers.pop(i, None)
        offer = self._cheapest(i, self.pods, gone) if self._open(i) else None
        if offer is not None:
            offers[i] = offer
            heappush(heap, (offer[0], i))

    def _look(self, i: int, heap: _Heap, guessed: set[int], offers: _Offered, gone: set[JobId]) -> None:
        """Compute what room on node i costs, if only a bound is known."""
        if i in guessed:
            guessed.discard(i)
            self._offer(i, offers, heap, gone)

    def _next(self, heap: _Heap, guessed: set[int], offers: _Offered, gone: set[JobId]) -> int | None:
        """The node where one more pod costs least. A node is examined (and no longer `guessed`) only when no
        other costs less than its lower bound."""
        while heap:
            price, i = heap[0]
            if price == math.inf:
                return None
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
        touched = {i for on_node in self.maps for i in on_node}
        return self._gained(total, filter(self._open, touched))

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
