"""Starting waiting jobs where replicas sleep (`Job.yields`).

A sleeping replica holds its place only while nobody waits for one. What does not fit in free room is tried again as if no
replica slept, by the same rules: rights, quotas, reservations. This comes before anything that stops or moves running
work, and once more at the end, then with that: a right may need both. Then the replicas whose places are free get them
back, those of the fewest accelerators first, and the others are stopped; a place that is collected for a job is not
free. They lose no work, count as no disruption, and are given no other place. Who is stopped by a right at the end starts
elsewhere in the same plan, if there is room.
"""

from __future__ import annotations

from .preemption import reclaim
from .round import Round
from .start import start_waiting
from .state import Assignment


def take_from_sleepers(round_: Round, blocked: list[Assignment], last: bool = False) -> list[Assignment]:
    """Start some of the blocked jobs; returns those that are left.

    Args:
        last: the round ends with this: rights may be used, too.
    """
    sleepers = [assignment for _, assignment in sorted(round_.state.yielding.items())]
    waiting = [assignment for assignment in blocked if assignment.placement is None]
    if not sleepers or not (waiting or last):
        return blocked
    for assignment in sleepers:
        round_.clear(assignment)
    left = start_waiting(round_, waiting)
    if last and reclaim(round_, [assignment for assignment in left if assignment.placement is None]):
        round_.sync_holds()
        known = {assignment.job.id for assignment in left}
        stopped = [one for one in round_.stopped() if one.job.id not in known]
        left = start_waiting(round_, [*(one for one in left if one.placement is None), *stopped])
    _give_back(round_, sleepers)
    return [assignment for assignment in left if assignment.placement is None]


def _give_back(round_: Round, sleepers: list[Assignment]) -> None:
    """Give sleeping replicas their places, where these are free and within what their tenants may have more of."""
    started = {assignment.job.tenant for assignment in round_.changed if assignment.placement is not None}
    homes = [(assignment, *round_.home(assignment)) for assignment in sleepers]
    for assignment, place, candidate, started_at_s, waits in sorted(
        homes, key=lambda home: (0 if home[1] is None else home[1].accelerators_m, home[0].job.id)
    ):
        tenant = assignment.job.tenant
        if place is None or not round_.fits(place):
            continue
        if tenant not in started or not round_.holdings.refusal(
            tenant, place.accelerator, place.accelerators_m
        ):
            round_.restore(assignment, place, candidate, started_at_s, waits)
