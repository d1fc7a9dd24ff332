"""The rules of the search, as data: whose place a job may be given, at what cost, and what becomes of them.

Both jobs are in one pool, and whoever gives way is preemptible. `docs/scheduling-rules.md` has the table for people;
`RULES`, at the end of this module, is the one that decides. `proposal.py` carries every rule out in the same way.

Each rule is a strict order, so no job is stopped for one that it could stop in turn, before it ran for a turn of its own.
By `share`, `gap`, `user`, `value`, `exchange` and `room` nobody is preempted more than `Policy.max_preemptions` times.

`due`: a claim that is still blocked when it is due (`Round.reclaim_due_at_s`) may also take jobs that have only just
started: otherwise a stream of short borrowers could block it for ever. A `turn`: a tenant whose job is larger than its
share has the share in time. It runs for `Policy.rotation_s`, or longer if its restart is more than a twentieth of that,
and waits until turn / (wait + turn) is what its tenant is entitled to of what the job takes. Without turns one scenario of
`benchmarks/scheduling` fails. Smaller jobs give way to such a job by `gap` alone, or to its reservation
(`reservations.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from ..fairness.quota import EPS, Right
from ..model.snapshot import Job, JobKind
from .claim import Claim, lost_value, regret
from .gains import a_share_or_a_gain, more_value, within_its_worth
from .levels import level_of
from .round import Round, Trial
from .state import Assignment
from .surplus import (
    above_share,
    above_user_share,
    first_lent,
    first_lent_together,
    gap_m,
    gap_of,
    lent,
    not_needed_for_deadlines,
    own_or_above_user_share,
    within_gap,
)
from .victim_groups import Victim, VictimGroup


class Whose(Enum):
    """Whose jobs may give way."""

    OWN = "its tenant's"
    OTHERS = "other tenants'"
    ANYBODY = "anybody's"


class Displaced(Enum):
    """What becomes of the jobs that give way."""

    WAIT = "wait, or keep the pods that still fit"
    CHAIN = "look for room, or for the place of a less valuable job, in turn"
    ELSEWHERE = "must have another place"
    AS_GOOD = "must have a place as good"
    LATER = "look for a place when the chain that this is part of goes on"


Asks = Callable[[Claim], bool]
Holds = Callable[[Assignment], bool]
Test = Callable[[Claim], Holds]
Limit = Callable[[Claim, str, Iterable[Victim]], Iterable[Victim]]
Most = Callable[[Claim, str], int]
Cost = Callable[[Claim, Assignment], float]
Losses = Callable[[Round, Assignment], tuple[float, float]]
Gains = Callable[[Claim, Trial], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    name: str
    whose: Whose
    right: Right | None = None
    """The right that the claim has to have; None: any."""
    asks: Asks | None = None
    """What else must hold for the job that asks."""
    tests: tuple[Test, ...] = ()
    """What must hold for each job that gives way."""
    limit: Limit | None = None
    """How much of a tenant or user gives way; None: all."""
    most_m: Most | None = None
    """How much may be taken of a tenant for one claim, in thousandths; None: all that `limit` leaves."""
    cost: Cost | None = None
    """What a job loses that gives way; None: the work that it repeats, in accelerator-seconds times exchange rate."""
    losses: Losses | None = None
    """In place of `cost`, where that is what it loses per hour plus, over the hours that the claim's job has left, what it
    loses once."""
    ran: bool = True
    """Whether who gives way must have run `Policy.min_run_s`."""
    planned: bool = False
    """Whether places given in this round may be taken."""
    guaranteed: bool = False
    """Whether what is inside another tenant's guarantee may be taken: only where it gets a place as good."""
    displaced: Displaced = Displaced.WAIT
    at_once: bool = False
    """Whether the place must be free at once, not when stopped jobs have left: whoever moves on keeps working."""
    thorough: bool = True
    """Whether the search for the cheapest victims of a gang goes on after the first set."""
    gains: Gains | None = None
    """What must be gained; None: nothing, as the claim is a right or a promise."""
    key: Callable[[Claim], object] | None = None
    """On what of the claim the victims of a tenant depend, beside pool and tenant (with `losses`: before their costs are
    known); None: on all of it."""


def victims_of(claim: Claim, rule: Rule, tenant: str, planned: bool = False) -> VictimGroup:
    """The tenant's jobs that may give way to the claim by this rule, with what each of them loses.

    Args:
        planned: include those that were given their place in this round, where the rule may take it.
    """
    planned = planned and rule.planned
    if rule.key is None or rule.losses is not None:
        return VictimGroup(_of_tenant(claim, rule, tenant, planned), claim.nodes)
    key = (rule.name, claim.candidate.pool, tenant, planned, rule.key(claim))
    group = claim.round.stoppable.group(
        key, claim.candidate.pool, tenant, lambda: _of_tenant(claim, rule, tenant, planned)
    )
    if rule.most_m is not None:
        group.most_m = {tenant: rule.most_m(claim, tenant)}
    return group


def _of_tenant(claim: Claim, rule: Rule, tenant: str, planned: bool) -> list[Victim]:
    found: Iterable[Victim] = _allowed(claim, rule, tenant, planned)
    if rule.losses is not None:
        found = _cheap(claim, rule, rule.losses, tenant)
    elif rule.cost is not None:
        costs = ((victim.assignment, rule.cost(claim, victim.assignment)) for victim in found)
        found = (Victim(one, cost, claim.nodes) for one, cost in costs if cost <= claim.worth)
    return list(found if rule.limit is None else rule.limit(claim, tenant, found))


def _allowed(claim: Claim, rule: Rule, tenant: str, planned: bool) -> Iterator[Victim]:
    """Those of the tenant that pass the rule's tests, first those that this round has placed; they are looked for when the
    first one is asked for."""
    own, pool = claim.round.stoppable, claim.candidate.pool
    tests = [test(claim) for test in rule.tests]
    if rule.key is None:
        every = own.ran(pool, tenant) if rule.ran else own.due(pool, tenant)
        yield from [victim for victim in every if all(holds(victim.assignment) for holds in tests)]
        return
    key = rule.name, rule.key(claim)
    if planned:
        yield from own.passing(pool, tenant, key, tests, planned=True)
    yield from own.passing(pool, tenant, key, tests)


def _cheap(claim: Claim, rule: Rule, losses: Losses, tenant: str) -> Iterable[Victim]:
    """Those that pass the tests and lose no more than the claim is worth."""
    assert rule.key is not None
    found = claim.round.stoppable.cheap(
        claim.candidate.pool,
        tenant,
        (rule.name, rule.key(claim)),
        [test(claim) for test in rule.tests],
        partial(losses, claim.round),
        claim.hours,
        claim.worth,
    )
    own = claim.assignment
    return (
        Victim(victim.assignment, cost, claim.nodes) for victim, cost in found if victim.assignment is not own
    )


def eligible(claim: Claim, rule: Rule) -> list[Victim]:
    """All jobs that may give way to the claim by this rule, cheapest first."""
    found = (victim for group in groups_of(claim, (rule,)) for victim in group.standing)
    return sorted(found, key=lambda victim: (victim.cost, victim.id))


def groups_of(claim: Claim, rules: Sequence[Rule], planned: bool = False) -> list[VictimGroup]:
    """The victims of all these rules, one group for each tenant and rule; those without victims are left out."""
    holdings, own, kind = claim.round.holdings, claim.job.tenant, claim.candidate.accelerator
    open_ = [
        rule
        for rule in rules
        if rule.right in (None, claim.right) and (rule.asks is None or rule.asks(claim))
    ]
    found: list[VictimGroup] = []
    for tenant in sorted(holdings.tenants):
        unwanted = Whose.OTHERS if tenant == own else Whose.OWN
        closed = tenant != own and holdings.inside_guarantee(tenant, kind)
        found += [
            victims_of(claim, rule, tenant, planned)
            for rule in open_
            if rule.whose is not unwanted and (rule.guaranteed or not closed)
        ]
    return [group for group in found if group.count]


# -- what must hold for the job that asks ---------------------------------------------------------------------


def _has_its_turn(claim: Claim) -> bool:
    """Whether the job is too large for its tenant's share and has waited so long that a turn now is its share."""
    round_, job, holdings = claim.round, claim.job, claim.round.holdings
    hold, own_turn_s = round_.holds.get(job.id), turn_s(round_, job)
    if job.kind is not JobKind.TRAINING or (hold is not None and hold.start_s <= round_.now + own_turn_s):
        return False
    asked = holdings.units_of(claim.candidate.accelerator, claim.candidate.accelerators_m)
    share = holdings.entitled.get(job.tenant, 0.0)
    if asked <= share + EPS or share <= 0 or holdings.units(job.tenant) > EPS:
        return False
    return round_.now - job.waits_since_s >= own_turn_s * (asked / share - 1)


def _lacks_share(claim: Claim) -> bool:
    """Whether the tenant holds less than its fair share and lacks `Policy.least_rise` of its work or more, and the job has
    no right to a guarantee and does not wait for its turn (`turns.py`). Where it may lack less, jobs of five tenants on two
    types move 1.9 times in place of 1.5, for as much work."""
    round_, tenant, hold = claim.round, claim.job.tenant, claim.round.holds.get(claim.job.id)
    if claim.right is Right.GUARANTEED or (hold is not None and hold.turn_s > round_.now):
        return False
    lacks = round_.holdings.part_of_share(tenant) < 1 - EPS
    return lacks and level_of(round_, tenant) < 1 - round_.policy.least_rise


def _inside_user_share(claim: Claim) -> bool:
    """Whether the tenant has several users, and the job's stays inside its share."""
    job, holdings = claim.job, claim.round.holdings
    return (
        holdings.has_several_users(job.tenant)
        and claim.round.can_disrupt()
        and holdings.user_inside_share(
            job.tenant, job.user, claim.candidate.accelerator, claim.candidate.accelerators_m
        )
    )


def _outranks_one(claim: Claim) -> bool:
    """Whether a job of its tenant has a lower priority."""
    return claim.round.outranks_one(claim.assignment)


def _ours(claim: Claim) -> bool:
    """Whether the job is one of our kinds: a foreign pod has no value to compare."""
    return claim.job.kind is not JobKind.OPAQUE


# -- what must hold for a job that gives way ----------------------------------------------------------------------


def _training(_: Claim) -> Holds:
    return lambda other: other.job.kind is JobKind.TRAINING


def _lower(claim: Claim) -> Holds:
    # The claim's priority is bounded by the tenant's ceiling, and so are those of its tenant's other jobs.
    own = claim.round.priority(claim.job)
    return lambda other: other.job.priority < own


def _equal(claim: Claim) -> Holds:
    priority, own = claim.round.priority, claim.round.priority(claim.job)
    return lambda other: priority(other.job) == own


def _at_most_equal(claim: Claim) -> Holds:
    """Of another tenant, or of no higher priority."""
    priority, tenant, own = claim.round.priority, claim.job.tenant, claim.round.priority(claim.job)
    return lambda other: other.job.tenant != tenant or priority(other.job) <= own


def _again(claim: Claim) -> Holds:
    """Preempted fewer than `Policy.max_preemptions` times."""
    return claim.round.may_be_preempted_again


def _ran_for_share(claim: Claim) -> Holds:
    """It ran so long that a fair share may take it; what this round has placed or shrunk loses no work."""
    round_, since_s = claim.round, claim.round.now - share_run_s(claim.round, claim.job.tenant)
    return lambda other: other.started_at_s <= since_s or other.job.run is None or round_.shrunk(other)


def _ran_for_gap(claim: Claim) -> Holds:
    """It ran so long that a whole job may be taken of a tenant, which then may hold less than its share."""
    round_, since_s = claim.round, claim.round.now - gap_run_s(claim.round, claim.job.tenant)
    return lambda other: other.started_at_s <= since_s or other.job.run is None or round_.shrunk(other)


def _had_its_turn(claim: Claim) -> Holds:
    """It is too large for its tenant's share, and ran for a turn."""
    round_, kind = claim.round, claim.candidate.accelerator

    def holds(other: Assignment) -> bool:
        held_m = 0 if other.placement is None else other.placement.accelerators_m
        share = round_.holdings.entitled.get(other.job.tenant, 0.0)
        too_large = round_.holdings.units_of(kind, held_m) > share + EPS
        return too_large and round_.now - other.started_at_s >= turn_s(round_, other.job)

    return holds


def _known_place(_: Claim) -> Holds:
    """It is on one of its candidates."""
    return lambda other: other.candidate is not None


def _not_patient(claim: Claim) -> Holds:
    """It is no larger job that had waited for its patience."""
    round_, most_m = claim.round, claim.candidate.accelerators_m

    def holds(other: Assignment) -> bool:
        larger = other.placement is not None and other.placement.accelerators_m > most_m
        return not (larger and round_.was_patient(other))

    return holds


def _at_home(claim: Claim) -> Holds:
    return claim.round.may_go


def _runs_there_too(claim: Claim) -> Holds:
    """It could also run on the type where the claim's job is now."""
    now = claim.assignment.candidate
    kind = None if now is None else now.accelerator
    return lambda other: any(one.accelerator == kind for one in other.option.candidates)


def _better_off(claim: Claim) -> Holds:
    """Its tenant does no less work for its share than the claim's, or enough."""
    levels = claim.levels
    assert levels is not None
    least = min(levels.level(claim.job.tenant), claim.round.policy.work_share)
    now = claim.assignment.candidate
    kind = None if now is None else now.accelerator

    def holds(other: Assignment) -> bool:
        return levels.level(other.job.tenant) >= least or any(
            levels.net_gain(other, one) > 0 for one in other.option.candidates if one.accelerator == kind
        )

    return holds


# -- what is lost, and how long ---------------------------------------------------------------------------------


def _regret_and_lost_value(round_: Round, other: Assignment) -> tuple[float, float]:
    assert other.candidate is not None
    return regret(round_, other, other.candidate), lost_value(round_, other)


def _less_work(claim: Claim, other: Assignment) -> float:
    """What it would do less where the claim's job is now, and the work that it repeats, in units over the hours that
    the claim's job has left."""
    now, levels = claim.assignment.candidate, claim.levels
    assert now is not None
    assert levels is not None
    there = (one for one in other.option.candidates if one.accelerator == now.accelerator)
    less = max(0.0, -max(levels.net_gain(other, one) for one in there))
    repeated = claim.round.policy.move_gain_factor * claim.round.lost_units(other) / 3600 / claim.hours
    return less + repeated


def _lost_more_each_time(claim: Claim, other: Assignment) -> float:
    """The work that it repeats, and once more for each preemption that it had."""
    return claim.round.lost_units(other) * (1 + other.job.preemptions)


def share_run_s(round_: Round, tenant: str) -> float:
    """How long jobs of tenants above their share must have run to give way to this tenant's fair share:
    `Policy.min_run_s` if it held nothing when the round began, longer the less it lacks, so that small differences move
    no job often: after `min_run_s` for all, jobs of five tenants with a backlog move 1.4 times as often."""
    return min(gap_run_s(round_, tenant), max(round_.policy.share_run_s, round_.policy.min_run_s))


def gap_run_s(round_: Round, tenant: str) -> float:
    """The same without `Policy.share_run_s` as its limit."""
    held = round_.held_before.get(tenant, 0.0)
    lacks = 1 - held / max(round_.holdings.entitled.get(tenant, 0.0), EPS)
    return math.inf if lacks <= 0 else round_.policy.min_run_s / lacks


def turn_s(round_: Round, job: Job) -> float:
    """How long a job runs before others that are too large for their share have their turn."""
    return max(round_.policy.rotation_s, round_.policy.turn_per_restart * job.restart_s)


# -- the rules ----------------------------------------------------------------------------------------------------


def _own_priority(claim: Claim) -> object:
    return claim.round.priority(claim.job)


def _nothing(_: Claim) -> object:
    return None


GUARANTEE = Rule("guarantee", Whose.OTHERS, Right.GUARANTEED, limit=lent, planned=True, key=_nothing)
DUE = Rule("due", Whose.OTHERS, Right.GUARANTEED, limit=first_lent, ran=False)
TOGETHER = replace(DUE, name="due, together", limit=first_lent_together)
"""The same, first those who stand on the nodes where most can be taken: the first of them may free no whole node."""
SHARE = Rule(
    "share",
    Whose.OTHERS,
    Right.ENTITLED,
    tests=(_again, _ran_for_share),
    limit=above_share,
    planned=True,
    key=lambda claim: share_run_s(claim.round, claim.job.tenant),
)
GAP = replace(
    SHARE,
    name="gap",
    right=None,
    asks=_lacks_share,
    tests=(_again, _ran_for_gap),
    limit=within_gap,
    planned=False,
    most_m=gap_m,
    key=lambda claim: (gap_run_s(claim.round, claim.job.tenant), gap_of(claim)),
)
"""Where no room can be made of what tenants hold above their shares, as their jobs are larger or stand on other nodes."""
TURN = Rule(
    "turn",
    Whose.OTHERS,
    Right.BORROWING,
    asks=_has_its_turn,
    tests=(_training, _had_its_turn),
)
PRIORITY = Rule("priority", Whose.OWN, asks=_outranks_one, tests=(_lower,), planned=True, key=_own_priority)
USER = Rule(
    "user",
    Whose.OWN,
    asks=_inside_user_share,
    tests=(_equal, _again),
    limit=above_user_share,
    planned=True,
    key=_own_priority,
)
DEADLINE = Rule(
    "deadline", Whose.OWN, tests=(_training, _at_most_equal), limit=not_needed_for_deadlines, ran=False
)
RESERVATION = Rule("reservation", Whose.ANYBODY)
"""The jobs that the reservation counts on to leave, or to be stopped at its start: `Hold.victims` names them."""
VALUE = Rule(
    "value",
    Whose.OWN,
    asks=_ours,
    tests=(_known_place, _equal, _training, _again, _not_patient),
    limit=own_or_above_user_share,
    losses=_regret_and_lost_value,
    displaced=Displaced.CHAIN,
    thorough=False,
    gains=more_value,
    key=lambda claim: (claim.round.priority(claim.job), claim.candidate.accelerators_m),
)
LINK = replace(VALUE, name="link", displaced=Displaced.LATER, gains=None)
"""One step of the chain behind a swap by value: the whole chain is accepted or not."""
EXCHANGE = Rule(
    "exchange",
    Whose.OTHERS,
    tests=(_better_off, _runs_there_too, _at_home, _again),
    cost=_less_work,
    displaced=Displaced.ELSEWHERE,
    at_once=True,
    thorough=False,
    gains=a_share_or_a_gain,
)
ROOM = Rule(
    "room",
    Whose.ANYBODY,
    tests=(_at_home, _again, _at_most_equal),
    cost=_lost_more_each_time,
    displaced=Displaced.AS_GOOD,
    at_once=True,
    gains=within_its_worth,
    guaranteed=True,
)
RIGHTS = (GUARANTEE, SHARE, TURN, PRIORITY, USER)
"""Rules by which a blocked job starts; all that it may use are searched together."""
BY_GAP = tuple(GAP if rule is SHARE else rule for rule in RIGHTS)
"""The same, where they make no room."""
RULES = (GUARANTEE, DUE, SHARE, GAP, TURN, PRIORITY, USER, DEADLINE, RESERVATION, VALUE, EXCHANGE, ROOM)
