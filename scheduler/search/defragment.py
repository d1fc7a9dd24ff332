"""Room for a job that fits by count and not by place: the cheapest moves of others.

A job that is still blocked when rights and values have been served may find enough accelerators free, but not
together. Then running jobs move to where there is room for them, of whatever tenant: they lose a restart and the
work since their last checkpoint, and keep their size and speed. The moves are made if

    all of them together lose, times `Policy.move_gain_factor`, less than the blocked job can do in the time that it
    has left (of unknown length: `Policy.unknown_length_s`), and
    the round may still disrupt as many jobs (`Policy.churn`).

Who moves: training jobs that may be stopped and have run `Policy.min_run_s`, not of a higher priority of the same
tenant, and not moved or preempted for others `Policy.max_preemptions` times already: a move for another job counts as
a preemption. Each preemption that a job had already adds once more what it loses to its cost, so that it is not the
same one every time. Each must have a place before the moves are kept; a job that finds none is left out and the search is
repeated. Without these moves two scenarios of `benchmarks/scheduling` fail.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..candidates.candidate import Candidate
from .claim import Claim, hours_left
from .proposal import propose
from .queues import request_of
from .round import Round
from .rules import ROOM, eligible
from .state import Assignment
from .victim_groups import VictimGroup

ATTEMPTS = 8
"""Requests for which moves are searched in one pass; equal requests count once."""
RETRIES = 4
"""Searches for one request, each without the jobs that found no other place before."""


def defragment(round_: Round, blocked: list[Assignment]) -> bool:
    """Start blocked jobs in room that moves make; whether anything changed."""
    changed, attempts = False, 0
    hopeless: set[tuple[object, ...]] = set()
    free = {name: pool.free_m() for name, pool in round_.cluster.pools.items()} if blocked else {}
    for assignment in blocked:
        if attempts >= ATTEMPTS or not round_.can_disrupt():
            break
        job = assignment.job
        if assignment.placement is not None:
            continue
        key = job.tenant, round_.priority(job), request_of(assignment)
        if key in hopeless:
            continue
        for candidate in _scattered(round_, assignment, free):
            attempts += 1
            if _make_room(round_, assignment, candidate):
                changed = True
                free = {name: pool.free_m() for name, pool in round_.cluster.pools.items()}
                break
        if assignment.placement is None:
            hopeless.add(key)
    return changed


def _scattered(round_: Round, assignment: Assignment, free: Mapping[str, int]) -> list[Candidate]:
    """Candidates for which enough accelerators are free (thousandths, by pool), most profit first."""
    job = assignment.job
    return [
        row.candidate
        for row in round_.ranked(assignment)
        if row.candidate.accelerators_m <= free[row.candidate.pool]
        and round_.allows(job, row.candidate)
        and round_.find(job, row.candidate) is None
        and round_.pods_if_empty(job, row.candidate) >= row.candidate.pods
    ]


def _make_room(round_: Round, assignment: Assignment, candidate: Candidate) -> bool:
    """Start the job in the place of jobs that move elsewhere; False (and no change) if that fails."""
    claim = Claim(round_, assignment, candidate, worth=_worth(round_, assignment, candidate))
    movers = eligible(claim, ROOM)
    for _ in range(RETRIES):
        done = propose(claim, (ROOM,), [VictimGroup(movers, claim.nodes)] if movers else [])
        for mover in done.moved:
            round_.gave_way[mover] = assignment.job.id
        if done or done.stuck is None:
            return done.accepted
        movers = [victim for victim in movers if victim.id != done.stuck]
    return False


def _worth(round_: Round, assignment: Assignment, candidate: Candidate) -> float:
    """The most work that moves may lose, in accelerator-seconds times exchange rate."""
    hours, policy = hours_left(assignment, candidate), round_.policy
    if assignment.job.remaining_work is None:
        hours = max(hours, policy.unknown_length_s / 3600)
    units = round_.holdings.units_of(candidate.accelerator, candidate.accelerators_m)
    return units * 3600 * hours / policy.move_gain_factor
