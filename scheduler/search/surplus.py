"""How much may be taken of a tenant or user: what it holds above its guarantee, its share, or what a deadline needs.

The functions of `rules.Limit` choose among the jobs that a rule allows, cheapest first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import ge

from ..candidates.candidate import Candidate
from ..fairness.quota import EPS, Right
from .claim import Claim
from .elastic import partial_victim
from .round import Round
from .state import Assignment
from .victim_groups import Part, Victim

ENOUGH = 0.999
"""Of the speed of a deadline's share: sums of floating-point numbers differ."""


def lent(claim: Claim, tenant: str, victims: Iterable[Victim]) -> list[Victim]:
    """Of what the tenant holds above its guarantee."""
    return _surplus(claim, tenant, victims, Right.GUARANTEED)


def above_share(claim: Claim, tenant: str, victims: Iterable[Victim]) -> list[Victim]:
    """Of what the tenant holds above its fair share."""
    return _surplus(claim, tenant, victims, Right.ENTITLED)


def within_gap(claim: Claim, tenant: str, victims: Iterable[Victim]) -> Iterator[Victim]:
    """Jobs that each hold no more than `gap_m`; of larger ones, the part that may be taken."""
    most_m = gap_m(claim, tenant)
    for victim in victims if most_m > 0 else ():
        if victim.amount_m <= most_m:
            yield victim
        elif victim.may_shrink:
            some = partial_victim(claim.round, victim.assignment, partial(ge, most_m))
            if some is not None:
                yield Victim(victim.assignment, victim.cost, claim.nodes, some)


def gap_m(claim: Claim, tenant: str) -> int:
    """What a tenant above its share may give, so that what it and the claim's tenant hold, in parts of their shares, lies
    between what they held: it keeps more than the claim's tenant has, by `Policy.least_rise` of what the job brings that
    one, and has now at least what that one comes to. Guarantees are not touched."""
    round_, kind = claim.round, claim.candidate.accelerator
    least, most = gap_of(claim)
    if round_.holdings.part_of_share(tenant) < max(most, 1 + EPS):
        return 0
    above_m = spare_m(round_, tenant, kind, Right.ENTITLED, least)
    return min(above_m, _outside_guarantee_m(round_, tenant, kind) + 1)


def gap_of(claim: Claim) -> tuple[float, float]:
    """The least part of its share that a tenant must keep, and the least that it must have, to give way by `within_gap`."""
    holdings, tenant, candidate = claim.round.holdings, claim.job.tenant, claim.candidate
    now = holdings.part_of_share(tenant)
    then = holdings.part_of_share(tenant, candidate.accelerator, candidate.accelerators_m)
    return now + claim.round.policy.least_rise * (then - now), then


def _surplus(claim: Claim, tenant: str, victims: Iterable[Victim], right: Right) -> list[Victim]:
    """Jobs first whose users keep their share of the tenant's without them; of the last one, the part that may be
    taken."""
    round_, kind = claim.round, claim.candidate.accelerator
    found: list[Victim] = []
    spare, taken = spare_m(round_, tenant, kind, right), 0
    most = min(spare - 1, _outside_guarantee_m(round_, tenant, kind))
    if most < 0:
        return found
    for victim in _above_first(round_, tenant, victims):
        if taken > most:
            break
        after = taken + victim.amount_m
        if after <= spare:
            found.append(victim)
            taken = after
        elif victim.may_shrink:
            some = partial_victim(round_, victim.assignment, partial(ge, spare - taken))
            if some is not None:
                found.append(Victim(victim.assignment, victim.cost, claim.nodes, some))
                taken += some.freed_m
    return found


def first_lent(claim: Claim, tenant: str, victims: Iterable[Victim]) -> Iterator[Victim]:
    """The first of these without which the tenant is back inside its guarantee."""
    open_, taken = _outside_guarantee_m(claim.round, tenant, claim.candidate.accelerator), 0
    for victim in victims:
        if taken > open_:
            return
        yield victim
        taken += victim.amount_m


def first_lent_together(claim: Claim, tenant: str, victims: Iterable[Victim]) -> Iterator[Victim]:
    """The same of those that stand on the nodes where most can be taken of all tenants."""
    nodes, ranks = claim.nodes, claim.ranks
    if not ranks:
        for i, taken_m in _taken_of_nodes(claim).items():
            ranks[i] = -(taken_m + nodes.free_later[i][nodes.key]), i

    def together(victim: Victim) -> tuple[int, int]:
        return min(map(ranks.__getitem__, victim.frees))

    return first_lent(claim, tenant, sorted(victims, key=together))


def _taken_of_nodes(claim: Claim) -> dict[int, int]:
    """What jobs outside their tenants' guarantees hold of each node, by its index."""
    round_, nodes, gain = claim.round, claim.nodes, dict[int, int]()
    for tenant in round_.holdings.tenants:
        if tenant != claim.job.tenant and not round_.holdings.inside_guarantee(
            tenant, claim.candidate.accelerator
        ):
            for victim in round_.stoppable.due(claim.candidate.pool, tenant):
                for i, frees in victim.frees.items():
                    gain[i] = gain.get(i, 0) + frees[nodes.key]
    return gain


def above_user_share(claim: Claim, _: str, victims: Iterable[Victim]) -> Iterator[Victim]:
    """What users hold above their shares of the tenant's."""
    return filter(_keeping_user_shares(claim.round), victims)


def own_or_above_user_share(claim: Claim, _: str, victims: Iterable[Victim]) -> Iterator[Victim]:
    """Jobs of the same user, and what other users hold above their shares of the tenant's."""
    others = _keeping_user_shares(claim.round)
    return (one for one in victims if one.assignment.job.user == claim.job.user or others(one))


def not_needed_for_deadlines(claim: Claim, _: str, victims: Iterable[Victim]) -> Iterator[Victim]:
    """Jobs that no deadline needs now, and of those that one does what they hold above their share."""
    urgent = claim.round.state.candidates.urgent
    for victim in victims:
        share, now = urgent.get(victim.id), victim.assignment.candidate
        if share is None:
            yield victim
        elif now is not None and now.speed >= ENOUGH * share.speed:
            part = _above_speed(claim.round, victim.assignment, now, ENOUGH * share.speed)
            if part is not None:
                yield Victim(victim.assignment, victim.cost, victim.nodes, part)


def _above_speed(round_: Round, assignment: Assignment, now: Candidate, speed: float) -> Part | None:
    """What a job holds above the fewest pods with which it is as fast as this."""
    for pods in range(assignment.job.min_pods, now.pods):
        smaller = round_.sized(assignment, now, pods)
        if smaller is not None and smaller.speed >= speed:
            most_m = (now.pods - pods) * now.per_pod.accelerators_m
            return partial_victim(round_, assignment, partial(ge, most_m))
    return None


def spare_m(round_: Round, tenant: str, accelerator: str, right: Right, part: float = 1.0) -> int:
    """What may be taken of a tenant by another's right: by a fair share, what it holds above its own, or above this part
    of it; negative: nothing."""
    holdings = round_.holdings

    def find() -> int:
        if holdings.inside_guarantee(tenant, accelerator):
            return -1
        held = holdings.held(tenant, accelerator)
        if right is not Right.ENTITLED:
            return held
        return _most(lambda m: holdings.keeps_share_without(tenant, accelerator, m, part), held)

    return round_.cached(("spare", tenant, accelerator, right, part), tenant, find)


def _outside_guarantee_m(round_: Round, tenant: str, accelerator: str) -> int:
    """What the tenant holds of the type without being inside its guarantee, in thousandths."""
    holdings = round_.holdings

    def find() -> int:
        held = holdings.held(tenant, accelerator)
        return _most(lambda m: not holdings.inside_guarantee(tenant, accelerator, -m), held)

    return round_.cached(("outside", tenant, accelerator), tenant, find)


def _most(holds: Callable[[int], bool], most: int) -> int:
    """The largest amount up to `most` for which a monotone condition holds; -1: for none."""
    if holds(most):
        return most
    return bisect_left(range(most), True, key=lambda amount: not holds(amount)) - 1


def _above_first(round_: Round, tenant: str, victims: Iterable[Victim]) -> Iterable[Victim]:
    """Sort jobs first whose users keep their share of the tenant's without them."""
    if not round_.holdings.has_several_users(tenant):
        return victims
    keeps = _keeping_user_shares(round_)
    return sorted(victims, key=lambda victim: not keeps(victim))


def _keeping_user_shares(round_: Round) -> Callable[[Victim], bool]:
    """Whether the job's user keeps its share without this job and those that were taken before; if so it counts as taken.
    All victims are of one pool."""
    taken: dict[str, int] = {}

    def keeps(victim: Victim) -> bool:
        job, place = victim.assignment.job, victim.assignment.placement
        assert place is not None
        amount_m = taken.get(job.user, 0) + place.accelerators_m
        if not round_.holdings.user_keeps_share_without(job.tenant, job.user, place.accelerator, amount_m):
            return False
        taken[job.user] = amount_m
        return True

    return keeps
