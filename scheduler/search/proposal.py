"""One proposal: a job is given the place of others, with all that follows, and everything is undone unless it is accepted.

`rules.py` says who may give way and what becomes of them; this module carries a rule out. First the cheapest victims that
make room are chosen (`victims.py`) and stopped; elastic ones keep the pods that are not needed (`elastic.py`). Then
those who need another place look for one. A rule that is no right is kept only if it gains enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..candidates.candidate import Candidate
from ..fairness.quota import EPS
from ..model.snapshot import Job, JobId, Placement
from ..placement.pool import PoolNodes
from .claim import Claim, offered
from .elastic import keep_pods
from .holds import lifted
from .round import Round, Trial
from .rules import LINK, VALUE, Displaced, Rule, groups_of
from .start import start_waiting
from .state import Assignment
from .victim_groups import Victim, VictimGroup
from .victims import choose_victims
from .watt_victims import carried_without, could_carry, for_watts


@dataclass(frozen=True, slots=True)
class Proposal:
    """What became of a proposal; true if it was accepted."""

    accepted: bool
    moved: tuple[JobId, ...] = ()
    """Jobs that changed their place for it."""
    stuck: JobId | None = None
    """A job for which there was no other place, and which needed one."""

    def __bool__(self) -> bool:
        return self.accepted


_REFUSED = Proposal(False)


def propose(
    claim: Claim,
    rules: Sequence[Rule],
    groups: Sequence[VictimGroup] | None = None,
    *,
    planned: bool = False,
    inside: frozenset[int] | None = None,
) -> Proposal:
    """Give the job the place of those who give way by these rules; nothing is changed if that is not accepted.

    Args:
        rules: rules that are carried out alike; their victims are searched together.
        groups: these victims, if they are known.
        planned: the rights may also take places that were given in this round.
        inside: indices of the only nodes that the job may use; None: all, less what is collected for others.
    """
    round_, rule = claim.round, rules[0]
    if groups is None:
        groups = groups_of(claim, rules, planned) if could_carry(claim) else ()
    if not groups or not carried_without(claim, groups):
        return _REFUSED
    with round_.trial() as trial:
        round_.clear(claim.assignment)
        applied = (hold for hold in round_.holds.values() if hold.applied)
        with lifted(hold for hold in applied if round_.passes(claim.assignment, hold)):
            if not _take(claim, rule, groups, inside):
                return _REFUSED
        if rule.at_once and claim.assignment.waits_for_release:
            return _REFUSED
        stuck = _DISPLACED[rule.displaced](claim, trial)
        if stuck is not None:
            return Proposal(False, stuck=stuck)
        if rule.gains is not None and not (trial.within_budget and rule.gains(claim, trial)):
            return _REFUSED
        moved = tuple(other.job.id for other, _ in trial.changes() if other is not claim.assignment)
        return Proposal(trial.keep(), moved)


# -- making room ------------------------------------------------------------------------------------------------


def _take(claim: Claim, rule: Rule, groups: Sequence[VictimGroup], inside: frozenset[int] | None) -> bool:
    """Stop the cheapest victims and put the job in their place; with a part of the changes made if that fails."""
    round_, candidate, job = claim.round, claim.candidate, claim.job
    allowed = claim.nodes.open_to(job, candidate)
    if inside is not None:
        allowed = inside if allowed is None else allowed & inside
    elif round_.holds:
        groups = _not_leaving(round_, claim.assignment, claim.nodes, groups)
        if not groups:
            return False
    chosen = cheapest_victims(claim.nodes, job, candidate, groups, rule.thorough, allowed)
    if chosen is None or sum(victim.cost for victim in chosen) > claim.worth + EPS:
        return False
    shrinks = rule.displaced is Displaced.WAIT
    shrunk = _stop(round_, chosen, shrinks)
    if not round_.allows(job, candidate):
        return False
    found = round_.find(job, candidate)
    if found is None and round_.cluster.feeds is not None:
        more = for_watts(round_, claim.assignment, candidate, groups, {victim.id for victim in chosen})
        if more and sum(victim.cost for victim in (*chosen, *more)) <= claim.worth + EPS:
            shrunk += _stop(round_, more, shrinks)
            found = round_.find(job, candidate)
    if found is None:
        return False
    round_.put(claim.assignment, candidate, *found)
    for other, placement in shrunk:
        keep_pods(round_, other, placement)
    return True


def _stop(round_: Round, victims: Iterable[Victim], shrinks: bool) -> list[tuple[Assignment, Placement]]:
    """Take their places, or the parts that were offered. Returns those of which some pods may be kept when the stronger
    job has its place, and where they were."""
    elastic: list[tuple[Assignment, Placement]] = []
    for victim in victims:
        assignment, placement = victim.assignment, victim.assignment.placement
        if shrinks and placement is not None and assignment.can_shrink:
            elastic.append((assignment, placement))
        waits = assignment.waits_for_release
        round_.clear(assignment)
        if victim.part is not None:
            round_.put(assignment, victim.part.candidate, victim.part.stays, release=waits)
    return elastic


def _not_leaving(
    round_: Round, assignment: Assignment, nodes: PoolNodes, groups: Sequence[VictimGroup]
) -> Sequence[VictimGroup]:
    """The victims less those whose room is collected for others: their going makes no room for this job."""
    leaving = {job for hold in round_.barring(assignment, nodes.pool.name) for job in hold.leaving}
    if not leaving:
        return groups
    left = [group.without(leaving) for group in groups]
    return [group for group in left if group.count]


def cheapest_victims(
    nodes: PoolNodes,
    job: Job,
    candidate: Candidate,
    eligible: Sequence[VictimGroup],
    thorough: bool,
    allowed: frozenset[int] | None,
) -> list[Victim] | None:
    """The cheapest victims; for a gang that must stay inside one domain: of the domain where they cost least."""
    depth = job.required_domain
    if depth is None or depth <= 0 or candidate.pods == 1:
        return choose_victims(nodes, candidate, eligible, allowed, thorough)
    best: tuple[float, list[Victim]] | None = None
    for inside in nodes.nodes_by_domain(depth, allowed):
        chosen = choose_victims(nodes, candidate, eligible, inside, thorough)
        if chosen is not None:
            cost = sum(victim.cost for victim in chosen)
            if best is None or cost < best[0]:
                best = cost, chosen
    return None if best is None else best[1]


# -- those who gave way ---------------------------------------------------------------------------------------


def _wait(claim: Claim, trial: Trial) -> None:
    return None


def _chain(claim: Claim, trial: Trial) -> None:
    """Find places for those who lost theirs in the trial: in free room, as other waiting jobs of their tenants, or in the
    place of less valuable ones, who look for a place in turn. Such a chain passes each pool at most once."""
    round_ = claim.round
    for _ in round_.cluster.pools:
        lost = _without_place(trial)
        if not lost:
            return
        tenants = {assignment.job.tenant for assignment in lost}
        start_waiting(
            round_, [assignment for assignment in round_.waiting() if assignment.job.tenant in tenants]
        )
        for assignment in lost:
            any(propose(offer, (LINK,), groups) for offer, groups in offers(round_, assignment))


def _elsewhere(claim: Claim, trial: Trial) -> JobId | None:
    """Give all who lost their place another, the largest first; one that finds none."""
    round_, lost = claim.round, _without_place(trial)
    lost.sort(key=lambda other: (-max(c.accelerators_m for c in other.option.candidates), other.job.id))
    for other in lost:
        if not any(round_.put_now(other, row.candidate) for row in round_.ranked(other)):
            return other.job.id
    return None


def _as_good(claim: Claim, trial: Trial) -> JobId | None:
    """Give all who lost their place one that is no worse and no larger, the largest first; one that finds none."""
    round_ = claim.round
    lost = [
        (other, was, old)
        for other, (was, old, *_) in trial.changes()
        if was is not None and old is not None and other.placement is None
    ]
    lost.sort(key=lambda row: (-row[1].accelerators_m, row[0].job.id))
    for other, _, old in lost:
        same = (old, *(one for one in other.option.candidates if one is not old))
        if not any(
            round_.put_now(other, one)
            for one in same
            if one.value >= old.value and one.accelerators_m <= old.accelerators_m
        ):
            return other.job.id
    return None


def _without_place(trial: Trial) -> list[Assignment]:
    """Jobs that lost their place in the trial and have no other, in order of id."""
    return [other for other, (was, *_) in trial.changes() if was is not None and other.placement is None]


_DISPLACED: dict[Displaced, Callable[[Claim, Trial], JobId | None]] = {
    Displaced.WAIT: _wait,
    Displaced.LATER: _wait,
    Displaced.CHAIN: _chain,
    Displaced.ELSEWHERE: _elsewhere,
    Displaced.AS_GOOD: _as_good,
}


def offers(round_: Round, assignment: Assignment) -> Iterator[tuple[Claim, list[VictimGroup]]]:
    """Ways to put a job where less valuable ones are, best first, if it has no place or a worse one."""
    for ranked in round_.ranked(assignment)[:2]:
        candidate = ranked.candidate
        if ranked.profit <= 0 or candidate is assignment.candidate:
            return
        if round_.holdings.refusal(assignment.job.tenant, candidate.accelerator, 0):
            continue
        claim = Claim(round_, assignment, candidate, worth=offered(round_, assignment, candidate))
        groups = groups_of(claim, (VALUE,))
        if groups:
            yield claim, groups
