"""The books: where every job is, who holds what, and what is free, as a snapshot says.

Opening the books costs a pass over the whole snapshot; following a snapshot that differs in a few objects costs
as much as the difference. Nothing in them depends on how they came to be: whole numbers are added and taken
away, and everything that is ordered is ordered by name. So books that followed a hundred events answer exactly
as books that were opened now, and a `Memo` that carries them saves time and nothing else.

What a job is worth depends on its age, so it is worth something else at every moment. The books take all
values at one moment, that of the last full plan (`valued_at_s`), and with them the prices of that plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from .cluster import Cluster
from .columns import Candidate, Columns, Options
from .differences import differing
from .errors import SnapshotError
from .ledger import Ledger
from .mix import Mix
from .plans import Known, Objective, Policy, Price
from .prices import Market, solve
from .table import TableView
from .types import Job, JobId, Node, Placement, Snapshot

_VALUED = attrgetter(
    "workload_class",
    "tenant",
    "user",
    "kind",
    "min_pods",
    "max_pods",
    "per_pod",
    "accelerators",
    "pools",
    "modes",
    "submitted_at_s",
    "remaining_work",
    "attained_s",
)
"""What the columns of a job and their values depend on."""

Shape = tuple[object, ...]


@dataclass(slots=True)
class Ranked:
    """A column of a job with what it brings above its price, and the number of its shape: what has the same
    number asks nodes for the same thing, but for the number of pods."""

    profit: float
    column: Candidate
    shape: int


@dataclass(slots=True)
class Seat:
    """A job's place."""

    job: Job
    option: Options
    placement: Placement | None = None
    column: Candidate | None = None
    started_at_s: float = 0.0
    waits_for_release: bool = False
    """Planned into resources that a stopping job still holds."""
    ranked: list[Ranked] | None = None
    """Filled by `Books.ranked`; `rent` with it."""
    rent: float = 0.0
    """What the job would gain at these prices if it had its best column."""
    density: float = 0.0
    """Most value per accelerator that any column of the job brings."""
    order: tuple[int, bool, bool, float, float, JobId] | None = None
    """Kept by `fill.order`."""

    @property
    def stays(self) -> bool:
        """Whether the job goes on where it runs. Its own nodes, once others have gone, is not that: what it has
        now is somebody else's in the plan."""
        run = self.job.run
        return run is not None and run.placement == self.placement and not self.waits_for_release


class Books:
    """The books of one snapshot, under one policy, at one moment's values and prices."""

    def __init__(
        self,
        snapshot: Snapshot,
        policy: Policy,
        valued_at_s: float,
        prices: Mapping[str, float] | None = None,
        share_prices: Mapping[int, float] | None = None,
    ) -> None:
        """Open the books.

        Args:
            prices: of an earlier plan; None: they are worked out. `share_prices` likewise.

        Raises:
            SnapshotError: the snapshot contradicts itself.
        """
        validate(snapshot)
        self.snapshot = snapshot
        self.policy = policy
        self.valued_at_s = valued_at_s
        self.whole = False
        """False while a change is being written: whoever finds it so opens new books."""
        self.table = TableView(snapshot.table)
        self.columns = Columns(snapshot, self.table, policy, valued_at_s)
        self.cluster = Cluster(snapshot)
        self.ledger = Ledger(snapshot, self.table, self.cluster.capacity_m(), policy, valued_at_s)
        self.seats: dict[JobId, Seat] = {}
        self.held: dict[tuple[str, str], dict[JobId, Seat]] = {}
        """Jobs with a place, by pool and tenant."""
        self.waiting: dict[JobId, Seat] = {}
        """Jobs without a place that may get one."""
        self.releasing: dict[JobId, Seat] = {}
        """Jobs whose running attempt is being stopped."""
        self.moved: dict[JobId, float] = {}
        """When jobs were last moved, resized or preempted."""
        self.values: dict[JobId, float] = {}
        """What jobs with a column are worth where they are."""
        self._rents: dict[JobId, float] = {}
        self._unranked: dict[JobId, Seat] = {}
        self._shapes: dict[Shape, int] = {}
        self._mix = Mix(snapshot.pools)
        for job in sorted(snapshot.jobs, key=lambda job: job.id):
            option = self.columns.of(job)
            self._add(job, option)
            self.ledger.want(option)
        self.ledger.settle()
        if prices is None:
            options = {job: seat.option for job, seat in self.seats.items()}
            self.market = solve(options, self.ledger.capacity_m)
        else:
            self.market = Market(dict(prices), 0.0)
        self.share_prices = self.cluster.learn(self._mix, share_prices)
        self._learned = dict(self._mix.counts)
        self.whole = True

    @property
    def basis(self) -> tuple[Policy, float, dict[str, float], dict[int, float]]:
        """What the books go by besides the snapshot: policy, moment of the values, prices."""
        return self.policy, self.valued_at_s, self.market.prices, self.share_prices

    def _learn(self) -> None:
        """Tell the nodes what the jobs ask for, if that changed."""
        if self._mix.counts != self._learned:
            self.cluster.learn(self._mix, self.share_prices)
            self._learned = dict(self._mix.counts)

    def ranked(self, seat: Seat) -> list[Ranked]:
        """The job's columns, most profit first."""
        if seat.ranked is None:
            seat.ranked = self.rank_apart(seat)
            self._unranked.pop(seat.job.id, None)
            if seat.ranked:
                self._rents[seat.job.id] = seat.rent
        return seat.ranked

    def rank_apart(self, seat: Seat) -> list[Ranked]:
        """Rank the columns of a seat that need not stand in the books."""
        job, prices, shapes = seat.job, self.market.prices, self._shapes
        rows = []
        for column in seat.option.columns:
            key = (column.pool, column.per_pod, job.node_selector, job.required_domain)
            profit = column.value - prices.get(column.accelerator, 0.0) * column.accelerators_m / 1000
            rows.append(Ranked(profit, column, shapes.setdefault(key, len(shapes))))
        rows.sort(key=lambda row: -row.profit)
        if rows:
            seat.rent = max(0.0, rows[0].profit)
            seat.density = max(r.column.value / max(r.column.accelerators_m, 1) * 1000 for r in rows)
        return rows

    def rank(self) -> None:
        """Rank the columns of all jobs now, so that the first event need not."""
        for seat in list(self._unranked.values()):
            self.ranked(seat)

    def bound(self) -> float:
        """What no plan can exceed at these prices."""
        self.rank()
        capacity_m, market = self.ledger.capacity_m, self.market
        income = [market.price(kind) * amount / 1000 for kind, amount in capacity_m.items()]
        return math.fsum(income) + math.fsum(self._rents.values())

    def value(self) -> float:
        """What the jobs are worth where they are."""
        return math.fsum(self.values.values())

    # -- what the snapshot says ---------------------------------------------------------------------------

    def _add(self, job: Job, option: Options, was: Seat | None = None) -> None:
        """Enter a job (`was`: its seat before, if it asks for the same and is worth the same)."""
        seat = self.seats[job.id] = Seat(job, option)
        self._mix.count(job)
        if was is not None and _asked(was.job) == _asked(job):
            seat.ranked, seat.rent, seat.density = was.ranked, was.rent, was.density
        if seat.ranked is None:
            self._unranked[job.id] = seat
        else:
            self._rents[job.id] = seat.rent
        if job.last_move_at_s is not None:
            self.moved[job.id] = job.last_move_at_s
        run = job.run
        if run is None:
            self.waiting[job.id] = seat
        elif run.releasing:
            self.releasing[job.id] = seat
            self.cluster.leave(run.placement)
            self.ledger.book_leaving(job.tenant, run.placement.accelerator, run.placement.accelerators_m)
        else:
            self.cluster.take(run.placement)
            self.ledger.book(job.tenant, job.user, run.placement.accelerator, run.placement.accelerators_m)
            seat.placement, seat.started_at_s = run.placement, run.started_at_s
            seat.column = option.column_of(run.placement)
            if seat.column is not None:
                self.values[job.id] = seat.column.value
            self.held.setdefault((run.placement.pool, job.tenant), {})[job.id] = seat

    def _drop(self, seat: Seat) -> None:
        job = seat.job
        del self.seats[job.id]
        self._mix.count(job, -1)
        for kept in (self.moved, self.values, self._rents, self._unranked):
            kept.pop(job.id, None)
        run = job.run
        if run is None:
            del self.waiting[job.id]
        elif run.releasing:
            del self.releasing[job.id]
            self.cluster.leave(run.placement, sign=1)
            self.ledger.book_leaving(job.tenant, run.placement.accelerator, -run.placement.accelerators_m)
        else:
            self.cluster.take(run.placement, sign=1)
            self.ledger.book(job.tenant, job.user, run.placement.accelerator, -run.placement.accelerators_m)
            del self.held[run.placement.pool, job.tenant][job.id]

    # -- following ----------------------------------------------------------------------------------------

    def follow(self, snapshot: Snapshot) -> bool:
        """Turn these into the books of another snapshot; False: open new ones (nothing was done).

        Raises:
            SnapshotError: the snapshot contradicts itself.
        """
        old = self.snapshot
        if snapshot is old:
            return self.whole
        if not self.whole or self.policy.objective is Objective.MAKESPAN or _differ(old, snapshot):
            return False
        gone, come = differing(old.jobs, snapshot.jobs)
        names = {job.id for job in come}
        if len(names) < len(come) or not names.isdisjoint(self.seats.keys() - {job.id for job in gone}):
            validate(snapshot)
        validate(snapshot, old, come)
        table = None
        if snapshot.table is not old.table and snapshot.table != old.table:
            table = TableView(snapshot.table, self.table)
            if any(table.rate(pool.accelerator) != self.table.rate(pool.accelerator) for pool in old.pools):
                return False
        self.whole = False
        if table is not None:
            self.table = table
            self.columns.follow(table)
        self._follow_nodes(snapshot)
        if snapshot.tenants is not old.tenants and set(snapshot.tenants) != set(old.tenants):
            self.ledger.meet(snapshot.tenants)
            for seat in self.seats.values():
                seat.order = None
        self._follow_jobs(gone, come, frozenset() if table is None else table.changed)
        self.ledger.settle()
        self._learn()
        self.snapshot = snapshot
        self.whole = True
        return True

    def _follow_nodes(self, snapshot: Snapshot) -> None:
        gone, come = differing(self.snapshot.nodes, snapshot.nodes)
        known = {node.name: node for node in gone}
        stale: set[str] = set()
        for node in come:
            was = known.pop(node.name, None)
            if was != node:
                stale.add(node.pool)
                if was is not None:
                    stale.add(was.pool)
        stale |= {node.pool for node in known.values()}
        for name in sorted(stale):
            self._reopen(name, (node for node in snapshot.nodes if node.pool == name))
        if stale:
            self.ledger.resize(self.cluster.capacity_m())

    def _reopen(self, pool: str, nodes: Iterable[Node]) -> None:
        """The books of a pool whose nodes changed."""
        fresh = self.cluster.open(self.cluster.pools[pool].pool, nodes)
        for (name, _), seats in self.held.items():
            if name == pool:
                for seat in seats.values():
                    assert seat.placement is not None
                    fresh.take(seat.placement)
        for seat in self.releasing.values():
            run = seat.job.run
            if run is not None and run.placement.pool == pool:
                fresh.leave(run.placement)

    def _follow_jobs(self, gone: Iterable[Job], come: Iterable[Job], classes: frozenset[str]) -> None:
        """Jobs that went or came (both: they changed), and classes with new speeds."""
        seats = self.seats
        changed = {job.id: job for job in come if job.id not in seats or job != seats[job.id].job}
        there = {job.id for job in come}
        for job in gone:
            if job.id not in there:
                seat = seats[job.id]
                self.ledger.want(seat.option, sign=-1)
                self._drop(seat)
        if classes:
            self._follow_speeds(changed, classes)
        pairs = [(job, seats.get(job.id)) for job in changed.values()]
        for _, was in pairs:
            if was is not None:
                self._drop(was)
        for job, was in pairs:
            if was is not None and job.workload_class not in classes and _VALUED(job) == _VALUED(was.job):
                old = was.option
                self._add(job, Options(job, old.columns, old.weight, old.best_speed, old.row), was)
                continue
            option = self.columns.of(job)
            if was is not None:
                self.ledger.want(was.option, sign=-1)
            self.ledger.want(option)
            self._add(job, option)

    def _follow_speeds(self, changed: dict[JobId, Job], classes: frozenset[str]) -> None:
        """Add the jobs of these classes that could now run elsewhere or at another speed."""
        differ: dict[tuple[int, str], bool] = {}
        for seat in self.seats.values():
            job = seat.job
            if job.workload_class in classes and job.id not in changed:
                key = (id(seat.option.row), job.tenant)
                if key not in differ:
                    differ[key] = self.columns.row(job) != seat.option.row
                if differ[key]:
                    changed[job.id] = job


def _asked(job: Job) -> tuple[object, object]:
    """What the numbers of a job's shapes depend on besides its columns."""
    return job.node_selector, job.required_domain


def _differ(old: Snapshot, new: Snapshot) -> bool:
    """Whether pools or exchange rates changed: then everything else does."""
    if new.pools is not old.pools and set(new.pools) != set(old.pools):
        return True
    return new.table is not old.table and set(new.table.rates) != set(old.table.rates)


def validate(snapshot: Snapshot, known: Snapshot | None = None, jobs: Iterable[Job] | None = None) -> None:
    """Refuse a snapshot that contradicts itself; nodes that `known` shares with it are taken for good, and of
    the jobs, whose ids are then known to be unique, only these are looked at."""
    pools = {pool.name for pool in snapshot.pools}
    _unique("pool", [pool.name for pool in snapshot.pools])
    _unique("tenant", [tenant.name for tenant in snapshot.tenants])
    if jobs is None:
        _unique("job", [job.id for job in snapshot.jobs])
    if known is None or snapshot.nodes is not known.nodes:
        _unique("node", [node.name for node in snapshot.nodes])
        for node in snapshot.nodes:
            if node.pool not in pools:
                raise SnapshotError(
                    f"node {node.name!r} names the pool {node.pool!r}, which is not in the snapshot"
                )
    for job in snapshot.jobs if jobs is None else jobs:
        if not 1 <= job.min_pods <= job.max_pods:
            raise SnapshotError(
                f"job {job.key}: pods {job.min_pods}..{job.max_pods} is not a range from 1 up"
            )


def _unique(what: str, names: list[str] | list[JobId]) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SnapshotError(f"two {what}s are called {name!r}")
        seen.add(name)


@dataclass(frozen=True, slots=True)
class Memo:
    """Carried from one decision to the next to save time only; dropping it changes nothing but speed.

    One memo is used by one thread at a time.
    """

    prices: tuple[Price, ...] = ()
    version: int = -1
    books: Books | None = field(default=None, compare=False, repr=False)
    waiting: Known | None = field(default=None, compare=False, repr=False)
