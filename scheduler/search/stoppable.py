"""Which jobs with a place may be stopped, by pool and tenant; lists that follow the round's changes.

A round asks for the same lists again and again while it moves a few jobs. So a list is made once and then follows a log
of what was placed and taken away since it was last asked for, and so does each part of it that passes a rule's tests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np

from ..model.snapshot import JobId
from ..placement.cluster import Cluster
from .state import Assignment
from .victim_groups import Floats, Victim, VictimGroup

Where = tuple[str, str]
"""Pool and tenant."""
_Order = tuple[float, JobId]
_Test = Callable[[Assignment], bool]
Losses = Callable[[Assignment], tuple[float, float]]
"""What a job loses per hour and once if it gives way."""


class _Sorted:
    """Victims in order, least work lost per accelerator first; those that lose none by id."""

    def __init__(self, entries: Iterable[tuple[_Order, Victim]]) -> None:
        known = sorted(entries, key=lambda entry: entry[0])
        self.order = [order for order, _ in known]
        self.victims = [victim for _, victim in known]

    def add(self, order: _Order, victim: Victim) -> None:
        at = bisect_left(self.order, order)
        self.order.insert(at, order)
        self.victims.insert(at, victim)

    def remove(self, order: _Order) -> None:
        """Take the victim out, if it is one of them."""
        at = bisect_left(self.order, order)
        if at < len(self.order) and self.order[at] == order:
            del self.order[at], self.victims[at]


class _Logged(_Sorted):
    """The same, with what was added (None: removed) since the list was made."""

    def __init__(self, entries: Iterable[tuple[_Order, Victim]]) -> None:
        super().__init__(entries)
        self.log: list[tuple[_Order, Victim | None]] = []

    def add(self, order: _Order, victim: Victim) -> None:
        super().add(order, victim)
        self.log.append((order, victim))

    def remove(self, order: _Order) -> None:
        super().remove(order)
        self.log.append((order, None))


class _Passing(_Sorted):
    """Those of a list that pass tests, as of the last `follow`."""

    def __init__(self, known: _Logged, tests: Sequence[_Test]) -> None:
        pairs = zip(known.order, known.victims, strict=True)
        super().__init__(pair for pair in pairs if _passes(pair[1], tests))
        self._known, self._read = known, len(known.log)
        self._losses: tuple[Floats, Floats] | None = None

    def losses(self, of: Losses) -> tuple[Floats, Floats]:
        """What each victim loses per hour, and once."""
        if self._losses is None:
            rows = np.array([of(victim.assignment) for victim in self.victims], np.float64).reshape(-1, 2)
            self._losses = rows[:, 0], rows[:, 1]
        return self._losses

    def follow(self, tests: Sequence[_Test]) -> None:
        log = self._known.log
        if self._read < len(log):
            self._losses = None
        for order, victim in log[self._read :]:
            if victim is None:
                self.remove(order)
            elif _passes(victim, tests):
                self.add(order, victim)
        self._read = len(log)


def _passes(victim: Victim, tests: Sequence[_Test]) -> bool:
    return all(test(victim.assignment) for test in tests)


class Stoppable:
    """The jobs of one round that may be stopped."""

    def __init__(
        self,
        cluster: Cluster,
        held: Mapping[Where, Mapping[JobId, Assignment]],
        versions: Mapping[str, int],
        lost_s: Callable[[Assignment], float],
        lost_units: Callable[[Assignment], float],
        ran_min_time: Callable[[Assignment], bool],
        shrunk: Callable[[Assignment], bool],
    ) -> None:
        """Nothing is listed before it is asked for.

        Args:
            held: jobs with a place, by pool and tenant.
            versions: by tenant, raised whenever what it holds or is entitled to changes (`Holdings.version`).
            lost_s: seconds of progress that a job loses if it is stopped now, by which lists are sorted.
            lost_units: the same in units, which is what a victim costs.
            shrunk: whether a running job gave back pods in this round.
        """
        self._cluster, self._held, self._versions = cluster, held, versions
        self._lost_s, self._lost_units = lost_s, lost_units
        self._ran_min_time, self._shrunk = ran_min_time, shrunk
        self._victims: dict[JobId, Victim] = {}
        self._most: int | None = None
        self.cut = False
        """Whether a list has left jobs out (`few`)."""
        self.clear()

    def clear(self) -> None:
        """Forget all lists."""
        for victim in self._victims.values():
            victim.forget_offers()
        self._lists: dict[Where, _Logged] = {}
        self._passing: dict[tuple[Where, object, bool], _Passing] = {}
        self._groups: dict[object, tuple[int, VictimGroup]] = {}
        self._victims = {}
        self._planned: dict[Where, _Logged] = {}

    def end(self) -> None:
        """Forget the round, too: it knows this object, and each keeps the other alive."""
        self.clear()
        del self._lost_s, self._lost_units, self._ran_min_time, self._shrunk

    @contextmanager
    def few(self, most: int) -> Iterator[None]:
        """Within this context, lists are of so many jobs of each pool and tenant: where some of them will do, the
        others need not be looked at. Jobs that are moved within it are back where they were at its end."""
        lists, passing, groups = self._lists, self._passing, self._groups
        self._lists, self._passing, self._groups = {}, {}, {}
        self._most, self.cut = most, False
        try:
            yield
        finally:
            self._lists, self._passing, self._groups = lists, passing, groups
            self._most = None

    def follow(self, where: Where, assignment: Assignment, sign: int) -> None:
        """The job has been given a place there (sign=-1: is losing it)."""
        job = assignment.job
        known = self._planned.get(where)
        if known is not None and sign < 0:
            known.remove((0.0, job.id))
        elif known is not None and self._is_planned(assignment):
            known.add((0.0, job.id), self._victim(assignment, where[0]))
        known = self._lists.get(where)
        if known is not None and self._may_stop(assignment):
            order = self._order(assignment)
            if sign > 0:
                known.add(order, self._victim(assignment, where[0]))
            else:
                known.remove(order)

    def _may_stop(self, assignment: Assignment) -> bool:
        return assignment.job.preemptible and self._ran_min_time(assignment)

    def _is_planned(self, assignment: Assignment) -> bool:
        return assignment.job.run is None or self._shrunk(assignment)

    def _order(self, assignment: Assignment) -> _Order:
        return self._lost_s(assignment), assignment.job.id

    def _victim(self, assignment: Assignment, pool: str) -> Victim:
        """The job as a victim, at the cost of the work it would lose."""
        known = self._victims.get(assignment.job.id)
        if known is None or known.placement is not assignment.placement:
            if known is not None:
                known.forget_offers()
            known = Victim(assignment, self._lost_units(assignment), self._cluster.pools[pool], lasts=True)
            self._victims[assignment.job.id] = known
        return known

    def _list(self, where: Where) -> _Logged:
        known = self._lists.get(where)
        if known is None:
            held = self._held.get(where, {})
            self.cut = self.cut or (self._most is not None and len(held) > self._most)
            found = [one for one in islice(held.values(), self._most) if self._may_stop(one)]
            entries = [(self._order(one), self._victim(one, where[0])) for one in found]
            known = self._lists[where] = _Logged(entries)
        return known

    def ran(self, pool: str, tenant: str) -> Sequence[Victim]:
        """Preemptible jobs of the tenant in this pool that ran `min_run_s`, least work lost per accelerator first. No
        place may change while they are read."""
        return self._list((pool, tenant)).victims

    def passing(
        self, pool: str, tenant: str, key: object, tests: Sequence[_Test], planned: bool = False
    ) -> Sequence[Victim]:
        """Those of them (or of `planned`) that pass tests, which may depend on the key, on the job and on its place
        alone."""
        if not tests:
            return self.planned(pool, tenant) if planned else self.ran(pool, tenant)
        return self._that_pass((pool, tenant), key, tests, planned).victims

    def cheap(
        self,
        pool: str,
        tenant: str,
        key: object,
        tests: Sequence[_Test],
        losses: Losses,
        hours: float,
        worth: float,
    ) -> list[tuple[Victim, float]]:
        """Those of the same (not of `planned`) that cost no more than this, with the cost: what they lose per hour, and
        what they lose once over so many hours."""
        known = self._that_pass((pool, tenant), key, tests, planned=False)
        each_hour, once = known.losses(losses)
        costs = each_hour + once / hours
        return [(known.victims[i], float(costs[i])) for i in np.flatnonzero(costs <= worth).tolist()]

    def _that_pass(self, where: Where, key: object, tests: Sequence[_Test], planned: bool) -> _Passing:
        known = self._passing.get((where, key, planned))
        if known is None:
            of = self._planned_list(where) if planned else self._list(where)
            known = self._passing[where, key, planned] = _Passing(of, tests)
        known.follow(tests)
        return known

    def due(self, pool: str, tenant: str) -> list[Victim]:
        """Jobs of the tenant with a place in this pool that may be stopped for a guarantee that is due, least
        work lost per accelerator first; also jobs that have just started or were placed in this round."""
        found = [one for one in self._held.get((pool, tenant), {}).values() if one.job.preemptible]
        return [self._victim(one, pool) for one in sorted(found, key=self._order)]

    def planned(self, pool: str, tenant: str) -> Sequence[Victim]:
        """Jobs of the tenant that this round placed in this pool, or shrank there (`elastic.py`): taking
        their place loses no more work."""
        return self._planned_list((pool, tenant)).victims

    def _planned_list(self, where: Where) -> _Logged:
        known = self._planned.get(where)
        if known is None:
            found = [one for one in self._held.get(where, {}).values() if self._is_planned(one)]
            entries = [((0.0, one.job.id), self._victim(one, where[0])) for one in found]
            known = self._planned[where] = _Logged(entries)
        return known

    def group(
        self, key: tuple[object, ...], pool: str, tenant: str, find: Callable[[], list[Victim]]
    ) -> VictimGroup:
        """The victims that `find` lists, as a group; found again when the tenant's holdings have changed. The group is
        valid until it is asked for again."""
        version = self._versions.get(tenant, 0)
        known = self._groups.get(key)
        if known is not None and known[0] == version:
            return known[1]
        group = VictimGroup((), self._cluster.pools[pool]) if known is None else known[1]
        group.become(find())
        self._groups[key] = version, group
        return group
