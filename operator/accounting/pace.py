"""When a budget will probably be spent, by the rates at which it was used lately. Pure.

What is used per hour is kept as a mean and a variance over the last day: all of what is known until then, later with a
half-life of a day. Over a time that is long beside `CORRELATED_H`, in which one hour says much about the next, the mean
rate strays less than single hours do; that holds for the hours to come and for those from which the mean is known. The
moment until which the budget is spent with a probability q is the first at
which the (1 - q) quantile of the use, taken as normal, reaches what is left.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from busbar.kube.types.budget import Pace

DAY_H = 24.0
REMEMBERED_H = 2 * DAY_H / math.log(2)
"""A mean with a half-life of a day strays as one over so many hours."""
CORRELATED_H = 12.0
"""Twice the time for which a tenant's rate stays what it is: jobs of six hours."""
LEAST_H = 1.0
"""Nothing is forecast from less."""


def noted(old: Pace | None, per_hour: float, hours: float) -> Pace:
    """After `hours` more at this rate."""
    if hours <= 0:
        return old or Pace()
    if old is None or not old.hours:
        return Pace(hours=round(hours, 6), mean=round(per_hour, 9), variance=0.0)
    known = old.hours + hours
    part = hours / known if known <= DAY_H else max(hours / known, 1 - 0.5 ** (hours / DAY_H))
    off = per_hour - old.mean
    return Pace(
        hours=round(known, 6),
        mean=round(max(0.0, old.mean + part * off), 9),
        variance=round(max(0.0, (1 - part) * (old.variance + part * off * off)), 9),
    )


def spent_after_h(pace: Pace | None, left: float, probability: float) -> float:
    """Hours until what is left is used with this probability; infinite: never, or too little is known."""
    if pace is None or pace.hours < LEAST_H or pace.mean <= 0:
        return math.inf
    strays = NormalDist().inv_cdf(probability) * math.sqrt(pace.variance)

    known = min(1.0, CORRELATED_H / min(pace.hours, REMEMBERED_H))

    def surely_used(hours: float) -> float:
        return hours * (pace.mean - strays * math.sqrt(min(1.0, CORRELATED_H / hours) + known))

    high = max(left / pace.mean, 1e-6)
    for _ in range(64):
        if surely_used(high) >= left:
            break
        high *= 2
    else:
        return math.inf
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if surely_used(middle) >= left else (middle, high)
    return high
