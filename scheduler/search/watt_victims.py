"""Who is stopped for watts, and when that is not worth a search.

The search for victims makes room on nodes and does not know watts. Where domains are far above what they carry most claims
fail for watts alone, so two bounds come first: what would be left if all jobs of the pool went, which costs next to nothing,
and what would be left without those who may be stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from operator import itemgetter

from ..candidates.candidate import Candidate
from ..model.snapshot import JobId
from ..placement.feeds import LATER, NOW
from .claim import Claim
from .round import Round
from .state import Assignment
from .victim_groups import Victim, VictimGroup


def could_carry(claim: Claim) -> bool:
    """Whether the power domains might carry the claim if all jobs of its pool went, as all whom it may stop are there."""
    feeds = claim.round.cluster.feeds
    if feeds is None or not claim.candidate.draw_w:
        return True
    drawn = feeds.drawn(claim.candidate.pool)
    return _fits(claim, [left + more for left, more in zip(feeds.most_left(), drawn, strict=True)])


def carried_without(claim: Claim, groups: Iterable[VictimGroup]) -> bool:
    """Whether they might carry it if all of these victims went."""
    feeds = claim.round.cluster.feeds
    if feeds is None or not claim.candidate.draw_w:
        return True
    left = feeds.most_left()
    for group in groups:
        for number, watts in group.gives_back.items():
            left[number] += watts
    return _fits(claim, left)


def _fits(claim: Claim, left: list[int]) -> bool:
    """Whether the pods fit into these watts of the domains, room on nodes aside; its own place is given back."""
    feeds, place, candidate = claim.round.cluster.feeds, claim.assignment.placement, claim.candidate
    assert feeds is not None
    for number, watts in feeds.asked(place).items() if place is not None else ():
        left[number] += watts
    pods, watts = candidate.pods, candidate.draw_w
    for chain in claim.nodes.chains:
        if not chain:
            return True
        more = max(min(left[number] // watts for number in chain), 0)
        if more >= pods:
            return True
        pods -= more
        for number in chain:
            left[number] -= more * watts
    return False


def for_watts(
    round_: Round,
    assignment: Assignment,
    candidate: Candidate,
    eligible: Sequence[VictimGroup],
    gone: Set[JobId],
) -> list[Victim]:
    """More victims for a job that has room and lacks only watts, which any job on its power domains gives back: the
    least cost per watt first. None, if they do not give enough. (The search for room does not know watts.)"""
    feeds, later = round_.cluster.feeds, round_.cluster.is_releasing(candidate.pool)
    place = round_.cluster.nearest(assignment.job, candidate, later) if candidate.draw_w else None
    if feeds is None or place is None:
        return []
    short = feeds.missing(place, LATER if later else NOW)
    victims = {victim.id: victim for group in eligible for victim in group.standing}
    gives = [
        (victim.cost / sum(gives.values()), victim.id, gives)
        for victim in victims.values()
        if victim.id not in gone and (gives := feeds.given_back(victim.placement, short))
    ]
    found: list[Victim] = []
    for _, victim_id, back in sorted(gives, key=itemgetter(0, 1)):
        if any(short[number] > 0 for number in back):
            found.append(victims[victim_id])
            for number, watts in back.items():
                short[number] -= watts
    return found if all(watts <= 0 for watts in short.values()) else []
