"""Swaps by value inside one tenant, each carried out to its end before it is kept.

What a job loses if it must leave its place is estimated at the prices (`preemption.regret`): as if it could
have its next best candidate for its price. Whether it can is only known when it looks for a place, which may
be held by a gang that no payment moves. So a swap is carried out on the planning state with all that follows
from it: jobs that lost their place take free room, as do other waiting jobs of the tenant, or else the place
of a job to which it is worth less, and so on. Such a chain passes each pool at most once. It is kept if the
gain is `MARGIN` times the loss, with moves counted at `Policy.move_gain_factor` times their cost; otherwise
it is undone. Without this rule, two ways to use the same accelerators that each look better from the other
would alternate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from ..candidates.candidates import Candidate
from .preemption import MARGIN, by_value, charge, claim, hours_left, preempt
from .round import Round, Trial
from .start import start_waiting
from .state import Assignment
from .victims import VictimGroup

ATTEMPTS = 64
"""Swaps tried for waiting jobs, and swaps undone for running ones, in one pass; the most valuable jobs are
tried first."""
NEGLIGIBLE = 1e-9
"""Value per hour."""


def improve(round_: Round, blocked: list[Assignment]) -> bool:
    """Give blocked jobs, and jobs that this round placed on less than their best candidate, the place of less
    valuable jobs of their tenant; whether anything changed."""
    changed = False
    attempts = 0
    for assignment in [*blocked, *_fresh(round_)]:
        if attempts >= ATTEMPTS or not round_.can_disrupt():
            break
        for offer in _offers(round_, assignment):
            attempts += 1
            if accept_if_better(round_, assignment, offer):
                changed = True
                break
    return changed


def improve_one(round_: Round, assignment: Assignment) -> bool:
    """The same for one job."""
    return round_.can_disrupt() and any(
        accept_if_better(round_, assignment, offer) for offer in _offers(round_, assignment)
    )


def _fresh(round_: Round) -> list[Assignment]:
    """Jobs that start in this round, in order of id."""
    return [
        assignment
        for assignment in round_.changed
        if assignment.job.run is None
        and assignment.candidate is not None
        and not assignment.waits_for_release
    ]


def _offers(round_: Round, assignment: Assignment) -> Iterator[Callable[[], bool]]:
    """Ways to put a job where less valuable ones are, best first, if it has no place or a worse one."""
    for ranked in round_.ranked(assignment)[:2]:
        candidate = ranked.candidate
        if ranked.profit <= 0 or candidate is assignment.candidate:
            return
        if round_.holdings.refusal(assignment.job.tenant, candidate.accelerator, 0):
            continue
        worth = claim(round_, assignment, candidate)
        eligible = by_value(round_, assignment, candidate, worth)
        if eligible.count:
            yield partial(swap, round_, assignment, candidate, eligible, worth)


def swap(
    round_: Round, assignment: Assignment, candidate: Candidate, eligible: VictimGroup, worth: float
) -> bool:
    """Put the job in the place of some of these; False (and no change) if that costs more than it is worth."""
    with round_.trial() as trial:
        round_.clear(assignment)
        return preempt(round_, assignment, candidate, [eligible], worth) and trial.keep()


def accept_if_better(round_: Round, assignment: Assignment, change: Callable[[], bool]) -> bool:
    """Carry out a change for this job with all that follows; undo it and return False unless it gains."""
    with round_.trial() as trial:
        if not change():
            return False
        _follow(round_, trial)
        won, lost = _balance(round_, assignment, trial)
        return won > MARGIN * lost + NEGLIGIBLE and trial.within_budget and trial.keep()


def _follow(round_: Round, trial: Trial) -> None:
    """Find places for the jobs that lost theirs in the trial."""
    for _ in round_.cluster.pools:
        displaced = {
            assignment.job.id: assignment
            for assignment, (placement, *_) in trial.changes()
            if placement is not None and assignment.placement is None
        }
        if not displaced:
            return
        tenants = {assignment.job.tenant for assignment in displaced.values()}
        start_waiting(
            round_, [assignment for assignment in round_.waiting() if assignment.job.tenant in tenants]
        )
        for assignment in displaced.values():
            any(offer() for offer in _offers(round_, assignment))


def _balance(round_: Round, assignment: Assignment, trial: Trial) -> tuple[float, float]:
    """Value per hour gained by some and lost by others in the trial; moves count as losses."""
    won = lost = 0.0
    hours = math.inf if assignment.candidate is None else hours_left(assignment, assignment.candidate)
    for other, (placement, old, _, waited) in trial.changes():
        new = other.candidate
        now = 0.0 if new is None or other.waits_for_release else new.value
        was = 0.0 if old is None or waited else old.value
        change = now - was
        won += max(0.0, change)
        lost += max(0.0, -change)
        run, candidate = other.job.run, new or old
        if run is not None and placement == run.placement and candidate is not None:
            lost += charge(round_, other, min(hours, hours_left(other, candidate)))
    return won, lost
