"""Moving and resizing running jobs to better candidates.

If a job's length is unknown, the time already received stands for the time that is left; for growing where it is,
`Policy.unknown_length_s` if that is longer. What is free at the end of a round goes to elastic jobs without a price
(`growth.py`).

A job moves only if the time saved over the rest of its life is at least `Policy.move_gain_factor` times the
cost of the move (restart and work since the last checkpoint), and only to a candidate that is also better at
the prices: a fast type that others need more is left to them.

Where the solver runs, moves earn less than 1 %: it finds the same ones. Without both jobs take 1.4 to 1.5 times as long on a
trace of 48 accelerators, and the 99th percentile is 3.2 to 3.5 times as long. Moves into the place of others shorten that
percentile by 3 %.
"""

from __future__ import annotations

from ..candidates.candidate import Candidate
from .claim import Claim, hours_left, offered, own_charge
from .proposal import propose
from .round import Round
from .rules import VALUE, groups_of
from .state import Assignment
from .swap import ATTEMPTS


def move(round_: Round) -> bool:
    """Move running jobs into free room, the largest gain first; whether anything changed."""
    proposals: list[tuple[float, str, Assignment, Candidate]] = []
    for assignment in round_.assignments.values():
        if round_.movable(assignment):
            proposals.extend(
                (-gain, assignment.job.id, assignment, candidate)
                for gain, candidate in better(round_, assignment)
            )
    proposals.sort(key=lambda item: (item[0], item[1]))
    changed = False
    undone = 0
    for _, _, assignment, candidate in proposals:
        if not round_.can_disrupt():
            break
        if (
            not round_.movable(assignment)
            or assignment.candidate is None
            or assignment.started_at_s >= round_.now
        ):
            continue
        if _try(round_, assignment, candidate):
            changed = True
        elif undone < ATTEMPTS:
            done = _exchange(round_, assignment, candidate)
            undone += done is False
            changed = changed or done is True
    return changed


def better(round_: Round, assignment: Assignment) -> list[tuple[float, Candidate]]:
    """Candidates worth a move, with the gain in value per hour above prices."""
    current = assignment.candidate
    if current is None:
        return []
    found = []
    now = round_.profit(current)
    for candidate in assignment.option.candidates:
        gain = round_.profit(candidate) - now
        if gain > 0 and pays(round_, assignment, current, candidate):
            found.append((gain, candidate))
    return found


def pays(round_: Round, assignment: Assignment, current: Candidate, candidate: Candidate) -> bool:
    """Whether the candidate is clearly faster, at most one round's growth larger, saves enough time over the rest of
    the job's life, and does not cost its tenant more of its share than it brings."""
    if not round_.shares.are_kept_by(assignment, current, candidate):
        return False
    if candidate is current or candidate.speed <= current.speed * (2 - 1 / round_.policy.hysteresis):
        return False
    same = candidate.pool == current.pool and candidate.mode == current.mode
    if same and candidate.pods > current.pods * round_.policy.growth_factor:
        return False
    saved_h = hours_left(assignment, current) - hours_left(assignment, candidate)
    if same and assignment.job.remaining_work is None:
        ahead_h = round_.policy.unknown_length_s / 3600
        saved_h = max(saved_h, ahead_h * (1 - current.speed / candidate.speed))
    return saved_h >= round_.policy.move_gain_factor * round_.lost_s(assignment) / 3600


def _try(round_: Round, assignment: Assignment, candidate: Candidate) -> bool:
    """Move if the job fits there with its own resources given back, and quota allows it."""
    with round_.trial() as trial:
        round_.clear(assignment)
        return round_.put_now(assignment, candidate) and trial.keep()


def _exchange(round_: Round, assignment: Assignment, candidate: Candidate) -> bool | None:
    """Move into the place of less valuable jobs of the same tenant; they go where there is room, often to the
    place that this job leaves. None: there are none; False: it does not pay."""
    worth = offered(round_, assignment, candidate) - own_charge(round_, assignment, candidate)
    claim = Claim(round_, assignment, candidate, worth=worth)
    groups = groups_of(claim, (VALUE,))
    if not groups or round_.holdings.refusal(assignment.job.tenant, candidate.accelerator, 0):
        return None
    return propose(claim, (VALUE,), groups).accepted
