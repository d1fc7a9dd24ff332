"""Deadlines that need their shares now take them inside their tenant.

A job whose promised deadline needs its share now (`DeadlineShare.urgent`), and that waits or runs slower than with it, gets
it: in free room, or else from jobs of its own tenant with at most its priority. Those are, at the least loss of work,

    jobs without an urgent deadline      whole, or the pods that are needed
    jobs with one                        what they hold above their own share

however long they have run: a promise was made, and the shares of all promises together fit (`candidates/deadlines.py`).
It takes nothing from other tenants; what the job's tenant is entitled to it gets by its right (`preemption.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..candidates.candidates import Candidate
from ..model.plans import DeadlineShare
from ..model.snapshot import JobKind
from .elastic import partial_victim
from .preemption import preempt
from .round import Round
from .state import Assignment
from .victims import Part, Victim, VictimGroup

ENOUGH = 0.999
"""Of the share's speed: sums of floating-point numbers differ."""


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
        if has_enough(row.candidate, share)
        and not round_.holdings.refusal(job.tenant, row.candidate.accelerator, row.candidate.accelerators_m)
    ]
    for candidate in enough:
        found = round_.find(job, candidate)
        if found is not None:
            round_.put(assignment, candidate, *found)
            return True
    enough.sort(key=lambda one: round_.holdings.units_of(one.accelerator, one.accelerators_m))
    for candidate in enough:
        nodes = round_.cluster.pools[candidate.pool]
        victims = VictimGroup(_victims(round_, assignment, candidate), nodes)
        if victims.count and preempt(round_, assignment, candidate, [victims], by_right=True):
            return True
    return False


def _victims(round_: Round, assignment: Assignment, candidate: Candidate) -> Iterator[Victim]:
    """Who gives way in the candidate's pool, and how much of it."""
    urgent, priority = round_.state.candidates.urgent, round_.priority(assignment.job)
    for victim in round_.due_victims(candidate.pool, assignment.job.tenant):
        other = victim.assignment
        if other.job.kind is not JobKind.TRAINING or round_.priority(other.job) > priority:
            continue
        share = urgent.get(other.job.id)
        if share is None:
            yield victim
        elif has_enough(other.candidate, share):
            part = _above(round_, other, share)
            if part is not None:
                yield Victim(other, victim.cost, victim.nodes, part)


def _above(round_: Round, assignment: Assignment, share: DeadlineShare) -> Part | None:
    """What an urgent job holds above its share."""
    now = assignment.candidate
    assert now is not None
    enough = (
        pods
        for pods in range(assignment.job.min_pods, now.pods)
        if has_enough(round_.sized(assignment, now, pods), share)
    )
    least = next(enough, None)
    if least is None:
        return None
    most_m = (now.pods - least) * now.per_pod.accelerators_m
    return partial_victim(round_, assignment, lambda amount_m: amount_m <= most_m)
