"""What a decision is: actions, one record per waiting job, and the policy.

A plan is a list of guarded actions. Each names what it assumed (`Action.assumed`); `stale` (apply.py) says
whether that still holds. Applying an action twice is harmless: the second time the job is already as the
action wants it. Carry actions out in the given order: releases come before the starts that need their room.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .codec import Json, decode, encode
from .snapshot import JobId, Placement, Reservation


class ActionKind(StrEnum):
    """What to do with a job."""

    START = "start"
    GROW = "grow"
    SHRINK = "shrink"
    MOVE = "move"
    LIFT = "lift"
    PREEMPT = "preempt"


class Objective(StrEnum):
    """What a cluster optimises."""

    FAIRNESS = "fairness"
    MAKESPAN = "makespan"
    COST = "cost"
    FINISH_TIME_FAIRNESS = "finish-time-fairness"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do.

    `start`, `grow`, `shrink`, `move` and `lift` carry the placement wanted in `to`. All but `start` and `lift` mean:
    save, stop, release, and (except `preempt`) start again as `to` says once the old pods are gone. `lift` gives a job
    that runs on a higher power cap.
    A start whose room must first be made by a preemption in the same plan lists those jobs in `after`.
    """

    id: str
    """Stable: the same decision on the same state has the same id, also after a restart."""
    kind: ActionKind
    job: JobId
    to: Placement | None = None
    assumed: Placement | None = None
    """The placement the job had when this was decided; None: it was waiting."""
    after: tuple[JobId, ...] = ()
    """Jobs whose resources must be free before this may be carried out."""
    gain: float = 0.0
    """Value per hour of the new state over the old one (see `Candidate.value`)."""
    cost: float = 0.0
    """Accelerator-seconds, in exchange-rate units, lost to restart and to work since the last checkpoint."""
    reason: str = ""
    """One sentence for people."""
    makes_room_for: JobId | None = None
    """A `move` for another job's sake. It counts as a preemption."""


class WaitCode(StrEnum):
    """Why a job waits. Values never change."""

    NO_ACCELERATOR = "NoMatchingAccelerator"
    NO_POOL = "NoPoolForTenant"
    DOES_NOT_FIT = "DoesNotFitAnyMode"
    DEVICES_UNUSED = "AcceleratorsUnused"
    NODE_TOO_SMALL = "NoNodeLargeEnough"
    UNKNOWN_TENANT = "NoTenant"
    CEILING = "QuotaCeiling"
    BORROW_LIMIT = "BorrowingLimit"
    CAPACITY = "InsufficientCapacity"
    NODES_CLOSED = "NodesClosed"
    FRAGMENTED = "Fragmented"
    POWER = "InsufficientPower"
    FAIR_SHARE = "FairShare"
    PRIORITY = "LowerPriority"
    PREEMPTING = "WaitingForPreemption"
    RELEASING = "Releasing"


NEVER = frozenset(
    {
        WaitCode.NO_ACCELERATOR,
        WaitCode.NO_POOL,
        WaitCode.DOES_NOT_FIT,
        WaitCode.DEVICES_UNUSED,
        WaitCode.NODE_TOO_SMALL,
        WaitCode.UNKNOWN_TENANT,
    }
)
"""Codes of jobs that cannot start however long they wait, unless something is changed."""


class Extent(StrEnum):
    """Where all that is asked for must be found together."""

    NODE = "node"
    DOMAIN = "domain"
    POOL = "pool"
    CLUSTER = "cluster"
    """All nodes that it may use; there is one pool of the type."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Nodes that could help the job if they were open."""

    why: str
    """"cordoned", "not ready" or "tainted"."""
    nodes: int


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the resource that a job waits for."""

    tenant: str
    amount_m: int
    guaranteed: bool
    """Held inside that tenant's guarantee (nobody can take it)."""
    jobs: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """The smallest change of one kind that would start the job now."""

    kind: str
    """"pods", "accelerators" (per pod), "accelerator", "mode", "quota", "priority", "memory", "cpu", "watts" (more than
    the power domain may carry now) or "domain" (another one, which its node selector excludes)."""
    current: str
    needed: str


@dataclass(unsafe_hash=True, slots=True)
class WaitingRecord:
    """Why one job waits, recomputed in every round. Amounts are thousandths of an accelerator (or CPU
    millicores, MiB, watts when `resource` says "cpu", "memory", "watts").

    Never changed once it is made, like a `Candidate`: `frozen` would make a plan's many fifteen times as slow to build.
    """

    job: JobId
    code: WaitCode
    resource: str
    """The accelerator key, "*", "cpu", "memory", "ephemeral-storage", "device-memory" (per accelerator), or "watts"."""
    tenant: str = ""
    requested: int = 0
    entitled: int = 0
    """What the tenant's fair share of this resource is now."""
    allocated: int = 0
    """What the tenant holds of it after this plan."""
    limit: int | None = None
    """The quota row's limit, the node's size, or the pool's capacity, as the code says."""
    free: int = 0
    holders: tuple[Holder, ...] = ()
    price: float = 0.0
    """What an accelerator-hour of the resource, or a watt-hour on the domain, costs in this round, in value."""
    offer: float = 0.0
    """What this job offers for it."""
    changes: tuple[Change, ...] = ()
    waited_s: float = 0.0
    position: int = 0
    """1: next among the waiting jobs of its tenant."""
    round: str = ""
    """The plan (`Plan.id`) this belongs to."""
    extent: Extent | None = None
    """Of what `limit` is the most, if nothing there is large enough; None: of none."""
    closed: tuple[Closed, ...] = ()
    """Code `NodesClosed`: the nodes that could hold pods of the job."""
    mode: str = ""
    """Code `DoesNotFitAnyMode`: the engine mode that is nearest to fitting. Code `NoNodeLargeEnough`: the one in which pods
    need more host memory than the job asks for; "": it asks for that much itself."""
    fits_m: int = 0
    """Code `DoesNotFitAnyMode`: the fewest accelerators per pod in which it would fit; 0: none is known."""
    above_limit: bool = False
    """Codes of quota: every way to run the job is above a limit even while its tenant holds nothing. Code
    `InsufficientPower`: it is above what the power domain carries even while no job runs."""
    reservation: Reservation | None = None
    """The place that is collected for the job, if it is first in line."""
    domain: str = ""
    """Code `InsufficientPower`: the power domain. `limit` is what it has for jobs, `requested` what the job adds to it."""
    power_cap: float = 1.0
    """Code `InsufficientPower`: the lowest cap under which it could run, with which it adds so much."""

    @property
    def never(self) -> bool:
        """Whether the job cannot start however long it waits, unless something is changed."""
        return self.code in NEVER or self.above_limit

    @property
    def foreseeable(self) -> bool:
        """Whether forecasts can say when it starts, from the ends of other jobs. Nothing says when closed nodes are
        opened."""
        return not self.never and self.code is not WaitCode.NODES_CLOSED

    def stamped(
        self,
        job: JobId,
        offer: float,
        position: int,
        round_: str,
        waited_s: float,
        reservation: Reservation | None,
    ) -> WaitingRecord:
        """The record for one job of one round. (`dataclasses.replace` takes several times as long, and an event
        that stops five hundred jobs makes as many records.)"""
        return WaitingRecord(
            job,
            self.code,
            self.resource,
            self.tenant,
            self.requested,
            self.entitled,
            self.allocated,
            self.limit,
            self.free,
            self.holders,
            self.price,
            offer,
            self.changes,
            waited_s,
            position,
            round_,
            self.extent,
            self.closed,
            self.mode,
            self.fits_m,
            self.above_limit,
            reservation,
            self.domain,
            self.power_cap,
        )


REACT_CODES = frozenset({WaitCode.PREEMPTING, WaitCode.RELEASING, WaitCode.CEILING, WaitCode.BORROW_LIMIT})
"""Codes of records that `react` needs to find quickly."""


@dataclass(frozen=True, slots=True)
class RecordIndex:
    """The records of a plan, by job; `with_react_code`: those whose code is in `REACT_CODES`."""

    records: tuple[WaitingRecord, ...]
    by_job: Mapping[JobId, WaitingRecord]
    with_react_code: Mapping[JobId, WaitingRecord]

    @classmethod
    def of(cls, records: tuple[WaitingRecord, ...]) -> RecordIndex:
        """Indexes all of them."""
        by_job = {record.job: record for record in records}
        return cls(
            records, by_job, {job: record for job, record in by_job.items() if record.code in REACT_CODES}
        )

    def renewed(self, records: tuple[WaitingRecord, ...]) -> RecordIndex:
        """The index of these records: itself if they are its own."""
        return self if records is self.records else RecordIndex.of(records)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a cluster decides. The defaults are the one published policy; `hash` stands in every result."""

    objective: Objective = Objective.FAIRNESS
    usage_half_life_s: float = 7 * 86400.0
    """Usage older than this counts half: a week's use matters, and is forgiven."""
    guarantee_reclaim_s: float = 300.0
    """Borrowed capacity is back with the tenant it is guaranteed to within this time after a job began to
    wait: decided in the first half, carried out in the second."""
    reclaim_decision_fraction: float = 0.5
    """After this part of its reclaim deadline a claim on a guarantee may ignore other jobs' `min_run_s`; the rest
    of the deadline is for stopping and starting."""
    min_run_s: float = 300.0
    """A started job is not stopped or moved before it has run this long, unless the deadline of a guarantee
    demands it; a stopped job ranks behind its equals for as long."""
    max_preemptions: int = 5
    """After this many (a shrink counts) a job is preempted only to give back a guarantee, or for a job of its
    own tenant with a higher priority. Without a limit elastic jobs move 8 % more often, and take 2 % longer, where they come
    within eight hours."""
    rotation_s: float = 3600.0
    """Jobs of different tenants that are each too large for their tenant's share take turns of this length at least
    (`search/rules.py`): long beside a restart, short beside a working day."""
    share_run_s: float = 1200.0
    """A tenant that lacks little of its share takes it from those above theirs when their jobs have run this long (one that
    lacks all of it: `min_run_s`). One accelerator of sixteen that is missing for twenty minutes is a fiftieth of an hour's
    work, and a restart every twenty minutes costs less."""
    turn_per_restart: float = 20.0
    """A turn is this many times a job's restart at least: taking turns costs a twentieth at most."""
    move_gain_factor: float = 2.0
    """A running job moves only if the forecast gain is at least this many times the cost."""
    hysteresis: float = 1.1
    """Where no right decides, what is gained must exceed what is lost by this factor, so that noise in the speeds moves
    nothing. At 1 jobs of five tenants with a backlog move 1.6 times as often, and T1's 99th percentile is 6 % longer where
    lengths are unknown."""
    least_rise: float = 0.25
    """An exchange for a share of the work must raise the lowest level of the tenants concerned by this part of what it
    brings the one that asks, so that the last exchange does not turn the inequality round. At 0 two jobs of
    which one wins what the other loses change places in every plan, which no row of the ablation shows. Whole jobs give way
    (rule `gap`) to a tenant that lacks this part of its work, if they raise the lower of the two by as much."""
    transfer_gain_factor: float = 2.0
    """Pods move between two running jobs if the gain exceeds the loss by this many times the work that both repeat: the
    next arrival may restart them again. At 1 elastic jobs move 4 % more often, and take as long."""
    solver_gain: float = 0.01
    """The solver is tried where the certified gap is above this part of the value, and its answer is kept if it gains as
    much: less is not worth a disruption."""
    churn: float = 0.05
    """At most this part of all jobs is disrupted for fairness, priority or speed within `min_run_s` (at least
    `least_disruptions`). Reclaiming a guarantee is not bounded, but counts."""
    least_disruptions: int = 8
    """Even the smallest cluster may disrupt this many jobs within `min_run_s`."""
    growth_factor: int = 2
    """A running elastic job grows at most by this factor in one round."""
    unknown_length_s: float = 3600.0
    """A job of unknown length is taken to go on for at least this long where it is decided whether it is worth to
    let it grow, or to move others for it: free room is used although nobody knows for how long."""
    remaining_exponent: float = 0.1
    """How strongly shorter jobs come first if the remaining work is known, before they are late: value ~ remaining **
    -exponent."""
    attained_exponent: float = 0.05
    """The same with the time already received if it is not known (a much weaker signal)."""
    lateness_exponent: float = 0.5
    """How strongly jobs come first that are late for their length, if the remaining work is known: value ~ ((age +
    remaining) / remaining) ** exponent."""
    unknown_lateness_s: float = 10800.0
    """If it is not known, the value is twice what it was at this age, or at the time already received if that is
    longer."""
    patience: float = 2.0
    """A larger job that has waited this many times its own expected duration is not passed by smaller ones of
    equal right any longer: it gets a reservation. People accept to be passed for about as long as they asked
    for; 0: no such reservations. With the objective makespan this holds against jobs that came later: it has waited so
    many times what the list still takes, and so long newer ones came. A job larger than its tenant's share waits for less
    where that makes its time the share (`search/turns.py`)."""
    expected_run_s: float = 3600.0
    """Least expected duration of a job whose length is unknown. More is expected where the jobs that run now have
    run for longer on average."""
    work_share: float = 0.95
    """A tenant whose running jobs do less than this part of the work that it is entitled to may exchange places with
    jobs of tenants that are better off (`search/exchange.py`). Below 1, so that the last exchange is not sought for
    ever; 0: none for a share."""
    reservations: int = 8
    """The most reservations at a time; at most half of them for patience alone. Each keeps nodes from jobs that
    would not be gone in time."""
    solver: bool = True
    """Improve the plan with the mixed-integer solver if the certified gap is above 1 % and there are at most
    20,000 variables (`milp.py`)."""
    solver_seconds: float | None = 2.0
    """Time limit of the solver; None: it stops by gap and nodes only, so that a seed gives the same bytes."""
    solver_nodes: int = 2000
    """Limit on its branch-and-bound nodes."""

    @property
    def hash(self) -> str:
        """Short digest of all settings."""
        text = json.dumps(
            {name: str(getattr(self, name)) for name in sorted(type(self).__dataclass_fields__)},
            sort_keys=True,
        )
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> Json:
        return encode(self)

    @classmethod
    def from_json(cls, data: Json) -> Policy:
        return decode(cls, data)


@dataclass(frozen=True, slots=True)
class Price:
    """What one accelerator-hour of a type costs in value (the optimizer's dual)."""

    accelerator: str
    price: float


@dataclass(frozen=True, slots=True)
class PowerPrice:
    """What one watt-hour costs on a power domain, in value (`candidates/watt_market.py`); 0: watts hold nobody back."""

    domain: str
    price: float
    work: float = 0.0
    """The same in work: unit-hours, in which entitlements are counted, per watt-hour."""


@dataclass(frozen=True, slots=True)
class SharePrice:
    """What a request for a share costs where it leaves a part of an accelerator less useful: in thousandths of
    an accelerator, as the share itself."""

    share_m: int
    price: float


PUT_OFF_S = 600.0
"""A promised job that could not wait so long any more takes its share."""


class DeadlineAnswer(StrEnum):
    """What is said of a deadline."""

    KEEPS = "Keeps"
    """Promised, and kept as things are."""
    LATE = "Late"
    """Promised, and cannot be kept any more."""
    OUT_OF_REACH = "OutOfReach"
    """Not promised: alone in the cluster it would be late."""
    CROWDED = "Crowded"
    """Not promised: it would break promises made before."""
    NOT_TRIED = "NotTried"
    """Not promised yet: many have no promise, and earlier deadlines are looked at first."""


@dataclass(frozen=True, slots=True)
class DeadlineShare:
    """What a job with a deadline needs (`candidates/deadlines.py`)."""

    job: JobId
    answer: DeadlineAnswer
    accelerator: str = ""
    """The type that it needs."""
    accelerators_m: int = 0
    """How many of it from now on, in thousandths; 0: others come first."""
    speed: float = 0.0
    """Work per second with these."""
    ends_s: float | None = None
    """When the job is done with its share; of one that is out of reach: when it would be done alone. None: not known."""
    slack_s: float = 0.0
    """Seconds from then to the deadline."""
    breaks: tuple[str, ...] = ()
    """Crowded: the jobs of its tenant whose promises it would break (namespace/name)."""

    @property
    def promised(self) -> bool:
        return self.answer in (DeadlineAnswer.KEEPS, DeadlineAnswer.LATE)

    def urgent(self, now: float) -> bool:
        """Whether the job must have its share now: were it put off for as long as it runs, or for `PUT_OFF_S`, it would be late."""
        if not self.promised or not self.accelerators_m or self.ends_s is None:
            return False
        return self.slack_s < max(self.ends_s - now, PUT_OFF_S)


@dataclass(frozen=True, slots=True)
class Plan:
    """A round's decision."""

    id: str
    """Digest of the snapshot, the policy and `now`; of an answer to an event: of the plan before and the
    event."""
    at_s: float
    actions: tuple[Action, ...] = ()
    waiting: tuple[WaitingRecord, ...] = ()
    prices: tuple[Price, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    """Places that are collected for waiting jobs which are first in line, in order of precedence; then those that
    jobs have in this plan and get when others have left."""
    share_prices: tuple[SharePrice, ...] = ()
    """Prices at which the free parts of shared accelerators are valued (`fragment_prices.py`), if jobs
    request shares."""
    power_prices: tuple[PowerPrice, ...] = ()
    """Of the power domains that limit, by name; as of `priced_at_s`."""
    deadlines: tuple[DeadlineShare, ...] = ()
    """What jobs with deadlines need, by job; those of unknown length are left out."""
    value: float = 0.0
    bound: float = 0.0
    """No plan is worth more than this (relaxed problem) in which elastic jobs have the sizes of their candidates;
    1 - value / bound is the certified gap."""
    policy: Policy = field(default_factory=Policy)
    """The policy it was made under; answers to events (`react`) keep it."""
    priced_at_s: float = 0.0
    """When the last full plan was made: values, prices and the bound are of this moment."""
    solver_gain: float = 0.0
    """Value per hour that the mixed-integer solver added, less what its moves cost."""
    solver_error: str = ""
    """Why the solver could not be used; empty otherwise. The plan is valid without it."""

    @property
    def gap(self) -> float:
        return 0.0 if self.bound <= 0 else max(0.0, 1.0 - self.value / self.bound)

    def record(self, job: JobId) -> WaitingRecord | None:
        """The waiting record of a job; None: it does not wait."""
        return next((record for record in self.waiting if record.job == job), None)

    def to_json(self) -> Json:
        return encode(self)

    @classmethod
    def from_json(cls, data: Json) -> Plan:
        return decode(cls, data)
