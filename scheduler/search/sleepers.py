"""Starting waiting jobs where replicas sleep (`Job.yields`).

A sleeping replica holds its place only while nobody waits for one. What did not fit otherwise is tried again as if no
replica slept, by the same rules: rights, quotas, reservations. Then the replicas whose places are still free get them
back, those of the fewest accelerators first, and the others are stopped. They lose no work and count as no disruption.
"""

from __future__ import annotations

from .preemption import reclaim
from .round import Round, place_of
from .start import start_waiting
from .state import Assignment


def take_from_sleepers(round_: Round, blocked: list[Assignment]) -> list[Assignment]:
    """Start some of the blocked jobs; returns those that are left."""
    waiting = [assignment for assignment in blocked if assignment.placement is None]
    aside = [
        (assignment, place_of(assignment))
        for _, assignment in sorted(round_.state.yielding.items())
        if assignment.placement is not None
    ]
    if not waiting or not aside:
        return blocked
    for assignment, _ in aside:
        round_.clear(assignment)
    left = start_waiting(round_, waiting)
    if reclaim(round_, [assignment for assignment in left if assignment.placement is None]):
        round_.sync_holds()
    started = {assignment.job.tenant for assignment in waiting if assignment.placement is not None}
    aside.sort(key=lambda item: (_size_m(item[0]), item[0].job.id))
    for assignment, (placement, candidate, started_at_s, waits) in aside:
        assert placement is not None
        tenant = assignment.job.tenant
        over = tenant in started and round_.holdings.refusal(
            tenant, placement.accelerator, placement.accelerators_m
        )
        if not over and round_.fits(placement):
            round_.restore(assignment, placement, candidate, started_at_s, waits)
    return [assignment for assignment in left if assignment.placement is None]


def _size_m(assignment: Assignment) -> int:
    run = assignment.job.run
    return 0 if run is None else run.placement.accelerators_m
