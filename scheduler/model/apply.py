"""Carrying a plan out on a snapshot: the pure form of what the operator does to the cluster."""

from __future__ import annotations

from dataclasses import replace

from ..errors import StaleActionError
from .plans import Action, ActionKind, Plan
from .snapshot import Job, JobId, Run, Snapshot


def stale(snapshot: Snapshot, action: Action) -> str | None:
    """Why the action must not be carried out now; None: it may.

    An action that is already done is not stale. One whose `after` jobs still hold resources is not stale
    either, only early.
    """
    job = next((job for job in snapshot.jobs if job.id == action.job), None)
    return f"the job {action.job} is gone" if job is None else _stale(job, action)


def _stale(job: Job, action: Action) -> str | None:
    placement = None if job.run is None else job.run.placement
    if placement == action.to or placement == action.assumed:
        return None
    return f"{job.key} changed since the plan was made"


def applied(snapshot: Snapshot, plan: Plan, now: float) -> Snapshot:
    """The snapshot after all actions and promises, as if every release were immediate.

    Raises:
        StaleActionError: an action's assumption does not hold.
    """
    jobs: dict[JobId, Job] = {job.id: job for job in snapshot.jobs}
    for action in plan.actions:
        if action.job not in jobs:
            raise StaleActionError(f"{action.id}: the job {action.job} is gone; plan again")
        job = jobs[action.job]
        problem = _stale(job, action)
        if problem is not None:
            raise StaleActionError(f"{action.id}: {problem}; plan again")
        jobs[action.job] = _after(job, action, now)
    for share in plan.deadlines:
        known = jobs.get(share.job)
        if known is not None and share.promised and not known.promised:
            jobs[share.job] = replace(known, promised=True)
    return replace(
        snapshot, jobs=tuple(jobs[job.id] for job in snapshot.jobs), reservations=plan.reservations
    )


def _after(job: Job, action: Action, now: float) -> Job:
    if (None if job.run is None else job.run.placement) == action.to:
        return job
    if action.to is None:
        return replace(job, run=None, preemptions=job.preemptions + 1, last_move_at_s=now)
    if action.kind is ActionKind.LIFT and job.run is not None:
        return replace(job, run=replace(job.run, placement=action.to))
    moved = job.last_move_at_s if action.kind is ActionKind.START else now
    taken = job.preemptions + (action.kind is ActionKind.SHRINK or action.makes_room_for is not None)
    return replace(
        job, run=Run(placement=action.to, started_at_s=now), last_move_at_s=moved, preemptions=taken
    )
