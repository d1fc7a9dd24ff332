"""The state of one planning round: jobs with their columns, the nodes' books, the ledger, the prices.

A round only knows *where every job is in the plan so far*; `planner` turns the difference to where they
were into actions. Decisions look at this state alone, never at how it came about, so that planning again
from the result finds nothing to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .cluster import Cluster, request
from .columns import Candidate, Options, options
from .ledger import Ledger
from .plans import Policy
from .prices import Market, solve
from .table import TableView
from .types import Job, JobId, JobKind, Placement, Snapshot

FEW = 8
"""So many jobs may be disturbed on the smallest cluster."""


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
        self.held: dict[tuple[str, str], dict[JobId, Seat]] = {}
        """Jobs with a place, by pool and tenant."""
        self._lost: dict[JobId, float] = {}
        self._disturbable: dict[tuple[str, str], list[Seat]] = {}
        self.disturbed: set[JobId] = set()
        """Running jobs whose place in the plan is another than they have, or none."""
        for job in sorted(snapshot.jobs, key=lambda job: job.id):
            self._seat(job)
        self._quiet_budget = self._budget(snapshot)
        self._first_free = {
            name: {node.name: tuple(free) for node, free in zip(pool.nodes, pool.now, strict=True)}
            for name, pool in self.cluster.pools.items()
        }

    def _budget(self, snapshot: Snapshot) -> int:
        """How many running jobs may still be disturbed: what happened lately counts."""
        since = self.now - self.policy.min_run_s
        recent = sum(job.last_move_at_s is not None and job.last_move_at_s > since for job in snapshot.jobs)
        return max(FEW, math.ceil(self.policy.churn * len(snapshot.jobs))) - recent

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
            leaving = (job.tenant, placement.accelerator)
            self.ledger.leaving_m[leaving] = self.ledger.leaving_m.get(leaving, 0) + placement.accelerators_m
            self.seats[job.id] = Seat(option, None, None, 0.0)
            return
        self.cluster.take(placement)
        self.ledger.book(job.tenant, placement.accelerator, placement.accelerators_m)
        column = option.column_of(placement)
        seat = self.seats[job.id] = Seat(option, placement, column, job.run.started_at_s)
        self._hold(seat)

    def _hold(self, seat: Seat) -> None:
        assert seat.placement is not None
        key = (seat.placement.pool, seat.job.tenant)
        self.held.setdefault(key, {})[seat.job.id] = seat
        self._disturbable.pop(key, None)

    def _note(self, seat: Seat) -> None:
        run = seat.job.run
        if run is not None and run.placement != seat.placement:
            self.disturbed.add(seat.job.id)
        else:
            self.disturbed.discard(seat.job.id)

    def calm(self) -> bool:
        """Whether more running jobs may be disturbed in this round (`Policy.churn`)."""
        return len(self.disturbed) < self._quiet_budget

    def disturbable(self, pool: str, tenant: str) -> list[Seat]:
        """Jobs of the tenant in this pool that may be stopped for others, least work lost first."""
        key = (pool, tenant)
        if key not in self._disturbable:
            found = [
                seat
                for seat in self.held.get(key, {}).values()
                if seat.job.preemptible and self.settled(seat)
            ]
            found.sort(key=lambda seat: (self.lost_units(seat), seat.job.id))
            self._disturbable[key] = found
        return self._disturbable[key]

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
        self._hold(seat)
        self._note(seat)
        self.cluster.take(seat.placement)
        self.ledger.book(seat.job.tenant, column.accelerator, column.accelerators_m)

    def clear(self, seat: Seat) -> None:
        """Take a job's place away."""
        if seat.placement is None:
            return
        key = (seat.placement.pool, seat.job.tenant)
        del self.held[key][seat.job.id]
        self._disturbable.pop(key, None)
        self.cluster.take(seat.placement, sign=1)
        self.ledger.book(seat.job.tenant, seat.placement.accelerator, -seat.placement.accelerators_m)
        seat.placement, seat.column, seat.waits_for_release = None, None, False
        self._note(seat)

    def restore(
        self, seat: Seat, placement: Placement, column: Candidate | None, started_at_s: float
    ) -> None:
        """Undo `clear`."""
        seat.placement, seat.column, seat.started_at_s = placement, column, started_at_s
        self._hold(seat)
        self._note(seat)
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
        """The same for all accelerators of its running attempt, in exchange-rate units."""
        if seat.placement is None:
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
