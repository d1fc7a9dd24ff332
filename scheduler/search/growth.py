"""Elastic jobs take what is left: the last step of a full plan.

A job's candidates are its smallest size, its doublings and its largest (`candidates.pod_counts`), so that prices and
the solver see few columns. When all other steps are done, a job that may use more pods takes the most that fit,
of any size: what a doubling does not fit is used too, and a job that gave way gives up no more than was needed.

    placed in this round       any size up to its largest: it starts or restarts anyway
    running where it was       up to `Policy.growth_factor` times its size, if that pays for the restart (`pays`)

A pool that a waiting job could use is left alone: whatever is free there is being collected. So growth takes nothing
from anybody, and asks for no price. Without it three scenarios of `benchmarks/scheduling` fail; elastic jobs would take as
long and need 2 to 4 % fewer accelerator-hours.
"""

from __future__ import annotations

from ..candidates.candidate import Candidate
from .migration import pays
from .queues import request_of
from .round import Round
from .state import Assignment


def grow(round_: Round) -> None:
    """Give elastic jobs the free room that nobody waits for, first those of tenants that hold least."""
    elastic = [
        assignment
        for assignment in round_.assignments.values()
        if assignment.job.min_pods < assignment.job.max_pods
        and assignment.candidate is not None
        and assignment.candidate.pods < assignment.job.max_pods
        and not assignment.waits_for_release
    ]
    if not elastic:
        return
    wanted = wanted_pools(round_)
    holdings = round_.holdings
    elastic.sort(key=lambda one: (holdings.held_per_weight(one.job.tenant), one.job.id))
    for assignment in elastic:
        if assignment.candidate is not None and assignment.candidate.pool not in wanted:
            _grow_one(round_, assignment, assignment.candidate)


def wanted_pools(round_: Round) -> set[str]:
    """Pools in which a waiting job has a candidate that quota allows and that would fit if nothing ran."""
    wanted: set[str] = set()
    known: set[tuple[object, ...]] = set()
    for assignment in round_.waiting():
        job = assignment.job
        key = job.tenant, request_of(assignment)
        if key in known:
            continue
        known.add(key)
        wanted |= {
            candidate.pool
            for candidate in assignment.option.candidates
            if candidate.pool not in wanted
            and round_.allows(job, candidate)
            and round_.pods_if_empty(job, candidate) >= candidate.pods
        }
    return wanted


def _grow_one(round_: Round, assignment: Assignment, current: Candidate) -> None:
    """Let one job take the most pods that fit in the pool where it is, if that is worth it."""
    job, stays = assignment.job, assignment.stays
    most = job.max_pods
    if stays:
        if not (round_.movable(assignment) and round_.can_disrupt()):
            return
        most = min(most, current.pods * round_.policy.growth_factor)
    more = round_.pods_that_fit(job, current)
    if not more:
        return
    most = min(most, current.pods + more)
    with round_.trial() as trial:
        round_.clear(assignment)
        for pods in range(most, current.pods, -1):
            candidate = round_.sized(assignment, current, pods)
            if candidate is None or not _worth(round_, assignment, current, candidate, stays):
                continue
            nodes = round_.cluster.find(job, candidate, later=False)
            if nodes is not None:
                round_.put(assignment, candidate, nodes)
                trial.keep()
                return


def _worth(
    round_: Round, assignment: Assignment, current: Candidate, candidate: Candidate, stays: bool
) -> bool:
    """Whether quota allows the larger size, and it is worth more; of a job that would stay: a restart, too."""
    if candidate.value <= current.value or not round_.allows(assignment.job, candidate):
        return False
    return not stays or pays(round_, assignment, current, candidate)
