"""The state of one planning round: the books, and where every job is in the plan so far.

A round only knows *where every job is*; `planner` turns the difference to where they were into actions.
Decisions look at this state alone, never at how it came about, so that planning again from the result finds
nothing to do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from operator import itemgetter
from typing import TypeVar, cast

from .books import Books, Seat
from .columns import Candidate
from .devices import staying
from .pool_nodes import request
from .types import Job, JobId, JobKind, Placement, Snapshot
from .victims import Victim

T = TypeVar("T")
FEW = 8
"""So many jobs may be disturbed on the smallest cluster."""
DECIDED = 0.5
"""After this part of its reclaim deadline a guarantee is taken back from whoever holds it, however lately that one
started; the rest of the deadline is for stopping and starting."""

_Place = tuple[Placement | None, Candidate | None, float, bool]
Mark = dict[JobId, _Place]
"""Where jobs were at some moment of the round, of those that had changed by then."""


class Round:
    """One planning round on the books; `rewind` turns them back to what the snapshot says."""

    def __init__(self, books: Books, now: float) -> None:
        self.books = books
        self.snapshot = books.snapshot
        self.policy = books.policy
        self.now = now
        self.table = books.table
        self.cluster = books.cluster
        self.ledger = books.ledger
        self.market = books.market
        self.seats = books.seats
        self.held = books.held
        self.ranked = books.ranked
        self.disturbed: set[JobId] = set()
        """Running jobs whose place in the plan is another than they have, or none."""
        self._first: dict[JobId, _Place] = {}
        """Where jobs were when the round began, of those that changed."""
        self._lost: dict[JobId, float] = {}
        self._disturbable: dict[tuple[str, str], list[tuple[float, JobId, Victim]]] = {}
        self._placed: dict[tuple[str, str], dict[JobId, Seat]] = {}
        """Jobs that were given a place in this round, by pool and tenant."""
        self._victims: dict[JobId, Victim] = {}
        self._remembered: dict[tuple[object, ...], tuple[int, object]] = {}
        self._quiet_budget = self._budget(books.snapshot)
        self.cluster.begin()

    def _budget(self, snapshot: Snapshot) -> int:
        """How many running jobs may still be disturbed: what happened lately counts."""
        since = self.now - self.policy.min_run_s
        recent = sum(moved_at_s > since for moved_at_s in self.books.moved.values())
        return max(FEW, math.ceil(self.policy.churn * len(snapshot.jobs))) - recent

    @property
    def changed(self) -> list[Seat]:
        """Jobs that were touched in this round, in order of id."""
        return [self.seats[job] for job in sorted(self._first)]

    def mark(self) -> Mark:
        """Remember this moment."""
        return {job: _place(self.seats[job]) for job in self._first}

    def since(self, mark: Mark) -> list[tuple[Seat, _Place]]:
        """Jobs that are not where they were at the mark, and where that was, in order of id."""
        found = [(job, mark.get(job, first)) for job, first in self._first.items()]
        return [
            (self.seats[job], was)
            for job, was in sorted(found, key=itemgetter(0))
            if _differs(self.seats[job], was)
        ]

    def undo_to(self, mark: Mark) -> None:
        """Put everybody back where they were at the mark."""
        moved = self.since(mark)
        for seat, _ in moved:
            self.clear(seat)
        for seat, (placement, column, started_at_s, waits) in moved:
            if placement is not None:
                self.restore(seat, placement, column, started_at_s, waits)

    def rewind(self) -> None:
        """Leave the books as they were when the round began."""
        self._disturbable.clear()
        self.cluster.rewind()
        for job, (placement, column, started_at_s, waits) in self._first.items():
            seat = self.seats[job]
            if seat.placement is not None:
                self._count(seat, sign=-1)
            seat.placement, seat.column, seat.started_at_s = placement, column, started_at_s
            seat.waits_for_release = waits
            if placement is not None:
                self._count(seat)
        self._first.clear()
        self._placed.clear()

    def _count(self, seat: Seat, sign: int = 1) -> None:
        """Write a job's place into all books but those of the nodes (sign=-1: strike it out)."""
        placement, job = seat.placement, seat.job
        assert placement is not None
        key = (placement.pool, job.tenant)
        if sign > 0:
            self.held.setdefault(key, {})[job.id] = seat
            self._placed.setdefault(key, {})[job.id] = seat
            self.books.waiting.pop(job.id, None)
            if seat.column is not None:
                self.books.values[job.id] = seat.column.value
        else:
            del self.held[key][job.id]
            self._placed.get(key, {}).pop(job.id, None)
            self.books.waiting[job.id] = seat
            self.books.values.pop(job.id, None)
        self._redisturb(key, seat, sign)
        amount_m = sign * placement.accelerators_m
        self.ledger.book(job.tenant, job.user, placement.accelerator, amount_m)

    def _touch(self, seat: Seat) -> None:
        if seat.job.id not in self._first:
            self._first[seat.job.id] = _place(seat)

    def _note(self, seat: Seat) -> None:
        if seat.job.run is not None and not seat.stays:
            self.disturbed.add(seat.job.id)
        else:
            self.disturbed.discard(seat.job.id)

    def calm(self) -> bool:
        """Whether more running jobs may be disturbed in this round (`Policy.churn`)."""
        return self.budget_left > 0

    @property
    def budget_left(self) -> int:
        """How many more running jobs may be disturbed."""
        return self._quiet_budget - len(self.disturbed)

    def disturbable(self, pool: str, tenant: str) -> list[Victim]:
        """Jobs of the tenant in this pool that may be stopped for others, least work lost per unit first."""
        key = (pool, tenant)
        known = self._disturbable.get(key)
        if known is None:
            seats = self.held.get(key, {}).values()
            victims = [self._victim(seat, pool) for seat in seats if self._stoppable(seat)]
            known = self._disturbable[key] = [(self.lost_s(v.seat), v.id, v) for v in victims]
            known.sort(key=itemgetter(0, 1))
        return [victim for _, _, victim in known]

    def takeable(self, pool: str, tenant: str) -> list[Victim]:
        """Jobs of the tenant that have, or were given in this round, a place in this pool and may be stopped for a
        guarantee that is due, least work lost per unit first: whether they run already or not makes no difference."""
        seats = self.held.get((pool, tenant), {}).values()
        found = [self._victim(seat, pool) for seat in seats if seat.job.preemptible]
        return sorted(found, key=lambda victim: (self.lost_s(victim.seat), victim.id))

    def _stoppable(self, seat: Seat) -> bool:
        return seat.job.preemptible and self.settled(seat)

    def _redisturb(self, key: tuple[str, str], seat: Seat, sign: int) -> None:
        """Keep `disturbable` in order: the job has got (sign=-1: is losing) its place."""
        known = self._disturbable.get(key)
        if known is None or not self._stoppable(seat):
            return
        own = (self.lost_s(seat), seat.job.id)
        at = bisect_left(known, own)  # an entry begins with these
        if sign > 0:
            known.insert(at, (*own, self._victim(seat, key[0])))
        else:
            del known[at]

    def planned(self, pool: str, tenant: str) -> list[Victim]:
        """Jobs of the tenant that were given their place in this pool only in this round, or are left with it
        (`shrink.py`): nothing more is lost if they do not get it."""
        placed = self._placed.get((pool, tenant), {})
        found = [placed[job] for job in sorted(placed)]
        return [self._victim(seat, pool) for seat in found if seat.job.run is None or self.shrunk(seat)]

    def _victim(self, seat: Seat, pool: str) -> Victim:
        """The job as one that may be stopped, at the cost of the work it would lose."""
        known = self._victims.get(seat.job.id)
        if known is None or known.placement is not seat.placement:
            known = Victim(seat, self.lost_units(seat), self.cluster.pools[pool])
            self._victims[seat.job.id] = known
        return known

    def shrunk(self, seat: Seat) -> bool:
        """Whether a running job has given back some of its pods in this round."""
        run, place = seat.job.run, seat.placement
        if run is None or place is None or seat.job.id not in self.disturbed:
            return False
        same = (place.pool, place.mode, place.per_pod)
        return same == (run.placement.pool, run.placement.mode, run.placement.per_pod) and (
            place.pods < run.placement.pods
        )

    def remembered(self, key: tuple[object, ...], tenant: str, find: Callable[[], T]) -> T:
        """What `find` answers, kept until what the tenant holds changes."""
        version = self.ledger.version.get(tenant, 0)
        known = self._remembered.get(key)
        if known is None or known[0] != version:
            known = self._remembered[key] = (version, find())
        return cast(T, known[1])

    def waiting(self) -> list[Seat]:
        """Jobs without a place that may get one."""
        return list(self.books.waiting.values())

    def profit(self, column: Candidate) -> float:
        """Value per hour above the price of the accelerators."""
        return column.value - self.market.price(column.accelerator) * column.accelerators_m / 1000

    def put(self, seat: Seat, column: Candidate, nodes: tuple[str, ...], release: bool = False) -> None:
        """Give a job without a place this place."""
        run = seat.job.run
        placement = column.placed(nodes, self._devices(seat, column, nodes, release))
        unchanged = run is not None and run.placement == placement and not release
        started_at_s = run.started_at_s if run is not None and unchanged else self.now
        self.restore(seat, placement, column, started_at_s, release)

    def _devices(
        self, seat: Seat, column: Candidate, nodes: tuple[str, ...], release: bool
    ) -> tuple[int, ...]:
        """Where shares go on these nodes: a running job's stay on the devices that they have."""
        run = seat.job.run
        if run is not None and run.placement.devices and run.placement.pool == column.pool and not release:
            own = staying(run.placement, nodes)
            if own and self.fits(column.placed(nodes, own)):
                return own
        return self.cluster.pools[column.pool].devices(column.per_pod, nodes, release)

    def clear(self, seat: Seat) -> None:
        """Take a job's place away."""
        if seat.placement is None:
            return
        self._touch(seat)
        self.cluster.take(seat.placement, sign=1)
        self._count(seat, sign=-1)
        seat.placement, seat.column, seat.waits_for_release = None, None, False
        self._note(seat)

    def restore(
        self,
        seat: Seat,
        placement: Placement,
        column: Candidate | None,
        started_at_s: float,
        release: bool = False,
    ) -> None:
        """Undo `clear`."""
        self._touch(seat)
        seat.placement, seat.column, seat.started_at_s = placement, column, started_at_s
        seat.waits_for_release = release
        self.cluster.take(placement)
        self._count(seat)
        self._note(seat)

    def recall(self) -> list[Seat]:
        """Take back the places that wait for a release: after others were stopped there may be better ones."""
        found = [seat for seat in self.changed if seat.waits_for_release]
        for seat in found:
            self.clear(seat)
        return found

    def find(self, job: Job, column: Candidate) -> tuple[tuple[str, ...], bool] | None:
        """Nodes for a column that are free now, or else (True) once stopping jobs have gone."""
        nodes = self.cluster.find(job, column.pool, column.pods, column.per_pod, later=False)
        if nodes is not None:
            return nodes, False
        if not self.cluster.pools[column.pool].releasing:
            return None
        nodes = self.cluster.find(job, column.pool, column.pods, column.per_pod, later=True)
        return None if nodes is None else (nodes, True)

    def fits(self, placement: Placement) -> bool:
        """Whether exactly this placement is free now."""
        pool = self.cluster.pools.get(placement.pool)
        return pool is not None and pool.fits(placement)

    def places(self, job: Job, column: Candidate) -> int:
        """Pods of this column that there is room for, now or once stopping jobs have gone."""
        nodes = self.cluster.pools[column.pool]
        ask, allowed = request(column.per_pod, nodes.pool.is_cpu), nodes.selected(job)
        return sum(room for _, room in nodes.rooms(ask, nodes.releasing > 0, allowed))

    def lost_s(self, seat: Seat) -> float:
        """Seconds of progress that stopping the job now would cost."""
        run = seat.job.run
        if run is None or seat.started_at_s >= self.now:
            return seat.job.restart_s
        saved = run.started_at_s if run.saved_at_s is None else run.saved_at_s
        return seat.job.restart_s + max(0.0, self.now - saved)

    def lost_units(self, seat: Seat) -> float:
        """The same for all accelerators of its running attempt, in exchange-rate units; nothing more is lost by a
        job that has shrunk."""
        if seat.placement is None or seat.job.run is None or self.shrunk(seat):
            return 0.0
        known = self._lost.get(seat.job.id)
        if known is None:
            units = self.ledger.units_of(seat.placement.accelerator, seat.placement.accelerators_m)
            known = self._lost[seat.job.id] = self.lost_s(seat) * units
        return known

    def priority(self, job: Job) -> int:
        """The priority that counts."""
        tenant = self.ledger.tenants.get(job.tenant)
        return job.priority if tenant is None else min(job.priority, tenant.priority_ceiling)

    def settled(self, seat: Seat) -> bool:
        """Whether the job has run long enough to be disturbed."""
        return self.now - seat.started_at_s >= self.policy.min_run_s

    def due_at_s(self, seat: Seat) -> float:
        """From when on nobody's minimum runtime holds up the job, if its tenant's guarantee covers it. Its reclaim
        deadline counts from when it began to wait: what is stopped in this round begins now."""
        job = seat.job
        since = self.now if job.run is not None else max(job.submitted_at_s, job.last_move_at_s or 0.0)
        return since + DECIDED * (job.reclaim_deadline_s or self.policy.guarantee_reclaim_s)

    def stopped_lately(self, job: Job) -> bool:
        """Whether a waiting job was stopped in this round or shortly before it."""
        if job.run is not None:
            return True
        moved = job.last_move_at_s
        return moved is not None and self.now - moved < self.policy.min_run_s

    def movable(self, seat: Seat) -> bool:
        """Whether the job may be stopped and started elsewhere for its own or its tenant's good."""
        return (
            seat.placement is not None
            and seat.job.run is not None
            and seat.job.kind is JobKind.TRAINING
            and seat.job.preemptible
            and self.settled(seat)
        )

    def must_wait(self, placement: Placement, already: dict[str, list[int]]) -> bool:
        """Whether the placement needs room that was not free when the round began.

        `already` is what earlier starts of this plan take, by node; this placement is added to it.
        """
        return self.cluster.pools[placement.pool].short(placement, already)


def _place(seat: Seat) -> _Place:
    return seat.placement, seat.column, seat.started_at_s, seat.waits_for_release


def _differs(seat: Seat, place: _Place) -> bool:
    return seat.placement != place[0] or seat.waits_for_release != place[3]
