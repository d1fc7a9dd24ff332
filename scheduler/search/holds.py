"""Room and watts that are kept for a reservation while a plan is made (`reservations.py` states the rule).

A hold knows the nodes of one reservation, what its holder will take of each, and the jobs that will have left by then.
On each node it withholds what the holder takes less what those jobs still have: of a node that is collected for a
whole-node pod, all that is free. So as jobs leave, what is withheld grows by what they had, and nobody else finds room
there. On each power domain above the nodes it withholds watts in the same way; there those who leave may be on any
node. A hold can be lifted for a while: for its holder, for a job that outranks it, and for a job that will be gone in
time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from operator import is_

from ..candidates.candidate import Candidate
from ..model.snapshot import JobId, Placement, Reservation
from ..placement.feeds import LATER, NOW, Feeds
from ..placement.pool import PoolNodes, request
from .state import Assignment


class WattHold:
    """The watts of one reservation, by power domain."""

    def __init__(self, feeds: Feeds, asked: Mapping[int, int]) -> None:
        """Nothing is withheld before `apply`.

        Args:
            asked: what the holder will draw on each domain.
        """
        self._feeds, self.asked = feeds, dict(asked)
        self.numbers = frozenset(asked)
        """Of the domains."""
        self.withholds = False
        """Whether it keeps any watts from others now."""
        self.promised: dict[int, int] = {}
        """What earlier reservations get of those who leave: it is withheld, too."""
        self._covered = dict.fromkeys(self.asked, 0)
        self._withheld: dict[int, tuple[int, int]] = {}

    @property
    def has_room(self) -> bool:
        """Whether the watts will be there when those have left who leave for it."""
        left = self._feeds.left[LATER]
        return all(
            watts <= left[number] + self._withheld.get(number, (0, 0))[1] + self._covered[number]
            for number, watts in self.asked.items()
        )

    def outstanding(self) -> dict[int, int]:
        """What it will get of those who leave, by domain."""
        return {
            number: watts
            for number, asked in self.asked.items()
            if (watts := min(asked, self._covered[number])) > 0
        }

    def cover(self, leaving: Iterable[Placement]) -> None:
        """Count from now on what these still draw."""
        self._covered = dict.fromkeys(self.asked, 0)
        for placement in leaving:
            self._cover(placement, 1)

    def apply(self) -> None:
        """Withhold what the holder needs less what those still draw who leave."""
        self._set()

    def lift(self) -> None:
        """Withhold nothing until it is applied again."""
        for number, (now, later) in self._withheld.items():
            self._feeds.withhold(number, now, later, sign=1)
        self._withheld.clear()
        self.withholds = False

    def follow(self, placement: Placement, sign: int) -> None:
        """One of those who leave has been given this place (sign=-1: has lost it)."""
        if self._cover(placement, sign):
            self._set()

    def _cover(self, placement: Placement, sign: int) -> bool:
        back = self._feeds.given_back(placement, self.asked)
        for number, watts in back.items():
            self._covered[number] += sign * watts
        return bool(back)

    def _set(self) -> None:
        self.lift()
        left = self._feeds.left
        for number, asked in self.asked.items():
            needed = asked + self.promised.get(number, 0) - self._covered[number]
            free, free_later = left[NOW][number], left[LATER][number]
            later = max(0, min(needed, free_later))
            now = max(0, min(needed - (free_later - free), free))
            if now or later:
                self._feeds.withhold(number, now, later)
                self._withheld[number] = (now, later)
                self.withholds |= later > 0


class Hold:
    """The room of one reservation."""

    def __init__(
        self,
        holder: Assignment,
        candidate: Candidate,
        nodes: PoolNodes,
        since_s: dict[int, float],
        places: Iterable[int],
    ) -> None:
        """Nothing is withheld before `apply`.

        Args:
            since_s: since when each node is collected, by its index.
            places: the node of each pod.
        """
        self.holder, self.candidate, self.nodes = holder, candidate, nodes
        self.places = tuple(sorted(places))
        self.since_s = since_s
        self.start_s = 0.0
        """When all room is there: an estimate."""
        self.turn_s = 0.0
        """When the holder's turn is, if it is larger than its tenant's share (`turns.py`)."""
        self.collected = 0
        """Nodes whose room is there, or can be taken at once."""
        self.patient = False
        """Whether it was made for patience alone."""
        self.leaving: dict[JobId, Assignment] = {}
        """Jobs on these nodes, and others on their power domains, that will have left by the start."""
        self.backfilled: set[JobId] | None = set()
        """Jobs that were started in its room on condition that they leave it (`Reservation.backfilled`)."""
        self.victims: dict[JobId, Assignment] = {}
        """Those of them that may be stopped now."""
        self.applied = False
        self.watts: WattHold | None = None
        """None: no power domain limits what it may draw."""
        if nodes.feeds is not None and (drawn := nodes.feeds.asked(self.placement)):
            self.watts = WattHold(nodes.feeds, drawn)
        ask = request(candidate.per_pod, nodes.pool.is_cpu)
        self._asked = {i: [self.places.count(i) * amount for amount in ask] for i in set(self.places)}
        self._covered: dict[int, list[int]] = {}
        self._leaving_from: list[Placement] | None = None
        """The places that are covered: a hold that is lifted for a while finds most of them unchanged."""
        self._withheld: dict[int, tuple[list[int], list[int]]] = {}

    @property
    def placement(self) -> Placement:
        """The place that is collected."""
        return self.candidate.placed(tuple(self.nodes.nodes[i].name for i in self.places))

    @property
    def withholds(self) -> bool:
        """Whether it keeps anything from others now."""
        return any(any(later) for _, later in self._withheld.values()) or self.withholds_watts

    @property
    def withholds_watts(self) -> bool:
        """Whether it keeps watts from others now."""
        return self.watts is not None and self.watts.withholds

    def withholds_of(self, domains: Set[int]) -> bool:
        """Whether it keeps watts of one of these power domains from others now."""
        return self.watts is not None and self.watts.withholds and not self.watts.numbers.isdisjoint(domains)

    @property
    def has_room(self) -> bool:
        """Whether the room will be there when those have left who leave for it; False: somebody with a better claim
        has taken it."""
        for i, asked in self._asked.items():
            free, covered = self.nodes.free_later[i], self._covered[i]
            own = self._withheld[i][1] if i in self._withheld else (0, 0, 0, 0)
            if any(asked[k] > free[k] + own[k] + covered[k] for k in range(4) if asked[k]):
                return False
        return self.watts is None or self.watts.has_room

    def apply(self) -> None:
        """Withhold the room."""
        self.applied = True
        places = [one.placement for one in self.leaving.values() if one.placement is not None]
        if self._leaving_from is None or not _same(places, self._leaving_from):
            self._cover_all(places)
        for i in sorted(self._asked):
            self._set(i)
        if self.watts is not None:
            self.watts.apply()

    def _cover_all(self, places: list[Placement]) -> None:
        self._leaving_from = places
        self._covered = {i: [0, 0, 0, 0] for i in self._asked}
        for placement in places:
            if placement.pool == self.nodes.pool.name:
                self._cover(placement, 1)
        if self.watts is not None:
            self.watts.cover(places)

    def lift(self, but_watts: bool = False) -> None:
        """Withhold nothing until it is applied again (`but_watts`: nothing but watts)."""
        if self.watts is not None and not but_watts:
            self.watts.lift()
        self.applied = False
        for i, (now, later) in self._withheld.items():
            self.nodes.withhold(i, now, later, sign=1)
        self._withheld.clear()

    def follow(self, assignment: Assignment, placement: Placement, sign: int) -> None:
        """A job has been given this place (sign=-1: has lost it)."""
        if not self.applied or assignment.job.id not in self.leaving:
            return
        self._leaving_from = None
        if self.watts is not None:
            self.watts.follow(placement, sign)
        if placement.pool == self.nodes.pool.name:
            for i in self._cover(placement, sign):
                self._set(i)

    def _cover(self, placement: Placement, sign: int) -> list[int]:
        found = []
        for i, amounts in self.nodes.holds(placement).items():
            covered = self._covered.get(i)
            if covered is not None:
                found.append(i)
                for k in range(4):
                    covered[k] += sign * amounts[k]
        return found

    def _set(self, i: int) -> None:
        """Withhold what the holder takes of a node less what those who leave still have there."""
        was = self._withheld.pop(i, None)
        if was is not None:
            self.nodes.withhold(i, *was, sign=1)
        free_now, free_later = self.nodes.free_now[i], self.nodes.free_later[i]
        now, later = [0, 0, 0, 0], [0, 0, 0, 0]
        for k, asked in enumerate(self._asked[i]):
            left = asked - self._covered[i][k]
            later[k] = max(0, min(left, free_later[k]))
            now[k] = max(0, min(left - (free_later[k] - free_now[k]), free_now[k]))
        if any(later) or any(now):
            self.nodes.withhold(i, now, later)
            self._withheld[i] = (now, later)


def since_of(nodes: PoolNodes, reservation: Reservation) -> dict[int, float]:
    """Since when each node of a reservation is collected, by the index of those that are there."""
    pairs = zip(reservation.placement.nodes, reservation.since_s, strict=True)
    return {nodes.index[name]: since for name, since in pairs if name in nodes.index}


def _same(places: Sequence[Placement], others: Sequence[Placement]) -> bool:
    return len(places) == len(others) and all(map(is_, places, others))


@contextmanager
def lifted(holds: Iterable[Hold], keep_watts: Container[JobId] = ()) -> Iterator[None]:
    """Within this context these holds withhold nothing; those of the holders in `keep_watts` nothing but watts."""
    own = [hold for hold in holds if hold.applied]
    for hold in own:
        hold.lift(but_watts=hold.holder.job.id in keep_watts)
    try:
        yield
    finally:
        for hold in own:
            hold.apply()
