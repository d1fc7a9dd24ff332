"""What running a job is worth per hour.

With free preemption the least mean completion time comes from serving the shortest remaining time first, on
the fastest machine; with unknown durations the least attained service stands in for it (durations are
heavy-tailed: what has run long will run long). `Policy.age_weight` softens both towards first come first
served, and a job that has been slowed down compared with having its share to itself grows in value, so that
nobody is forgotten.
"""

from __future__ import annotations

from .plans import Objective, Policy
from .types import Job, JobKind

SHORTEST_H = 0.1
"""Remaining or attained time below this makes no further difference."""
SERVING_WEIGHT = 20.0
"""A replica's value: people wait for it, as for a job with minutes left."""
URGENT_SLACK = 0.15
"""Makespan: a job whose slack is below this part of the longest job's time must not wait."""
URGENT_WEIGHT = 1000.0


def remaining_s(job: Job, best_speed: float) -> float:
    """Seconds still needed at the best speed; the time already received where the length is unknown."""
    if job.remaining_work is not None and best_speed > 0:
        return job.remaining_work / best_speed
    size = max(job.min_pods * job.per_pod.accelerators_m / 1000, 1e-3)
    return job.attained_s / size


def weight(job: Job, best_speed: float, policy: Policy, now: float, longest_s: float = 0.0) -> float:
    """Value per hour of the job at its best speed."""
    if job.kind is JobKind.SERVING:
        return SERVING_WEIGHT
    left_h = max(remaining_s(job, best_speed) / 3600, SHORTEST_H)
    value = float(left_h**-policy.age_weight)
    if policy.objective is Objective.MAKESPAN and job.remaining_work is not None:
        slack = longest_s - remaining_s(job, best_speed)
        if slack <= URGENT_SLACK * longest_s:
            value += URGENT_WEIGHT * left_h
    if policy.objective is Objective.FINISH_TIME_FAIRNESS:
        value *= ((now - job.submitted_at_s) / 3600 + left_h) / left_h
    return value
