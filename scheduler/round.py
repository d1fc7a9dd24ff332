"""The state of one planning round: jobs with their columns, the nodes' books, the ledger, the prices.

A round only knows *where every job is in the plan so far*; `planner` turns the difference to where they
were into actions. Decisions look at this state alone, never at how it came about, so that planning again
from the result finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .cluster import Cluster, request
from .columns import Candidate, Options, options
from .ledger import Ledger
from .plans import Policy
from .prices import Market, solve
from .table import TableView
from .types import Job, JobId, JobKind, Placement, Snapshot


@dataclass
class Seat:
    """A job's place in the plan so far."""

    option: Options
    placement: Placement | None
    column: Candidate | None
    started_at_s: float
    waits_for_release: bool = False
    """Planned into resources that a stopping job still holds."""

    @property
    def job(self) -> Job:
        return self.option.job


class Round:
    """One planning round on a snapshot."""

    def __init__(
        self, snapshot: Snapshot, policy: Policy, now: float, start: Mapping[str, float] | None = None
    ) -> None:
        self.snapshot = snapshot
        self.policy = policy
        self.now = now
        self.table = TableView(snapshot.table)
        self.options = options(snapshot, self.table, policy, now)
        self.cluster = Cluster(snapshot)
        capacity_m = self.cluster.capacity_m()
        self.ledger = Ledger(snapshot, self.table, self.options, capacity_m)
        self.market: Market = solve(self.options, capacity_m)
        self.seats: dict[JobId, Seat] = {}
        for job in sorted(snapshot.jobs, key=lambda job: job.id):
            self._seat(job)
        self._first_free = {
            name: {node.name: tuple(free) for node, free in zip(pool.nodes, pool.now, strict=True)}
            for name, pool in self.cluster.pools.items()
        }

    def _seat(self, job: Job) -> None:
        option = self.options[job.id]
        if job.run is None:
            self.seats[job.id] = Seat(option, None, None, 0.0)
            return
        placement = job.run.placement
        if job.run.releasing:
            self.cluster.take(placement, now=True)
            for_later = self.cluster.pools.get(placement.pool)
            if for_later is not None:
                for_later.give_later(placement.nodes, placement.per_pod)
            self.seats[job.id] = Seat(option, None, None, 0.0)
            return
        self.cluster.take(placement)
        self.ledger.book(job.tenant, placement.accelerator, placement.accelerators_m)
        column = option.column_of(placement)
        self.seats[job.id] = Seat(option, placement, column, job.run.started_at_s)

    def waiting(self) -> list[Seat]:
        """Jobs without a place that may get one."""
        return [
            seat
            for seat in self.seats.values()
            if seat.placement is None and not (seat.job.run is not None and seat.job.run.releasing)
        ]

    def profit(self, column: Candidate) -> float:
        """Value per hour above the price of the accelerators."""
        return column.value - self.market.price(column.accelerator) * column.accelerators_m / 1000

    def put(self, seat: Seat, column: Candidate, nodes: tuple[str, ...], release: bool = False) -> None:
        """Give a job without a place this place."""
        seat.placement = column.placed(nodes)
        seat.column = column
        run = seat.job.run
        unchanged = run is not None and run.placement == seat.placement
        seat.started_at_s = run.started_at_s if run is not None and unchanged else self.now
        seat.waits_for_release = release
        self.cluster.take(seat.placement)
        self.ledger.book(seat.job.tenant, column.accelerator, column.accelerators_m)

    def clear(self, seat: Seat) -> None:
        """Take a job's place away."""
        if seat.placement is None:
            return
        self.cluster.take(seat.placement, sign=1)
        self.ledger.book(seat.job.tenant, seat.placement.accelerator, -seat.placement.accelerators_m)
        seat.placement, seat.column, seat.waits_for_release = None, None, False

    def restore(
        self, seat: Seat, placement: Placement, column: Candidate | None, started_at_s: float
    ) -> None:
        """Undo `clear`."""
        seat.placement, seat.column, seat.started_at_s = placement, column, started_at_s
        self.cluster.take(placement)
        self.ledger.book(seat.job.tenant, placement.accelerator, placement.accelerators_m)

    def find(self, job: Job, column: Candidate) -> tuple[tuple[str, ...], bool] | None:
        """Nodes for a column that are free now, or else (True) once stopping jobs have gone."""
        nodes = self.cluster.find(job, column.pool, column.pods, column.per_pod, later=False)
        if nodes is not None:
            return nodes, False
        if not self.cluster.pools[column.pool].releasing:
            return None
        nodes = self.cluster.find(job, column.pool, column.pods, column.per_pod, later=True)
        return None if nodes is None else (nodes, True)

    def lost_s(self, seat: Seat) -> float:
        """Seconds of progress that stopping the job now would cost."""
        run = seat.job.run
        if run is None or seat.started_at_s >= self.now:
            return seat.job.restart_s
        saved = run.started_at_s if run.saved_at_s is None else run.saved_at_s
        return seat.job.restart_s + max(0.0, self.now - saved)

    def lost_units(self, seat: Seat) -> float:
        """The same for all its accelerators, in exchange-rate units."""
        if seat.placement is None:
            return 0.0
        units = self.ledger.units_of(seat.placement.accelerator, seat.placement.accelerators_m)
        return self.lost_s(seat) * units

    def priority(self, job: Job) -> int:
        """The priority that counts."""
        tenant = self.ledger.tenants.get(job.tenant)
        return job.priority if tenant is None else min(job.priority, tenant.priority_ceiling)

    def settled(self, seat: Seat) -> bool:
        """Whether the job has run long enough to be disturbed for fairness or speed."""
        return self.now - seat.started_at_s >= self.policy.min_run_s

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
        pool = self.cluster.pools[placement.pool]
        ask = request(placement.per_pod, pool.pool.is_cpu)
        short = False
        for name in placement.nodes:
            taken = already.setdefault(name, [0, 0, 0, 0])
            free = self._first_free[placement.pool][name]
            for k in range(4):
                taken[k] += ask[k]
                short = short or (ask[k] > 0 and taken[k] > free[k])
        return short
