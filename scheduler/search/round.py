"""One planning round: where every job is in the plan so far.

A round knows only *where every job is*; `actions.py` compares that with where the jobs were. Decisions depend
on this state alone, not on how it was reached, so planning again from the result changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import TypeVar, cast

from ..candidates.candidate import Candidate
from ..candidates.value import remaining_s
from ..fairness.quota import Right
from ..model.snapshot import Job, JobId, JobKind, Placement, Snapshot
from ..placement.feeds import LATER, NOW
from ..placement.pool import request
from ..placement.sharing import staying
from .holds import Hold, lifted
from .promised_places import PromisedPlace, drop, held_without
from .shares import Shares
from .state import Assignment, PlanningState
from .stoppable import Stoppable

T = TypeVar("T")

Place = tuple[Placement | None, Candidate | None, float, bool]


class Trial:
    """Changes of a round that are undone unless they are kept (`Round.trial`)."""

    def __init__(self, round_: Round, begin: int) -> None:
        """`begin`: how many entries the round's journal had."""
        self._round, self._begin = round_, begin
        self._least_budget = min(0, round_.disruption_budget_left)
        self.kept = False

    def keep(self) -> bool:
        """Let the changes stand; True."""
        self.kept = True
        return True

    @property
    def within_budget(self) -> bool:
        """Whether the changes disrupt no more jobs than the round may still disrupt; what was above that before does not
        count."""
        return self._round.disruption_budget_left >= self._least_budget

    def changes(self) -> list[tuple[Assignment, Place]]:
        """Jobs that are not where they were when the trial began, and where that was, in order of id."""
        first: dict[JobId, Place] = {}
        for job, place in self._round.journal[self._begin :]:
            first.setdefault(job, place)
        assignments = self._round.assignments
        return [
            (assignments[job], was)
            for job, was in sorted(first.items(), key=itemgetter(0))
            if _differs(assignments[job], was)
        ]


class Round:
    """One planning round on a state; `end` restores the state to what the snapshot says."""

    def __init__(self, state: PlanningState, now: float) -> None:
        self.state = state
        self.snapshot = state.snapshot
        self.policy = state.policy
        self.now = now
        self.table = state.table
        self.cluster = state.cluster
        self.holdings = state.holdings
        self.market = state.market
        self.assignments = state.assignments
        self.held = state.held
        self.ranked = state.ranked
        self.disrupted: set[JobId] = set()
        """Running jobs that the plan stops, moves or resizes."""
        self.claimed: set[JobId] = set()
        """Waiting jobs that have stopped others in this round, by a right or for their reservation."""
        self.gave_way: dict[JobId, JobId] = {}
        """Running jobs that were moved in this round, and for whose sake (`defragment.py`)."""
        self._first: dict[JobId, Place] = {}
        """Where jobs were when the round began: those that changed since."""
        self.journal: list[tuple[JobId, Place]] = []
        """Where jobs were before each change, while trials run."""
        self._trials = 0
        """How many trials run, one inside the other."""
        self._lost: dict[JobId, float] = {}
        self.stoppable = Stoppable(
            self.cluster,
            self.held,
            self.holdings.version,
            self.lost_s,
            self.lost_units,
            self.ran_min_time,
            self.shrunk,
        )
        self._cached: dict[tuple[object, ...], tuple[int, object]] = {}
        self.holds: dict[JobId, Hold] = {}
        """Room kept for reservations (`reservations.py`), by holder, in order of precedence."""
        self.promised_places: dict[JobId, PromisedPlace] = {}
        """Places that the last plan gave and that an answer to an event leaves to their jobs."""
        self.leavers: set[JobId] = set()
        """Jobs that leave, or once did in this round, for some reservation: only their places change what holds withhold."""
        self._typical_run_s: float | None = None
        self._stays: dict[JobId, tuple[Placement, float, tuple[float, dict[int, tuple[int, ...]]]]] = {}
        self.held_before = held_without(state)
        """Units that each tenant held when the round began."""
        self._disruption_budget = self._budget(state.snapshot)
        self.shares = Shares(state, now)
        self.cluster.begin()

    def _budget(self, snapshot: Snapshot) -> int:
        """How many running jobs may still be disrupted: those disrupted within `min_run_s` count."""
        since = self.now - self.policy.min_run_s
        recent = sum(moved_at_s > since for moved_at_s in self.state.moved.values())
        return max(self.policy.least_disruptions, math.ceil(self.policy.churn * len(snapshot.jobs))) - recent

    @property
    def changed(self) -> list[Assignment]:
        """Jobs whose place changed at least once in this round, in order of id."""
        return [self.assignments[job] for job in sorted(self._first)]

    def home(self, assignment: Assignment) -> Place:
        """Where the job was when the round began."""
        return self._first.get(assignment.job.id) or place_of(assignment)

    @contextmanager
    def trial(self) -> Iterator[Trial]:
        """Within this context changes are on trial: at its end all jobs are where they were, unless `Trial.keep` was
        called. Trials may stand inside each other."""
        trial = Trial(self, len(self.journal))
        self._trials += 1
        try:
            yield trial
        finally:
            if not trial.kept:
                self._undo(trial.changes())
            self._trials -= 1
            if not self._trials:
                self.journal.clear()

    def _undo(self, changes: list[tuple[Assignment, Place]]) -> None:
        """Put jobs back. Reservations withhold room anew afterwards: what they withheld meanwhile was not there before."""
        if not changes:
            return
        with lifted(self.holds.values()):
            for assignment, _ in changes:
                self.clear(assignment)
            for assignment, (placement, candidate, started_at_s, waits) in changes:
                if placement is not None:
                    self.restore(assignment, placement, candidate, started_at_s, waits)

    def end(self) -> None:
        """Restore the state to what it was when the round began; the round is not used any more. It then frees itself and
        what it has made, without the collector of cycles."""
        moved = [job for job in self._first if job in self.state.carried and not self._is_as_before(job)]
        self.rewind()
        self.promised_places.clear()
        for job in moved:
            drop(self.state, job)
        self.stoppable.end()

    def _is_as_before(self, job: JobId) -> bool:
        """Whether a job has the promised place that is carried, and nothing is withheld for it."""
        known = self.state.carried[job]
        has_it = known.hold.holder.placement is known.placement
        return has_it and not known.hold.applied and not known.hold.leaving

    def rewind(self) -> None:
        """Restore the state to what it was when the round began."""
        self.holds.clear()
        self.cluster.rewind()
        for job, (placement, candidate, started_at_s, waits) in self._first.items():
            assignment = self.assignments[job]
            if assignment.placement is not None:
                self._count(assignment, sign=-1)
            assignment.placement, assignment.candidate, assignment.started_at_s = (
                placement,
                candidate,
                started_at_s,
            )
            assignment.waits_for_release = waits
            if placement is not None:
                self._count(assignment)
        self._first.clear()
        self.stoppable.clear()

    def _count(self, assignment: Assignment, sign: int = 1) -> None:
        """Add a job's place to all counts but those of the nodes (sign=-1: subtract it)."""
        self.state.count_place(assignment, sign)
        placement = assignment.placement
        assert placement is not None
        self.stoppable.follow((placement.pool, assignment.job.tenant), assignment, sign)

    def _touch(self, assignment: Assignment) -> None:
        if self._trials:
            self.journal.append((assignment.job.id, place_of(assignment)))
        if assignment.job.id not in self._first:
            self._first[assignment.job.id] = place_of(assignment)

    def _note(self, assignment: Assignment) -> None:
        if assignment.job.run is not None and not assignment.stays and not assignment.job.yields:
            self.disrupted.add(assignment.job.id)
        else:
            self.disrupted.discard(assignment.job.id)

    def can_disrupt(self) -> bool:
        """Whether one more running job may be disrupted in this round (`Policy.churn`)."""
        return self.disruption_budget_left > 0

    @property
    def disruption_budget_left(self) -> int:
        """How many more running jobs may be disrupted."""
        return self._disruption_budget - len(self.disrupted)

    def shrunk(self, assignment: Assignment) -> bool:
        """Whether a running job gave back some of its pods in this round."""
        run, place = assignment.job.run, assignment.placement
        if run is None or place is None or assignment.job.id not in self.disrupted:
            return False
        same = (place.pool, place.mode, place.per_pod)
        return same == (run.placement.pool, run.placement.mode, run.placement.per_pod) and (
            place.pods < run.placement.pods
        )

    def cached(self, key: tuple[object, ...], tenant: str | None, find: Callable[[], T]) -> T:
        """The result of `find`, kept until the tenant's holdings change (None: those of any tenant)."""
        versions = self.holdings.version
        version = sum(versions.values()) if tenant is None else versions.get(tenant, 0)
        known = self._cached.get(key)
        if known is None or known[0] != version:
            known = self._cached[key] = (version, find())
        return cast(T, known[1])

    def stopped(self) -> list[Assignment]:
        """Jobs that ran when the round began and have no place now, in order of id."""
        return [one for one in self.changed if one.placement is None and one.job.run is not None]

    def waiting(self) -> list[Assignment]:
        """Jobs without a place that may be given one."""
        return [assignment for assignment in self.state.waiting.values() if not assignment.job.yields]

    def profit(self, candidate: Candidate) -> float:
        """Value per hour above the price of the accelerators and watts."""
        return candidate.value - self.market.cost(candidate)

    def put(
        self, assignment: Assignment, candidate: Candidate, nodes: tuple[str, ...], release: bool = False
    ) -> None:
        """Place a job that has no place."""
        run = assignment.job.run
        candidate = self.state.candidates.for_nodes(assignment.option, candidate, nodes)
        placement = candidate.placed(nodes, self._devices(assignment, candidate, nodes, release))
        unchanged = run is not None and run.placement == placement and not release
        started_at_s = run.started_at_s if run is not None and unchanged else self.now
        self.restore(assignment, placement, candidate, started_at_s, release)

    def put_now(self, assignment: Assignment, candidate: Candidate) -> bool:
        """Place a job that has no place where quota and free room allow it now; whether it was placed."""
        found = self.find(assignment.job, candidate) if self.allows(assignment.job, candidate) else None
        if found is None or found[1]:
            return False
        self.put(assignment, candidate, *found)
        return True

    def _devices(
        self, assignment: Assignment, candidate: Candidate, nodes: tuple[str, ...], release: bool
    ) -> tuple[int, ...]:
        """Devices for shares on these nodes: a running job's shares stay on the devices that they have."""
        run = assignment.job.run
        if run is not None and run.placement.devices and run.placement.pool == candidate.pool and not release:
            own = staying(run.placement, nodes)
            if own and self.fits(candidate.placed(nodes, own)):
                return own
        return self.cluster.pools[candidate.pool].devices(candidate.per_pod, nodes, release)

    def clear(self, assignment: Assignment) -> None:
        """Take a job's place away."""
        if assignment.placement is None:
            return
        self._touch(assignment)
        placement = assignment.placement
        self.cluster.take(placement, sign=1)
        self._count(assignment, sign=-1)
        assignment.placement, assignment.candidate, assignment.waits_for_release = None, None, False
        self._note(assignment)
        self._follow_leaver(assignment, placement, sign=-1)

    def restore(
        self,
        assignment: Assignment,
        placement: Placement,
        candidate: Candidate | None,
        started_at_s: float,
        release: bool = False,
    ) -> None:
        """Undo `clear`."""
        self._touch(assignment)
        assignment.placement, assignment.candidate, assignment.started_at_s = (
            placement,
            candidate,
            started_at_s,
        )
        assignment.waits_for_release = release
        self.cluster.take(placement)
        self._note(assignment)
        self._count(assignment)
        self._follow_leaver(assignment, placement, sign=1)

    def _follow_leaver(self, assignment: Assignment, placement: Placement, sign: int) -> None:
        if assignment.job.id in self.leavers:
            for hold in self.holds.values():
                hold.follow(assignment, placement, sign)

    def recall_delayed(self) -> list[Assignment]:
        """Take away the places that wait for a release: after more jobs were stopped there may be better
        ones. A claim keeps its place: others would take it, and lose it to the same claim again. So does a job that the
        last plan gave its place: those that were stopped for it leave first."""
        found = [
            assignment
            for assignment in self.changed
            if assignment.waits_for_release
            and assignment.job.id not in self.claimed
            and not self.keeps_promised_place(assignment)
        ]
        for assignment in found:
            self.clear(assignment)
        return found

    def keeps_promised_place(self, assignment: Assignment) -> bool:
        """Whether the job has the place that the last plan promised it, and others have still to leave."""
        known = self.promised_places.get(assignment.job.id)
        return known is not None and assignment.waits_for_release and assignment.placement is known.placement

    def lost_promised_places(self) -> list[Assignment]:
        """Jobs that have lost the place that the last plan promised them, and have no other."""
        holders = (promise.hold.holder for promise in self.promised_places.values())
        return [one for one in holders if one.placement is None]

    def waiting_for_release(self) -> list[Assignment]:
        """Jobs with a place that others have still to leave, in no order."""
        found = {promise.hold.holder.job.id: promise.hold.holder for promise in self.promised_places.values()}
        found |= {one.job.id: one for one in self.changed}
        return [one for one in found.values() if one.waits_for_release]

    def allows(self, job: Job, candidate: Candidate) -> bool:
        """Whether quota allows the job this candidate beside all that its tenant holds."""
        return self.holdings.refusal(job.tenant, candidate.accelerator, candidate.accelerators_m) is None

    def find(self, job: Job, candidate: Candidate) -> tuple[tuple[str, ...], bool] | None:
        """Nodes for a candidate that are free now, or else (True) after stopping jobs have released theirs."""
        nodes = self.cluster.find(job, candidate, later=False)
        if nodes is not None:
            return nodes, False
        if not self.cluster.is_releasing(candidate.pool):
            return None
        nodes = self.cluster.find(job, candidate, later=True)
        return None if nodes is None else (nodes, True)

    def fits(self, placement: Placement, own: JobId | None = None) -> bool:
        """Whether exactly this placement is free now (`own`: for the job that ran there, also where its going
        made room for a reservation)."""
        pool = self.cluster.pools.get(placement.pool)
        with lifted(hold for hold in self.holds.values() if own in hold.leaving):
            return pool is not None and pool.fits(placement)

    def passes(self, assignment: Assignment, hold: Hold) -> bool:
        """Whether the job may take the room of a reservation: its own, that of a job of its tenant with a lower
        priority, any for a guarantee, and for its share one that is not due."""
        job, holder = assignment.job, hold.holder.job
        if job.id == holder.id:
            return True
        if job.tenant == holder.tenant:
            return self.priority(job) > self.priority(holder)
        best = self.holdings.best_right
        right = best(job.tenant, assignment.option.shared.sizes)
        if right is Right.BORROWING:
            return False
        if right is Right.ENTITLED:
            return not self.shares.are_due(hold)
        return best(holder.tenant, hold.holder.option.shared.sizes) is not Right.GUARANTEED

    def barred(self, assignment: Assignment, pool: str) -> frozenset[int]:
        """Nodes of the pool that are collected for others whom the job does not pass; they are until the holder
        runs there."""
        return frozenset(i for hold in self.barring(assignment, pool) for i in hold.places)

    def barring(self, assignment: Assignment, pool: str) -> list[Hold]:
        """The reservations on the pool's nodes that the job does not pass."""
        holds = [
            hold
            for hold in self.holds.values()
            if hold.candidate.pool == pool and (hold.applied or hold.holder.waits_for_release)
        ]
        return [hold for hold in holds if not self.passes(assignment, hold)]

    def sync_holds(self) -> bool:
        """Withhold the room of those holders that have no place, and of no others, and give up holds whose room is
        taken; whether any was given up. On trial none is: what took the room may be undone."""
        lost = [
            job
            for job, hold in self.holds.items()
            if not self._trials and hold.applied and hold.holder.placement is None and not hold.has_room
        ]
        for job in lost:
            self.holds.pop(job).lift()
        for hold in self.holds.values():
            if hold.applied and hold.holder.placement is not None:
                hold.lift()
            elif not hold.applied and hold.holder.placement is None:
                hold.apply()
        return bool(lost)

    def pods_that_fit(self, job: Job, candidate: Candidate) -> int:
        """How many pods of this candidate fit, now or after stopping jobs have released their nodes."""
        nodes = self.cluster.pools[candidate.pool]
        ask = request(candidate.per_pod, nodes.pool.is_cpu)
        allowed = nodes.open_to(job, candidate)
        later = self.cluster.is_releasing(candidate.pool)
        rooms = nodes.rooms(ask, later, allowed)
        return sum(room for _, room in nodes.powered(rooms, candidate.draw_w, LATER if later else NOW))

    def sized(self, assignment: Assignment, like: Candidate | Placement, pods: int) -> Candidate | None:
        """The same with another number of pods that make the same request; None: it could not run so."""
        own = assignment.option, like.pool, like.mode, pods
        found = self.state.candidates.sized(*own, power_cap=like.power_cap)
        return found if found is not None and found.per_pod == like.per_pod else None

    def pods_if_empty(self, job: Job, candidate: Candidate, closed: bool = False) -> int:
        """How many pods of this candidate would fit if none of our jobs ran (`closed`: and all nodes were
        open)."""
        nodes = self.cluster.pools[candidate.pool]
        ask = request(candidate.per_pod, nodes.pool.is_cpu)
        return nodes.places_if_empty(ask, job.node_selector, job.required_domain, closed, candidate.draw_w)

    def lost_s(self, assignment: Assignment) -> float:
        """Seconds of progress lost if the job were stopped now: the restart, and the work since its last
        checkpoint."""
        job = assignment.job
        return job.restart_s if assignment.started_at_s >= self.now else self.repeats_s(job)

    def repeats_s(self, job: Job) -> float:
        """The same, whatever the plan has done with the job."""
        if job.run is None:
            return job.restart_s
        saved = job.run.started_at_s if job.run.saved_at_s is None else job.run.saved_at_s
        return job.restart_s + max(0.0, self.now - saved)

    def lost_units(self, assignment: Assignment) -> float:
        """The same times the accelerators of its running attempt, in exchange-rate units; 0 for a job that
        has shrunk, which restarts anyway."""
        if assignment.placement is None or assignment.job.run is None or self.shrunk(assignment):
            return 0.0
        known = self._lost.get(assignment.job.id)
        if known is None:
            units = self.holdings.units_of(
                assignment.placement.accelerator, assignment.placement.accelerators_m
            )
            known = self._lost[assignment.job.id] = self.lost_s(assignment) * units
        return known

    def priority(self, job: Job) -> int:
        """The priority that counts: at most the tenant's ceiling."""
        tenant = self.holdings.tenants.get(job.tenant)
        return job.priority if tenant is None else min(job.priority, tenant.priority_ceiling)

    def outranks_one(self, assignment: Assignment) -> bool:
        """Whether a job of its tenant has a lower priority."""
        return self.priority(assignment.job) > min(self.state.priorities[assignment.job.tenant])

    def ran_min_time(self, assignment: Assignment) -> bool:
        """Whether the job has run for `Policy.min_run_s` and may be disrupted; one that starts now has not run."""
        ran_s = self.now - assignment.started_at_s
        return ran_s > 0 and ran_s >= self.policy.min_run_s

    def reclaim_due_at_s(self, assignment: Assignment) -> float:
        """When a claim on the tenant's guarantee may ignore other jobs' `min_run_s`: after
        `Policy.reclaim_decision_fraction` of its reclaim deadline, which counts from when the job began to wait. A
        job that is stopped in this round begins to wait now."""
        job = assignment.job
        since = self.now if job.run is not None else job.waits_since_s
        deadline_s = job.reclaim_deadline_s or self.policy.guarantee_reclaim_s
        return since + self.policy.reclaim_decision_fraction * deadline_s

    def stay(self, assignment: Assignment) -> tuple[float, dict[int, tuple[int, ...]]]:
        """When a job that has a place is expected to end there, and what it takes of each node of its pool."""
        place, known = assignment.placement, self._stays.get(assignment.job.id)
        assert place is not None
        if known is None or known[0] is not place or known[1] != assignment.started_at_s:
            holds = self.cluster.pools[place.pool].holds(place)
            known = place, assignment.started_at_s, (self._ends_at_s(assignment), holds)
            self._stays[assignment.job.id] = known
        return known[2]

    def _ends_at_s(self, assignment: Assignment) -> float:
        job, candidate = assignment.job, assignment.candidate
        if job.kind is JobKind.SERVING:
            return self.now if job.yields else math.inf
        if job.remaining_work is not None and candidate is not None and candidate.speed > 0:
            return self.now + job.remaining_work / candidate.speed
        ran_s = self.now - assignment.started_at_s
        return assignment.started_at_s + max(self.typical_run_s, 2 * ran_s)

    def on_node(self, pool: str, i: int) -> Iterable[Assignment]:
        """The jobs that have a place on a node of a pool."""
        return self.state.on_node(pool, self.cluster.pools[pool].nodes[i].name)

    @property
    def typical_run_s(self) -> float:
        """How long a job of unknown length is expected to run: as long as the training jobs that run now have run
        on average, at least `Policy.expected_run_s`."""
        if self._typical_run_s is None:
            self._typical_run_s = max(self.policy.expected_run_s, self.state.mean_run_s(self.now))
        return self._typical_run_s

    def expected_s(self, assignment: Assignment) -> float:
        """How long the job still runs at its best speed; of unknown length: at least as long as is typical here."""
        left_s = remaining_s(assignment.job, assignment.option.best_speed)
        return left_s if assignment.job.remaining_work is not None else max(left_s, self.typical_run_s)

    def outlasts(self, waited_s: float, assignment: Assignment) -> bool:
        """Whether that is longer than a job's patience (`Policy.patience`)."""
        policy = self.policy
        if policy.patience <= 0 or assignment.job.kind is not JobKind.TRAINING:
            return False
        least_s, job = policy.min_run_s, assignment.job
        listed = self.state.candidates.listed_with(job)
        if listed is not None:  # who did not come later does not pass it
            waited_s = min(waited_s, listed.last_s - job.submitted_at_s)
            least_s = max(least_s, listed.ends_s)
        patience = self.shares.excess(assignment) or policy.patience
        return waited_s >= patience * max(self.expected_s(assignment), least_s)

    def is_patient(self, assignment: Assignment) -> bool:
        """Whether a waiting job has waited so long that smaller ones do not pass it any more."""
        return self.outlasts(self.now - assignment.job.waits_since_s, assignment)

    def was_patient(self, assignment: Assignment) -> bool:
        """Whether a running job had waited for its patience when it started, or had been stopped meanwhile: smaller
        ones of equal right do not pass it, and so do not take its place either. Otherwise gangs of the row `waiting`
        (`benchmarks/scheduling`) are stopped up to twelve times, and jobs of unknown length move 1.1 times as often."""
        ran_s = self.now - assignment.started_at_s
        if assignment.job.remaining_work is None and ran_s >= self.policy.expected_run_s:
            return False
        return self.outlasts(assignment.started_at_s - assignment.job.submitted_at_s, assignment)

    def recently_stopped(self, job: Job) -> bool:
        """Whether a waiting job was stopped in this round or within `min_run_s` before it."""
        if job.run is not None:
            return True
        moved = job.last_move_at_s
        return moved is not None and self.now - moved < self.policy.min_run_s

    def movable(self, assignment: Assignment) -> bool:
        """Whether the job may be stopped and started elsewhere for its own or its tenant's benefit."""
        return (
            assignment.placement is not None
            and assignment.job.run is not None
            and assignment.job.kind is JobKind.TRAINING
            and assignment.job.preemptible
            and self.ran_min_time(assignment)
        )

    def may_be_preempted_again(self, assignment: Assignment) -> bool:
        """Whether the job was preempted fewer than `Policy.max_preemptions` times."""
        return assignment.job.preemptions < self.policy.max_preemptions

    def may_go(self, assignment: Assignment) -> bool:
        """Whether it is movable, runs where it was, and its speed there is known."""
        return assignment.stays and assignment.candidate is not None and self.movable(assignment)

    def waits_for(self, placement: Placement, already: dict[str, list[int]]) -> list[str]:
        """The nodes and power domains (by `Feeds.keys_of`) in which others must make room for the placement, because
        there was not enough when the round began.

        `already` is what earlier starts of this plan take, by node or domain; this placement is added to it.
        """
        feeds = self.cluster.feeds
        powered = [] if feeds is None else feeds.short_at_start(placement, already)
        return (
            [*placement.nodes, *powered]
            if self.cluster.pools[placement.pool].short(placement, already)
            else powered
        )


def place_of(assignment: Assignment) -> Place:
    """Where a job is: placement, candidate, start, and whether the place waits for a release."""
    return assignment.placement, assignment.candidate, assignment.started_at_s, assignment.waits_for_release


def _differs(assignment: Assignment, place: Place) -> bool:
    return assignment.placement != place[0] or assignment.waits_for_release != place[3]
