"""The planning state: where every job is, who holds what, and what is free, as a snapshot says.

Building the state costs a pass over the whole snapshot; following a snapshot that differs in a few objects
costs as much as the difference. The state does not depend on how it was reached: amounts are whole numbers
that are added and subtracted, and everything that is ordered is ordered by name. So a state that followed a
hundred events gives exactly the answers of a state built now, and a `Memo` that carries it saves time and
nothing else.

The value of a job depends on its age, so it differs at every moment. The state takes all values at one
moment, that of the last full plan (`valued_at_s`), together with the prices of that plan.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from ..candidates.candidate import Candidate, Options, SharedCandidates
from ..candidates.candidates import CandidateBuilder
from ..candidates.prices import Market, solve
from ..fairness.quota import Holdings
from ..model.plans import DeadlineShare, Policy, RecordIndex
from ..model.snapshot import Job, JobId, JobKind, Placement, Snapshot
from ..model.table import TableView
from ..model.validate import validate
from ..placement.cluster import Cluster
from ..placement.demand_mix import DemandMix
from ..placement.feeds import Feeds
from ..placement.watt_limits import most_watts, watt_limits
from .deadlines import deadline_shares
from .queues import Order, WaitingQueues, request_of

if TYPE_CHECKING:
    from .promised_places import PromisedPlace

_PROFIT = attrgetter("profit")

Shape = tuple[object, ...]
Basis = tuple[
    Policy, float, dict[str, float], dict[int, float], tuple[DeadlineShare, ...], Mapping[str, float]
]


@dataclass(slots=True)
class RankedCandidate:
    """A candidate of a job, its value above its price, and the number of its shape. Candidates with the same
    shape number make the same request to the same nodes; only the number of pods differs."""

    profit: float
    candidate: Candidate
    shape: int


@dataclass(slots=True)
class Assignment:
    """A job and the place that it has in the plan so far."""

    job: Job
    option: Options
    placement: Placement | None = None
    candidate: Candidate | None = None
    started_at_s: float = 0.0
    waits_for_release: bool = False
    """True: the place uses resources that a stopping job still holds."""
    ranked: list[RankedCandidate] | None = None
    """Filled by `PlanningState.ranked`, together with `best_profit` and `value_density`."""
    best_profit: float = 0.0
    """Value above price of the job's best candidate; 0 if none is worth its price."""
    value_density: float = 0.0
    """The most value per accelerator that any candidate brings."""
    order: Order | None = None
    """Sort key, cached by `start.order`."""

    @property
    def stays(self) -> bool:
        """Whether the job goes on where it runs. A place that waits for a release does not count, even on its
        own nodes: the plan gives what the job has now to somebody else."""
        run = self.job.run
        return run is not None and run.placement == self.placement and not self.waits_for_release

    @property
    def can_shrink(self) -> bool:
        """Whether the job may give back pods and go on."""
        placement, job = self.placement, self.job
        return placement is not None and placement.pods > job.min_pods and job.kind is JobKind.TRAINING


class PlanningState:
    """The state of one snapshot, under one policy, at the values and prices of one moment."""

    def __init__(
        self,
        snapshot: Snapshot,
        policy: Policy,
        valued_at_s: float,
        prices: Mapping[str, float] | None = None,
        share_prices: Mapping[int, float] | None = None,
        deadlines: tuple[DeadlineShare, ...] | None = None,
        watt_prices: Mapping[str, float] | None = None,
    ) -> None:
        """Build the state.

        Args:
            prices: of an earlier plan; None: compute them. `share_prices` and `deadlines` likewise.
            watt_prices: by power domain, together with `prices`.

        Raises:
            SnapshotError: the snapshot contradicts itself.
        """
        validate(snapshot)
        self.snapshot = snapshot
        self.policy = policy
        self.valued_at_s = valued_at_s
        self.consistent = False
        """False while a change is being applied. A state that an error left so is not used again."""
        self.table = TableView(snapshot.table)
        self.candidates = CandidateBuilder(snapshot, self.table, policy, valued_at_s)
        self.cluster = Cluster(snapshot)
        self.candidates.spread(snapshot.jobs, self.cluster.capacity_m())
        self.holdings = Holdings(snapshot, self.table, self.cluster.capacity_m(), policy, valued_at_s)
        self.assignments: dict[JobId, Assignment] = {}
        self.held: dict[tuple[str, str], dict[JobId, Assignment]] = {}
        """Jobs with a place, by pool and tenant."""
        self.waiting: dict[JobId, Assignment] = {}
        """Jobs without a place that may be given one."""
        self.queues = WaitingQueues()
        """Jobs that wait by the snapshot."""
        self.asking: Counter[str] = Counter()
        """How many jobs of each tenant wait by the snapshot, without those whose place any other job may take."""
        self.carried: dict[JobId, PromisedPlace] = {}
        """Promised places of waiting jobs that are counted as taken (`promised_places.py`)."""
        self.releasing: dict[JobId, Assignment] = {}
        """Jobs whose running attempt is being stopped."""
        self.yielding: dict[JobId, Assignment] = {}
        """Jobs that run and whose place any job that waits may take."""
        self.moved: dict[JobId, float] = {}
        """Time of each job's last move, resize or preemption."""
        self.values: dict[JobId, float] = {}
        """Value of each job that has a candidate, where it is."""
        self.sizes: Counter[int] = Counter()
        """How many jobs ask for so many thousandths of accelerators at least."""
        self.priorities: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """How many jobs of each tenant have a priority."""
        self._on_nodes: defaultdict[str, defaultdict[str, dict[JobId, Assignment]]]
        self._on_nodes = defaultdict(partial(defaultdict, dict))
        self._ran: dict[JobId, tuple[float, float]] = {}
        """Of each training job that runs: since when, and its run time by the accelerator-seconds that it has had."""
        self._best_profits: dict[JobId, float] = {}
        self._unranked: dict[JobId, Assignment] = {}
        self._shapes: dict[Shape, int] = {}
        self._terms: dict[tuple[object, ...], tuple[SharedCandidates, list[tuple[float, int, int]]]] = {}
        self._demand = DemandMix(snapshot.pools)
        self._fill(deadlines)
        if prices is None:
            self.market = self._market()
        else:
            domains = {name: price for name, price in (watt_prices or {}).items() if price > 0}
            self.market = Market(dict(prices), 0.0, domains, self.cluster.by_pool(domains))
        self.share_prices = self.cluster.update_demand(self._demand, share_prices)
        self._known_demand = dict(self._demand.counts)
        self.consistent = True

    def _fill(self, deadlines: tuple[DeadlineShare, ...] | None) -> None:
        """Take in all jobs of the snapshot, and what tenants are entitled to and deadlines need (None: compute that)."""
        snapshot = self.snapshot
        self.hang_on_feeds(snapshot)
        for job in sorted(snapshot.jobs, key=lambda job: job.id):
            option = self.candidates.of(job)
            self.add(job, option)
            self.holdings.count_demand(option)
        self.holdings.update_entitlements()
        self.deadlines = deadline_shares(self) if deadlines is None else deadlines
        self._value_urgent()

    @property
    def basis(self) -> Basis:
        """What the state was built from besides the snapshot: policy, moment of the values, prices, deadlines."""
        market = self.market
        return (
            self.policy,
            self.valued_at_s,
            market.prices,
            self.share_prices,
            self.deadlines,
            {name: price for name, price in market.domains.items() if price > 0},
        )

    def _value_urgent(self) -> None:
        """Value the jobs whose deadlines need their shares now by that."""
        urgent = {share.job: share for share in self.deadlines if share.urgent(self.valued_at_s)}
        self.candidates.urgent = urgent
        for name in urgent:
            known = self.assignments.get(name)
            if known is not None:
                self.drop(known)
                self.add(known.job, self.candidates.of(known.job))

    def hang_on_feeds(self, snapshot: Snapshot) -> None:
        """Count the watts of the snapshot's power domains, if any limits, with the jobs that have places here."""
        if not self.candidates.draws.counts:
            return
        feeds = Feeds(snapshot, self.table)
        self.cluster.hang_on(feeds)
        for assignment in self.assignments.values():
            if assignment.placement is not None:
                feeds.take(assignment.placement, -1, -1)
        for assignment in self.releasing.values():
            run = assignment.job.run
            if run is not None:
                feeds.take(self.candidates.draws.counted(assignment.job, run.placement), -1, 0)

    def update_demand(self) -> None:
        """Give the nodes the new demand, if it changed."""
        if self._demand.counts != self._known_demand:
            self.cluster.update_demand(self._demand, self.share_prices)
            self._known_demand = dict(self._demand.counts)

    def _market(self) -> Market:
        """The prices at which the jobs' bids clear the market."""
        bids = self._bids(capped=False)
        if self.cluster.feeds is None:
            return solve(bids, self.holdings.capacity_m)
        limits = watt_limits(self.cluster, most_watts(one for own in bids.values() for one in own))
        if limits:
            bids = self._bids(capped=True)
        market = solve(bids, self.holdings.capacity_m, limits=limits)
        return replace(market, watts=self.cluster.by_pool(market.domains))

    def _bids(self, *, capped: bool) -> dict[JobId, Sequence[Candidate]]:
        """The candidates with which each job could run if no other job did. What fits on no node must raise no price, nor
        does the same place under a power cap, which is worth less, where watts are not scarce (`capped`: they are)."""
        known: dict[tuple[object, ...], list[int]] = {}
        found: dict[JobId, Sequence[Candidate]] = {}
        for name, own in self.assignments.items():
            job, candidates, key = own.job, own.option.candidates, request_of(own)
            able = known.get(key)
            if able is None:
                able = known[key] = [
                    i
                    for i, one in enumerate(candidates)
                    if (capped or one.power_cap == 1) and self.cluster.could_hold(job, one)
                ]
            found[name] = candidates if len(able) == len(candidates) else [candidates[i] for i in able]
        return found

    def ranked(self, assignment: Assignment) -> list[RankedCandidate]:
        """The job's candidates, most profit first."""
        if assignment.ranked is None:
            assignment.ranked = self.rank_apart(assignment)
            self._unranked.pop(assignment.job.id, None)
            if assignment.ranked:
                self._best_profits[assignment.job.id] = assignment.best_profit
        return assignment.ranked

    def rank_apart(self, assignment: Assignment) -> list[RankedCandidate]:
        """Rank the candidates of an assignment that is not part of the state."""
        terms, candidates = self._terms_of(assignment), assignment.option.candidates
        rows = [
            RankedCandidate(candidate.value - cost, candidate, shape)
            for candidate, (cost, shape, _) in zip(candidates, terms, strict=True)
        ]
        if self.market.watts:
            # At the price of the last watt several caps of one place bring the same: begin low, lifts take what is left.
            rows.sort(key=lambda row: (-round(row.profit, 9), row.candidate.pods * row.candidate.draw_w))
        else:
            rows.sort(key=_PROFIT, reverse=True)
        if rows:
            assignment.best_profit = max(0.0, rows[0].profit)
            assignment.value_density = max(
                candidate.value / divisor * 1000 if divisor > 0 else self._watt_density(candidate, cost)
                for candidate, (cost, _, divisor) in zip(candidates, terms, strict=True)
            )
        return rows

    def _terms_of(self, assignment: Assignment) -> list[tuple[float, int, int]]:
        """What is the same for all jobs with the same request, for each candidate: its cost, its shape number, and the
        thousandths of accelerators by which its value counts as density; 0: the watts count, too."""
        job, shared, key = assignment.job, assignment.option.shared, request_of(assignment)
        known = self._terms.get(key)
        if known is None:
            terms = [
                (self.market.cost(one), self._shape_of(job, one), self._density_divisor(one))
                for one in assignment.option.candidates
            ]
            known = self._terms[key] = shared, terms
        return known[1]

    def _shape_of(self, job: Job, candidate: Candidate) -> int:
        key = (
            candidate.pool,
            candidate.per_pod,
            job.node_selector,
            job.required_domain,
            candidate.draw_w,
            candidate.nodes,
            candidate.power_cap,
        )
        return self._shapes.setdefault(key, len(self._shapes))

    def _density_divisor(self, candidate: Candidate) -> int:
        watt = self.market.watts.get(candidate.pool, 0.0) if self.market.watts else 0.0
        return 0 if watt > 0 and candidate.draw_w else max(candidate.accelerators_m, 1)

    def _watt_density(self, candidate: Candidate, cost: float) -> float:
        """Value per what an accelerator costs that draws its nameplate, where watts are scarce: a candidate that draws half
        of it takes half as much of the watts."""
        more_w = self.table.nameplate_watts(candidate.accelerator) - self.table.idle_watts(
            candidate.accelerator
        )
        watt = self.market.watts.get(candidate.pool, 0.0)
        whole = self.market.price(candidate.accelerator) + watt * max(more_w, 1.0)
        return candidate.value * whole / cost

    def rank(self) -> None:
        """Rank the candidates of all jobs now, so that the first event does not have to."""
        for assignment in list(self._unranked.values()):
            self.ranked(assignment)

    def on_node(self, pool: str, node: str) -> Iterable[Assignment]:
        """The jobs that have a place on a node."""
        return self._on_nodes[pool][node].values()

    def count_place(self, assignment: Assignment, sign: int = 1) -> None:
        """Add the place of an assignment to all counts but those of the nodes (sign=-1: subtract it)."""
        placement, job = assignment.placement, assignment.job
        assert placement is not None
        key, on_nodes = (placement.pool, job.tenant), self._on_nodes[placement.pool]
        if sign > 0:
            self.held.setdefault(key, {})[job.id] = assignment
            self.waiting.pop(job.id, None)
            if assignment.candidate is not None:
                self.values[job.id] = assignment.candidate.value
            for node in placement.nodes:
                on_nodes[node][job.id] = assignment
        else:
            del self.held[key][job.id]
            self.waiting[job.id] = assignment
            self.values.pop(job.id, None)
            for node in placement.nodes:
                on_nodes[node].pop(job.id, None)
        amount_m = sign * placement.accelerators_m
        self.holdings.add_held(job.tenant, job.user, placement.accelerator, amount_m)

    def mean_run_s(self, now: float) -> float:
        """How long the training jobs that run now have run on average; 0 if there are none."""
        ran = [
            by_work if by_work > (by_clock := now - since) else by_clock
            for since, by_work in self._ran.values()
        ]
        return math.fsum(ran) / len(ran) if ran else 0.0

    def bound(self) -> float:
        """An upper bound on the value of any plan, at these prices."""
        self.rank()
        capacity_m, market = self.holdings.capacity_m, self.market
        income = [market.price(kind) * amount / 1000 for kind, amount in capacity_m.items()]
        return math.fsum(income) + self._watt_income() + math.fsum(self._best_profits.values())

    def _watt_income(self) -> float:
        """What all watts of the pools that pay for them are worth at these prices."""
        prices = {pool: price for pool, price in self.market.watts.items() if price > 0}
        if not prices:
            return 0.0
        most = most_watts(one for own in self.assignments.values() for one in own.option.candidates)
        limits = watt_limits(self.cluster, most)
        limited = {pool for limit in limits for pool in limit.pools}
        income = [limit.watts * max(prices.get(pool, 0.0) for pool in limit.pools) for limit in limits]
        income += [  # other pools draw what their accelerators can, at most
            price * most.get(pool, 0.0) * self.cluster.pools[pool].capacity_m()
            for pool, price in sorted(prices.items())
            if pool not in limited
        ]
        return math.fsum(income)

    def value(self) -> float:
        """The value of all jobs where they are."""
        return math.fsum(self.values.values())

    # -- adding and removing jobs ---------------------------------------------------------------------------

    def add(self, job: Job, option: Options) -> None:
        """Add a job."""
        assignment = self.assignments[job.id] = Assignment(job, option)
        self._demand.count(job)
        self._unranked[job.id] = assignment
        self._count_priority(job)
        self.sizes[least_m(job)] += 1
        self._enter(assignment)

    def drop(self, assignment: Assignment) -> None:
        """Remove a job."""
        job = assignment.job
        self._leave(assignment)
        del self.assignments[job.id]
        self._demand.count(job, -1)
        self._count_priority(job, -1)
        size_m = least_m(job)
        self.sizes[size_m] -= 1
        if not self.sizes[size_m]:
            del self.sizes[size_m]
        self._best_profits.pop(job.id, None)
        self._unranked.pop(job.id, None)

    def change(self, assignment: Assignment, job: Job) -> None:
        """Replace the job of an assignment by itself at another moment: its request and its value are the same, and its
        place, its times or its priority may differ."""
        was, before = assignment.option, assignment.job
        stays = _runs_on(before, job)
        if not stays:
            self._leave(assignment)
        assignment.option = Options(job, was.candidates, was.weight, was.best_speed, was.shared)
        assignment.job = job
        if job.priority != before.priority:
            assignment.order = None
            self._count_priority(before, -1)
            self._count_priority(job)
        if stays:
            self._count_run(assignment)
        else:
            self._enter(assignment)

    def _count_priority(self, job: Job, sign: int = 1) -> None:
        own = self.priorities[job.tenant]
        own[job.priority] += sign
        if not own[job.priority]:
            del own[job.priority]

    def _enter(self, assignment: Assignment) -> None:
        """Count where a job is, and when it was there."""
        job, option = assignment.job, assignment.option
        run = job.run
        if run is None:
            if job.last_move_at_s is not None:
                self.moved[job.id] = job.last_move_at_s
            self.waiting[job.id] = assignment
            self.queues.add(assignment)
            self.asking[job.tenant] += not job.yields
            return
        self._count_run(assignment)
        place = run.placement
        kind, amount_m = place.accelerator, place.accelerators_m
        counted = self.candidates.draws.counted(job, place)
        if run.releasing:
            self.releasing[job.id] = assignment
            self.cluster.take_releasing(counted)
            self.holdings.add_releasing(job.tenant, kind, amount_m)
            return
        self.cluster.take(counted)
        assignment.placement, assignment.candidate = counted, self.candidates.instance(option, place)
        self.count_place(assignment)
        if job.yields:
            self.yielding[job.id] = assignment

    def _count_run(self, assignment: Assignment) -> None:
        """Count since when a job that runs has run and when it was moved."""
        job, run = assignment.job, assignment.job.run
        assert run is not None
        if job.last_move_at_s is None:
            self.moved.pop(job.id, None)
        else:
            self.moved[job.id] = job.last_move_at_s
        if job.kind is JobKind.TRAINING:
            place = run.placement
            units = max(self.holdings.units_of(place.accelerator, place.accelerators_m), 1e-6)
            self._ran[job.id] = run.started_at_s, job.attained_s / units
        if not run.releasing:
            assignment.started_at_s = run.started_at_s

    def _leave(self, assignment: Assignment) -> None:
        """Undo `_enter`."""
        job = assignment.job
        self.moved.pop(job.id, None)
        run = job.run
        if run is None:
            del self.waiting[job.id]
            self.queues.drop(job.id)
            self.asking[job.tenant] -= not job.yields
            return
        place = run.placement
        kind, amount_m = place.accelerator, place.accelerators_m
        self._ran.pop(job.id, None)
        counted = self.candidates.draws.counted(job, place)
        if run.releasing:
            del self.releasing[job.id]
            self.cluster.take_releasing(counted, sign=1)
            self.holdings.add_releasing(job.tenant, kind, -amount_m)
            return
        self.cluster.take(counted, sign=1)
        self.count_place(assignment, sign=-1)
        del self.waiting[job.id]
        assignment.placement, assignment.candidate, assignment.started_at_s = None, None, 0.0
        self.yielding.pop(job.id, None)


def least_m(job: Job) -> int:
    """The least that a job asks for, in thousandths of accelerators."""
    return job.min_pods * job.per_pod.accelerators_m


def _runs_on(before: Job, job: Job) -> bool:
    """Whether a job that makes the same request goes on where it ran."""
    was, run = before.run, job.run
    if was is None or run is None or was.releasing or run.releasing:
        return False
    return was.placement == run.placement


@dataclass(frozen=True, slots=True)
class Memo:
    """Carried from one decision to the next to save time; without it the answers are the same.

    A memo is used by one thread at a time.
    """

    state: PlanningState | None = field(default=None, compare=False, repr=False)
    waiting: RecordIndex | None = field(default=None, compare=False, repr=False)
