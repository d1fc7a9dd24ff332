"""Preemption by right: reclaiming guarantees, evening out shares, priorities, and turns.

A blocked job starts in the place of others by the rules that are rights (`rules.RIGHTS`), all of them searched together.
A guarantee is reclaimed within its deadline: all candidates of a claim that is due are first tried with victims that ran
`min_run_s`, so no job loses this protection without need (`rules.DUE`).
"""

from __future__ import annotations

from ..fairness.quota import Right
from .claim import Claim
from .proposal import propose
from .queues import request_of
from .round import Round
from .rules import BY_GAP, DUE, GAP, RIGHTS, TOGETHER, groups_of
from .state import Assignment


def reclaim(round_: Round, blocked: list[Assignment]) -> bool:
    """Start blocked jobs by their rights; whether anything changed."""
    changed = False
    hopeless: set[tuple[object, ...]] = set()
    for assignment in blocked:
        due = round_.reclaim_due_at_s(assignment) <= round_.now
        if _reclaim_one(round_, assignment, hopeless) or (
            due and _reclaim_one(round_, assignment, hopeless, due)
        ):
            round_.claimed.add(assignment.job.id)
            changed = True
    return changed


def _reclaim_one(
    round_: Round, assignment: Assignment, hopeless: set[tuple[object, ...]], due: bool = False
) -> bool:
    """Whether the job could be started by its right to one of its candidates.

    Args:
        hopeless: requests that failed already; equal requests fail too. Also jobs of which all failed, by what decides
            that: while their tenant's holdings are the same, so do all requests of jobs alike. A job with a reservation is
            like no other: it may use the nodes that are collected for it.
        due: use only its guarantee, and also take jobs that have just started.
    """
    job, holdings = assignment.job, round_.holdings
    if (due or not round_.can_disrupt()) and holdings.best_right(
        job.tenant, assignment.option.shared.sizes
    ) > Right.GUARANTEED:
        return False
    version, priority = holdings.version.get(job.tenant, 0), round_.priority(job)
    own_hold = job.id if job.id in round_.holds else None
    state = due, version, round_.can_disrupt(), own_hold
    alike = job.tenant, job.user, priority, request_of(assignment), *state
    if alike in hopeless:
        return False
    for ranked in round_.shares.ordered(assignment):
        candidate = ranked.candidate
        if candidate.power_cap < 1 and _could_be_uncapped(round_, assignment):
            continue  # others are not stopped for less than full power
        if not round_.allows(job, candidate):
            continue
        right = holdings.right(job.tenant, candidate.accelerator, candidate.accelerators_m)
        if right is not Right.GUARANTEED and (due or not round_.can_disrupt()):
            continue
        key = (job.tenant, job.user, priority, right, ranked.shape, candidate.pods, due, own_hold)
        if key in hopeless:
            continue
        claim = Claim(round_, assignment, candidate, right)
        if _start_due(claim) if due else _start_by_right(claim):
            return True
        hopeless.add(key)
    hopeless.add(alike)
    return False


def _could_be_uncapped(round_: Round, assignment: Assignment) -> bool:
    """Whether the power domains would carry one of its candidates without a cap, if no other job ran."""
    return any(
        row.candidate.power_cap == 1
        and round_.pods_if_empty(assignment.job, row.candidate) >= row.candidate.pods
        for row in round_.ranked(assignment)
    )


def _start_by_right(claim: Claim) -> bool:
    """Start the job by its right. Jobs that this round has placed are tried as victims first, and left out if
    that fails: what may be taken of a tenant is better taken where it makes room. So a job that is blocked
    when the round ends is also blocked once these jobs run. Without such victims jobs of five tenants with a backlog move 1.3
    times as often."""
    if propose(claim, RIGHTS, planned=True):
        return True
    round_, pool = claim.round, claim.candidate.pool
    placed = any(round_.stoppable.planned(pool, tenant) for tenant in round_.holdings.tenants)
    if placed and propose(claim, RIGHTS):
        return True
    return bool(groups_of(claim, (GAP,))) and propose(claim, BY_GAP).accepted


def _start_due(claim: Claim) -> bool:
    """Start the job by a guarantee that is due: take what others borrowed, first what loses least work, else
    what stands on the nodes where most can be taken."""
    return propose(claim, (DUE,)).accepted or propose(claim, (TOGETHER,)).accepted
