"""What the jobs with deadlines need, seen from the planning state (`candidates/deadlines.py` computes it)."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ..candidates.candidate import Candidate
from ..candidates.deadlines import Asked, Way, shares
from ..model.plans import DeadlineShare
from ..model.snapshot import Job, JobKind

if TYPE_CHECKING:
    from .state import Assignment, PlanningState


def deadline_shares(state: PlanningState) -> tuple[DeadlineShare, ...]:
    """The share of each training job with a deadline and a known length."""
    asked = [
        _asked(state, assignment) for assignment in state.assignments.values() if _counts(assignment.job)
    ]
    if not asked:
        return ()
    capacity = {name: pool.capacity_m() / 1000 for name, pool in state.cluster.pools.items()}
    entitled = dict(state.holdings.entitled)
    for assignment in state.assignments.values():
        place, job = assignment.placement, assignment.job
        if place is None or not _unmovable(job):
            continue
        if place.pool in capacity:
            capacity[place.pool] -= place.accelerators_m / 1000
        if job.tenant in entitled:
            entitled[job.tenant] -= state.holdings.units_of(place.accelerator, place.accelerators_m)
    return shares(asked, capacity, entitled, state.valued_at_s)


def _counts(job: Job) -> bool:
    return job.deadline_s is not None and job.kind is JobKind.TRAINING and bool(job.remaining_work)


def _unmovable(job: Job) -> bool:
    """Whether nothing is known of when it makes room: nobody may stop it, and it has no deadline of its own."""
    if _counts(job) or job.yields:
        return False
    return not job.preemptible or job.kind is not JobKind.TRAINING


def _asked(state: PlanningState, assignment: Assignment) -> Asked:
    job = assignment.job
    assert job.deadline_s is not None
    assert job.remaining_work is not None
    sizes: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for candidate in assignment.option.candidates:
        if candidate.power_cap == 1 and state.cluster.could_hold(job, candidate):
            sizes[candidate.pool, candidate.mode].append(candidate)
    ways = (_way(state, assignment, found) for found in sizes.values())
    return Asked(
        job.id,
        job.key,
        job.tenant,
        job.deadline_s,
        job.remaining_work,
        job.restart_s,
        job.promised,
        tuple(way for way in ways if way.pods),
    )


def _way(state: PlanningState, assignment: Assignment, sizes: list[Candidate]) -> Way:
    """A pool and mode with the sizes in which more pods are faster."""
    job, first = assignment.job, sizes[0]
    pods, speeds, fastest = list[int](), list[float](), 0.0
    for candidate in sorted(sizes, key=lambda one: one.pods):
        speed = state.candidates.least_speed(job, candidate)
        if speed > fastest:
            fastest = speed
            pods.append(candidate.pods)
            speeds.append(speed)
    run = None if job.run is None or job.run.releasing else job.run.placement
    same = run is not None and (run.pool, run.mode, run.per_pod) == (first.pool, first.mode, first.per_pod)
    return Way(
        first.pool,
        first.accelerator,
        first.per_pod.accelerators_m / 1000,
        max(state.holdings.units_of(first.accelerator, 1000), 1e-6),
        tuple(pods),
        tuple(speeds),
        run.pods if run is not None and same else 0,
    )
