"""The watts that are left of each power domain while a plan is made.

A pod's watts count in the domain of its node and in all above it, so what one node takes is missing on others, of any
pool. A place is tried by asking `headroom` (one pod), `share_out` (a gang) or `fits` (exactly this placement), and all
of them look at the whole chain of domains above each node. Domains that only observe are not known here.

As for resources there are two counts: for NOW, and for LATER, when stopping jobs have gone; and the most that there
could be, if none of the jobs ran (EMPTY).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..model.snapshot import Placement, PowerDomain, Snapshot
from ..model.table import TableView

NOW, LATER, EMPTY = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Lack:
    """The domain in which a placement finds the least of the watts that it needs there."""

    number: int
    asked_w: int
    left_w: int

    @property
    def short_w(self) -> int:
        """What is missing; not above 0: nothing."""
        return self.asked_w - self.left_w


Chain = tuple[int, ...]
"""The limiting domains above a node, by number, the nearest first."""


class Feeds:
    """The limiting domains of a snapshot, numbered in order of their names."""

    def __init__(self, snapshot: Snapshot, table: TableView) -> None:
        """What is left while no job runs: free accelerators draw what idle ones do."""
        by_name = {domain.name: domain for domain in snapshot.domains}
        self.domains = [by_name[name] for name in sorted(by_name) if by_name[name].limits]
        numbers = {domain.name: number for number, domain in enumerate(self.domains)}
        above = {name: _above(name, by_name) for name in by_name}
        limiting = {name: tuple(numbers[one] for one in above[name] if one in numbers) for name in by_name}
        reserved: list[list[float]] = [[] for _ in self.domains]
        for name, domain in by_name.items():
            for number in limiting[name]:
                reserved[number].append(domain.reserved_w)
        whole = [
            math.floor(domain.usable_w - math.fsum(watts))
            for domain, watts in zip(self.domains, reserved, strict=True)
        ]
        kinds = {pool.name: pool.accelerator for pool in snapshot.pools if not pool.is_cpu}
        self.chains: dict[str, Chain] = {}
        """By node, of those that hang on a limiting domain."""
        for node in snapshot.nodes:
            if node.domain and limiting[node.domain]:
                self.chains[node.name] = limiting[node.domain]
                idle_w = table.idle_watts(kinds.get(node.pool, "")) * node.capacity.accelerators_m / 1000
                for number in limiting[node.domain]:
                    whole[number] -= math.ceil(idle_w)
        self.left = (whole.copy(), whole.copy(), whole)
        self._at_start: tuple[list[int], list[int]] = (whole.copy(), whole.copy())
        self._drawn: dict[str, list[int]] = {}
        """By pool what `drawn` gives."""
        self._drawn_at_start: dict[str, list[int]] = {}
        self._kept = [0] * len(self.domains)
        """What is withheld of each domain."""
        self._asked: dict[int, tuple[Placement, Mapping[int, int]]] = {}
        """What placements take, by identity: the same ones are asked for again and again while a plan is made."""

    def begin(self) -> None:
        """The round begins: what runs is counted. A closed domain has no more room than that."""
        for number, domain in enumerate(self.domains):
            if domain.closed:
                for when in (NOW, LATER):
                    self.left[when][number] = min(self.left[when][number], 0)
        self._at_start = (self.left[NOW].copy(), self.left[LATER].copy())
        self._drawn_at_start = {pool: watts.copy() for pool, watts in self._drawn.items()}
        self._asked.clear()
        self._kept = [0] * len(self.domains)

    def rewind(self) -> None:
        """Restore what was left when the round began."""
        for when in (NOW, LATER):
            self.left[when][:] = self._at_start[when]
        self._drawn = {pool: watts.copy() for pool, watts in self._drawn_at_start.items()}
        self._kept = [0] * len(self.domains)

    def take(self, placement: Placement, now: int, later: int) -> None:
        """Take what a placement adds (or give it back): the signs for the two counts."""
        watts = placement.watts
        if not watts:
            return
        drawn = self._drawn.get(placement.pool)
        if drawn is None:
            drawn = self._drawn[placement.pool] = [0] * len(self.domains)
        for name in placement.nodes:
            for number in self.chains.get(name, ()):
                self.left[NOW][number] += now * watts
                self.left[LATER][number] += later * watts
                drawn[number] -= later * watts

    def withhold(self, number: int, now: int, later: int, sign: int = -1) -> None:
        """Keep watts of a domain from being found (sign=1: offer them again)."""
        self.left[NOW][number] += sign * now
        self.left[LATER][number] += sign * later
        self._kept[number] -= sign * max(now, later)

    def most_left(self) -> list[int]:
        """The most that could be left of each domain if nothing were withheld."""
        rows = zip(self.left[NOW], self.left[LATER], self._kept, strict=True)
        return [max(now, later) + kept for now, later, kept in rows]

    def drawn(self, pool: str) -> Sequence[int]:
        """What the jobs of a pool add to each domain, less those that are being stopped."""
        return self._drawn.get(pool) or [0] * len(self.domains)

    def headroom(self, chain: Chain, when: int) -> float:
        """Watts that one more pod on a node may add."""
        left = self.left[when]
        return min([left[number] for number in chain], default=math.inf)

    def alone(
        self, rooms: Iterable[tuple[int, int]], chains: Sequence[Chain], watts: int, when: int
    ) -> list[tuple[int, int]]:
        """The same rooms (index, pods that fit), each with no more pods of this draw than the node alone may have."""
        most: dict[Chain, float] = {}
        found = []
        for i, room in rooms:
            chain = chains[i]
            if chain not in most:
                most[chain] = self.headroom(chain, when) // watts
            if most[chain] > 0:
                found.append((i, room if room <= most[chain] else int(most[chain])))
        return found

    def share_out(
        self, rooms: Iterable[tuple[int, int]], chains: Sequence[Chain], watts: int, when: int
    ) -> list[tuple[int, int]]:
        """How many pods of this draw the nodes may have together, of these (index, pods that fit), the roomiest first.

        The limits of a tree are nested, so no other order would let more pods in.
        """
        left = self.left[when].copy()
        found = []
        for i, room in sorted(rooms, key=lambda item: (-item[1], item[0])):
            chain = chains[i]
            most = min([left[number] // watts for number in chain], default=room)
            room = max(0, min(room, most))
            for number in chain:
                left[number] -= room * watts
            if room:
                found.append((i, room))
        return sorted(found)

    def fits(self, placement: Placement, when: int) -> bool:
        """Whether exactly this placement may be added."""
        return not placement.watts or not self.missing(placement, when)

    def short_at_start(self, placement: Placement, already: dict[str, list[int]]) -> list[str]:
        """The domains, by `keys_of`, that could not carry this placement when the round began; as
        `PoolNodes.short`, `already` is what earlier placements take, and this one is added to it."""
        left = self._at_start[NOW]
        asked = self.asked(placement)
        for number, watts in asked.items():
            already.setdefault(self._key(number), [0])[0] += watts
        return [self._key(number) for number in sorted(asked) if already[self._key(number)][0] > left[number]]

    def lack(self, placement: Placement, watts: int, when: int) -> Lack | None:
        """Where the placement would be short of watts most, with so much for each pod; None: no domain limits it."""
        asked = Counter(number for name in placement.nodes for number in self.chains.get(name, ()))
        lacks = [Lack(number, pods * watts, self.left[when][number]) for number, pods in asked.items()]
        return max(lacks, key=lambda lack: (lack.short_w, -lack.number), default=None)

    def missing(self, placement: Placement, when: int) -> dict[int, int]:
        """The watts that the domains lack for a placement, of those that lack any."""
        asked = self.asked(placement)
        return {
            number: watts - self.left[when][number]
            for number, watts in asked.items()
            if watts > self.left[when][number]
        }

    def given_back(self, placement: Placement | None, among: Container[int]) -> dict[int, int]:
        """The watts that the end of a placement gives back to these domains."""
        if placement is None:
            return {}
        return {number: watts for number, watts in self.asked(placement).items() if number in among}

    def asked(self, placement: Placement) -> Mapping[int, int]:
        """What a placement takes of each domain."""
        known = self._asked.get(id(placement))
        if known is not None and known[0] is placement:
            return known[1]
        found: dict[int, int] = {}
        for name in placement.nodes if placement.watts else ():
            for number in self.chains.get(name, ()):
                found[number] = found.get(number, 0) + placement.watts
        self._asked[id(placement)] = placement, found
        return found

    @contextmanager
    def with_more(self, number: int, watts: int) -> Iterator[None]:
        """Within this context a domain may carry so much more."""
        for when in (NOW, LATER):
            self.left[when][number] += watts
        try:
            yield
        finally:
            for when in (NOW, LATER):
                self.left[when][number] -= watts

    def keys_of(self, node: str) -> list[str]:
        """Names of the domains above a node that are no names of nodes."""
        return [self._key(number) for number in self.chains.get(node, ())]

    def _key(self, number: int) -> str:
        return f"power/{self.domains[number].name}"


def _above(name: str, by_name: dict[str, PowerDomain]) -> list[str]:
    """The domain and all above it, nearest first."""
    chain = [name]
    while parent := by_name[chain[-1]].parent:
        chain.append(parent)
    return chain
