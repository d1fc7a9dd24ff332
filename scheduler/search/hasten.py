"""Deadlines that need their shares now take them inside their tenant.

A job whose promised deadline needs its share now (`DeadlineShare.urgent`), and that waits or runs slower than with it, gets
it: in free room, or else from jobs of its own tenant with at most its priority. Those are, at the least loss of work,

    jobs without an urgent deadline      whole, or the pods that are needed
    jobs with one                        what they hold above their own share

however long they have run: a promise was made, and the shares of all promises together fit (`candidates/deadlines.py`).
It takes nothing from other tenants; what the job's tenant is entitled to it gets by its right (`preemption.py`).
"""

from __future__ import annotations

from ..candidates.candidate import Candidate
from ..model.plans import DeadlineShare
from .claim import Claim
from .proposal import propose
from .round import Round
from .rules import DEADLINE
from .state import Assignment
from .surplus import ENOUGH


def hasten(round_: Round) -> bool:
    """Give urgent jobs their shares, earliest deadline first; whether anything changed."""
    urgent = round_.state.candidates.urgent
    changed = False
    for name in sorted(urgent, key=lambda name: (urgent[name].slack_s, name)):
        assignment = round_.assignments.get(name)
        if assignment is None or (assignment.job.run is not None and assignment.job.run.releasing):
            continue
        if not has_enough(assignment.candidate, urgent[name]) and _give(round_, assignment, urgent[name]):
            round_.claimed.add(name)
            changed = True
    return changed


def has_enough(candidate: Candidate | None, share: DeadlineShare) -> bool:
    """Whether a job is as fast with this candidate as with its share."""
    return candidate is not None and candidate.speed >= ENOUGH * share.speed


def _give(round_: Round, assignment: Assignment, share: DeadlineShare) -> bool:
    """Put the job where it is fast enough: on the candidate with the most profit for which there is room, else on the
    smallest for which others can make room."""
    job = assignment.job
    if assignment.placement is not None and not job.preemptible:
        return False
    with round_.trial() as trial:
        round_.clear(assignment)
        return _placed(round_, assignment, share) and trial.keep()


def _placed(round_: Round, assignment: Assignment, share: DeadlineShare) -> bool:
    job = assignment.job
    enough = [
        row.candidate
        for row in round_.ranked(assignment)
        if has_enough(row.candidate, share) and round_.allows(job, row.candidate)
    ]
    for candidate in enough:
        found = round_.find(job, candidate)
        if found is not None:
            round_.put(assignment, candidate, *found)
            return True
    enough.sort(key=lambda one: round_.holdings.units_of(one.accelerator, one.accelerators_m))
    return any(propose(Claim(round_, assignment, candidate), (DEADLINE,)) for candidate in enough)
