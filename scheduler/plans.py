"""What a decision is: actions, one record per waiting job, and the policy that shaped them.

A plan is a list of guarded actions. Each names what it assumed (`Action.assumed`); `stale` (apply.py) says
whether that still holds. Applying an action twice is harmless: the second time the job is already as the
action wants it. Carry actions out in the order given: releases come before what they make room for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .codec import Json, decode, encode
from .types import JobId, Placement


class ActionKind(StrEnum):
    """What to do with a job."""

    START = "start"
    GROW = "grow"
    SHRINK = "shrink"
    MOVE = "move"
    PREEMPT = "preempt"


class Objective(StrEnum):
    """What a cluster wants most."""

    FAIRNESS = "fairness"
    MAKESPAN = "makespan"
    COST = "cost"
    FINISH_TIME_FAIRNESS = "finish-time-fairness"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do.

    `start`, `grow`, `shrink` and `move` carry the placement wanted in `to`. All but `start` mean: save,
    stop, release, and (except `preempt`) start again as `to` says once the old pods are gone.
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


class WaitCode(StrEnum):
    """Why a job waits. Values never change."""

    NO_ACCELERATOR = "NoMatchingAccelerator"
    NO_POOL = "NoPoolForTenant"
    DOES_NOT_FIT = "DoesNotFitAnyMode"
    NODE_TOO_SMALL = "NoNodeLargeEnough"
    UNKNOWN_TENANT = "NoTenant"
    CEILING = "QuotaCeiling"
    BORROW_LIMIT = "BorrowingLimit"
    CAPACITY = "InsufficientCapacity"
    FRAGMENTED = "Fragmented"
    FAIR_SHARE = "FairShare"
    PRIORITY = "LowerPriority"
    PREEMPTING = "WaitingForPreemption"
    RELEASING = "Releasing"


NEVER = frozenset(
    {
        WaitCode.NO_ACCELERATOR,
        WaitCode.NO_POOL,
        WaitCode.DOES_NOT_FIT,
        WaitCode.NODE_TOO_SMALL,
        WaitCode.UNKNOWN_TENANT,
    }
)
"""Codes of jobs that cannot start however long they wait, unless something is changed."""


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
    """"pods", "accelerator", "mode", "quota", "priority", "memory" or "cpu"."""
    current: str
    needed: str


@dataclass(frozen=True, slots=True)
class WaitingRecord:
    """Why one job waits, recomputed in every round. Amounts are thousandths of an accelerator (or CPU
    millicores, MiB when `resource` says "cpu", "memory")."""

    job: JobId
    code: WaitCode
    resource: str
    """The accelerator key, "*", "cpu", "memory" or "host-memory"."""
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
    """What an accelerator-hour of the resource costs in this round, in value."""
    offer: float = 0.0
    """What this job offers for it."""
    changes: tuple[Change, ...] = ()
    waited_s: float = 0.0
    position: int = 0
    """1: next among the waiting jobs of its tenant."""
    round: str = ""
    """The plan (`Plan.id`) this belongs to."""

    def stamped(self, job: JobId, offer: float, position: int, round_: str, waited_s: float) -> WaitingRecord:
        """The same for one job of one round. (`dataclasses.replace` takes thrice as long, and an event that stops
        five hundred jobs makes as many records.)"""
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
        )


MARKED = frozenset({WaitCode.PREEMPTING, WaitCode.RELEASING, WaitCode.CEILING, WaitCode.BORROW_LIMIT})
"""Codes whose records an answer to an event goes by."""


@dataclass(frozen=True, slots=True)
class Known:
    """The records of a plan, by job; `marked`: those with a code of `MARKED`."""

    records: tuple[WaitingRecord, ...]
    by_job: Mapping[JobId, WaitingRecord]
    marked: Mapping[JobId, WaitingRecord]

    @classmethod
    def of(cls, records: tuple[WaitingRecord, ...]) -> Known:
        """Looks at all of them."""
        by_job = {record.job: record for record in records}
        return cls(records, by_job, {job: record for job, record in by_job.items() if record.code in MARKED})


@dataclass(frozen=True, slots=True)
class Policy:
    """How a cluster wants to decide. Defaults are the one committed policy; `hash` stands in every result."""

    objective: Objective = Objective.FAIRNESS
    usage_half_life_s: float = 7 * 86400.0
    """Usage older than this counts half: a week's use matters, and is forgiven."""
    guarantee_reclaim_s: float = 300.0
    """Within this time, from when a job began to wait, borrowed capacity is back with the tenant it is guaranteed
    to: decided in the first half, carried out in the second."""
    min_run_s: float = 300.0
    """A started job is not stopped or moved before it has run this long, but for a guarantee whose deadline needs it;
    a job that was stopped stands behind its equals for as long."""
    max_preemptions: int = 5
    """After so many (a shrink counts) a job is only preempted to give back a guarantee, or for a job of its own
    tenant with a higher priority."""
    move_gain_factor: float = 2.0
    """A running job moves only if the forecast gain is at least this many times the cost."""
    churn: float = 0.05
    """At most this part of all jobs is disturbed for fairness, priority or speed within `min_run_s` (at least
    eight). Taking back a guarantee is not bounded, but counts."""
    growth_factor: int = 2
    """A running elastic job grows at most by this factor in one round."""
    remaining_exponent: float = 0.25
    """How much shorter jobs come first where the remaining work is known: value ~ remaining ** -exponent."""
    attained_exponent: float = 0.05
    """The same with the time already received, where it is not known (a much weaker sign)."""
    aging_s: float = 72000.0
    """After waiting and running for so long in all, a job's value has doubled."""
    solver: bool = True
    """Improve the plan with the mixed-integer solver where the certified gap is above 1 % and there are at most
    20,000 variables (`optimum.py`)."""
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
class SharePrice:
    """What a request for a share costs where it leaves a part of an accelerator less useful: in thousandths of
    an accelerator, as the share itself."""

    share_m: int
    price: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A round's decision."""

    id: str
    """Digest of the snapshot, the policy and `now`; of an answer to an event: of the plan before and the event."""
    version: int
    """The snapshot's version."""
    at_s: float
    actions: tuple[Action, ...] = ()
    waiting: tuple[WaitingRecord, ...] = ()
    prices: tuple[Price, ...] = ()
    share_prices: tuple[SharePrice, ...] = ()
    """By which the free parts of shared accelerators are valued (`holes.py`), where jobs ask for such."""
    value: float = 0.0
    bound: float = 0.0
    """No plan is worth more than this (relaxed problem); 1 - value / bound is the certified gap."""
    policy: Policy = field(default_factory=Policy)
    """Under which it was made; answers to events (`react`) go on under it."""
    priced_at_s: float = 0.0
    """When the last full plan was made: values and prices are of this moment, and so is the bound."""
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
