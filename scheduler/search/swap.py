"""Swaps by value inside one tenant, each carried out to its end before it is kept.

What a job loses if it must leave its place is estimated at the prices (`claim.regret`): as if it could
have its next best candidate for its price. Whether it can is only known when it looks for a place, which may
be held by a gang that no payment moves. So a swap is carried out on the planning state with all that follows
from it (`proposal.py`): jobs that lost their place take free room, as do other waiting jobs of the tenant, or else the
place of a job to which it is worth less, and so on. It is kept if the gain is `Policy.hysteresis` times the loss, with moves
counted at `Policy.move_gain_factor` times their cost. Without this rule, two ways to use the same accelerators that
each look better from the other would alternate. Without swaps elastic jobs take 6 % longer; with swaps alone, without the
chains behind them, jobs of unknown length take 3 % longer.
"""

from __future__ import annotations

from .proposal import offers, propose
from .round import Round
from .rules import VALUE
from .state import Assignment

ATTEMPTS = 64
"""Swaps tried for waiting jobs, and swaps undone for running ones, in one pass; the most valuable jobs are
tried first."""


def improve(round_: Round, blocked: list[Assignment]) -> bool:
    """Give blocked jobs, and jobs that this round placed on less than their best candidate, the place of less
    valuable jobs of their tenant; whether anything changed."""
    changed = False
    attempts = 0
    for assignment in [*blocked, *_fresh(round_)]:
        if attempts >= ATTEMPTS or not round_.can_disrupt():
            break
        for claim, groups in offers(round_, assignment):
            attempts += 1
            if propose(claim, (VALUE,), groups):
                changed = True
                break
    return changed


def improve_one(round_: Round, assignment: Assignment) -> bool:
    """The same for one job."""
    return round_.can_disrupt() and any(
        propose(claim, (VALUE,), groups) for claim, groups in offers(round_, assignment)
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
