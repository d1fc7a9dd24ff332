"""What running a job is worth per hour.

With free preemption the least mean completion time comes from serving the shortest remaining time first, on
the fastest machine; if lengths are unknown, the least attained service stands in for it. Taken literally,
both push long jobs onto the slowest accelerators for most of their life, and on a mixed cluster that costs
more than it gains: an hour on the fast type is worth the same to every job whose speed gains the same. So the
preference is weak (a small exponent), and every job's value grows with its age, the sooner the shorter it is: that
keeps the order of arrival among equals, and lets no job wait for many times its own length.

    length known      value = left ** -exponent * (1 + age / left) ** lateness_exponent
    length unknown    value = received ** -exponent * (1 + age / max(received, unknown_lateness_s))

A promised deadline that needs its share now (`deadlines.py`) adds `URGENT_WEIGHT` to that, up to the speed of the share.
"""

from __future__ import annotations

import math

from ..model.plans import DeadlineShare, Objective, Policy
from ..model.snapshot import Job, JobKind
from .makespan import Part

SHORTEST_H = 0.1
"""Remaining or attained time below this makes no further difference."""
SERVING_WEIGHT = 20.0
"""Value of a serving replica: people wait for it, as for a job with minutes left."""
NEEDED_NOW = 2.0
"""Times the value of a replica that is for load that is foreseen: what one is worth that requests wait for."""
YIELDING_WEIGHT = 1e-3
"""Value of a replica that sleeps: less than that of any work."""
AWAY = 0.1
"""Makespan: by this part a candidate is worth less where the program puts none of the job's time. At the prices jobs may be
worth as much on several types, but only the program knows how many of them each type can do."""
NO_SHARE = 1e-6
"""Makespan: a part of a job's time that is none: what the solver's precision leaves."""
LONG = 0.3
"""Makespan: by this part a job is worth more that takes all of the time that is left, less in proportion. Long jobs first:
what is left at the end is short and fills the gaps."""
CRITICAL = 0.97
"""Makespan: a job that needs this part of the time that is left must not wait."""
MUST_RUN = 1.0
"""Value per hour of a job that must not wait above the usual, where the load decides the makespan and an accelerator-hour is
worth 1. It stays small beside what a cluster does, so that the solver still sees what the other jobs lose."""
URGENT_WEIGHT = 1000.0
"""Value per hour of a job that must not wait: with the objective makespan of the longest ones, where they decide it, and of
one whose promised deadline needs its share now."""


def remaining_s(job: Job, best_speed: float) -> float:
    """Seconds still needed at the best speed; if the length is unknown, the time already received."""
    if job.remaining_work is not None and best_speed > 0:
        return job.remaining_work / best_speed
    size = max(job.min_pods * job.per_pod.accelerators_m / 1000, 1e-3)
    return job.attained_s / size


def weight(job: Job, best_speed: float, policy: Policy, now: float) -> float:
    """Value per hour of the job at its best speed."""
    if job.kind is JobKind.SERVING:
        waited_for = NEEDED_NOW if job.needed_now else 1.0
        return YIELDING_WEIGHT if job.yields else SERVING_WEIGHT * waited_for
    left_s = max(remaining_s(job, best_speed), 3600 * SHORTEST_H)
    known = job.remaining_work is not None
    exponent = policy.remaining_exponent if known else policy.attained_exponent
    value = float((left_s / 3600) ** -exponent) * lateness(job, left_s, policy, now)
    if policy.objective is Objective.FINISH_TIME_FAIRNESS:
        value *= (max(0.0, now - job.submitted_at_s) + left_s) / left_s
    return value


def lateness(job: Job, left_s: float, policy: Policy, now: float) -> float:
    """How much more a job is worth because of its age."""
    age_s = max(0.0, now - job.submitted_at_s)
    if job.remaining_work is not None:
        return math.pow(1 + age_s / left_s, policy.lateness_exponent)
    return 1 + age_s / max(left_s, policy.unknown_lateness_s)


def urgent_value(speed: float, share: DeadlineShare) -> float:
    """Value per hour, above the usual, of a speed for a job whose deadline needs its share now."""
    return URGENT_WEIGHT * min(1.0, speed / share.speed)


def makespan_value(relative: float, scale: float, share: float, part: Part, load: float) -> float:
    """Value per hour of a candidate with the objective makespan, for a job of known length.

    As far as the load decides when all is done, jobs go where the program puts them, long ones first; as far as the longest
    jobs decide it, the others go by their usual weight.

    Args:
        relative: speed over the job's best.
        scale: the job's usual weight.
        share: the part of the job's time that the program puts here.
        load: the part of the makespan that the load decides.
    """
    here = 1.0 if share > NO_SHARE else 1.0 - AWAY
    by_load = part.value * relative * (here + LONG * part.time)
    value = load * by_load + (1 - load) * scale * relative
    if part.time < CRITICAL:
        return value
    return value + part.time * relative * (MUST_RUN if load > 0.5 else URGENT_WEIGHT)
