"""Correcting forecasts by how earlier ones turned out.

A simulated wait can be off in ways that history shows: users who send jobs in waves, lengths that are
correlated, a cluster that has become busier than its past. Two corrections, for each quantile by itself:

    a factor that would have made earlier forecasts right. Wait / simulated quantile is a ratio; for p90 the
    factor is the 0.9 quantile of the ratios. Forecasts like this one count most: recent ones, of waits about
    as long, of the same tenant.

    then a step against the misses of what was really promised, in the spirit of adaptive conformal inference:
    if more than a tenth started after their p90, the next p90 is raised, until the share is right again. This
    needs no model of the cause. A promise is judged when it is due, whether it was kept or not; judged when the
    job starts, the kept ones would come first.

A job that still waits counts too, as "more than this much so far" (Kaplan and Meier again); leaving it out
would make every wait look short. Only what was known at `now` is used, and without outcomes nothing changes.

How much is enough? Jobs that a tenant sends in one wave wait for the same thing and turn out alike: two
hundred of them say little more than three. A correction counts as much as the effective number of independent
outcomes allows, as survey statistics counts clustered samples (Kish's design effect, with `ALIKE` as the
correlation inside a wave).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .history import History, Outcome

Floats = NDArray[np.float64]

LEVELS = (0.5, 0.9)
SHORTEST_S = 60.0
"""Shorter waits count as this long."""
HALF_LIFE_S = 86400.0
"""Forecasts older than this count half: a queue's load changes from day to day."""
STRANGER = 0.3
"""Weight of a forecast for another tenant's job."""
WIDTH = 0.7
"""How similar two waits must be: a difference of this much in the logarithm costs a factor 1/e."""
WAVE_S = 2 * 3600.0
"""What one tenant submits within this time is one wave."""
ALIKE = 0.3
"""Correlation of outcomes inside a wave."""
ENOUGH = 10.0
"""Independent outcomes at which a correction counts half."""
GAIN = 2.0
"""Step, in the logarithm of the wait, per share of promises missed beyond what the level allows."""
MOST = 1.5
"""Upper limit of a step."""


def corrected(
    raw: tuple[float, float], tenant: str, accelerators_m: int, history: History, now: float
) -> tuple[float, float]:
    """p50 and p90 after correction."""
    known = [outcome for outcome in history.outcomes.values() if outcome.made_at_s < now]
    if not known:
        return raw
    past = _Past(known, tenant, now)
    middle = np.log(np.maximum([o.raw[0] for o in known], SHORTEST_S))
    unlike = np.abs(middle - math.log(max(raw[0], SHORTEST_S)))
    unlike += 0.3 * np.abs(np.log([max(o.accelerators_m, 1) / max(accelerators_m, 1) for o in known]))
    result = []
    for level, value in enumerate(raw):
        weight = past.weight * np.exp(-unlike / WIDTH)
        simulated = np.maximum([o.raw[level] for o in known], SHORTEST_S)
        ratio = quantile(np.maximum(past.waits, 1.0) / simulated, past.ended, weight, LEVELS[level])
        factor = ratio ** past.trust(weight) * math.exp(past.step(level))
        result.append(max(value, SHORTEST_S) * factor)
    return result[0], max(result)


class _Past:
    """Earlier forecasts as they stand now, and how much each says about one tenant's next."""

    def __init__(self, known: Sequence[Outcome], tenant: str, now: float) -> None:
        self.known = known
        self.age = np.array([now - o.made_at_s for o in known])
        self.waits = np.array([now - o.made_at_s if o.waited_s is None else o.waited_s for o in known])
        self.ended = np.array([o.waited_s is not None for o in known])
        own = np.array([o.tenant == tenant for o in known])
        self.weight = 0.5 ** (self.age / HALF_LIFE_S) * np.where(own, 1.0, STRANGER)
        waves = [(o.tenant, o.made_at_s // WAVE_S) for o in known]
        number = {wave: i for i, wave in enumerate(dict.fromkeys(waves))}
        self.wave = np.array([number[wave] for wave in waves])

    def trust(self, weight: Floats) -> float:
        """How far outcomes with these weights are followed: 0 not at all, 1 all the way."""
        together = np.bincount(self.wave, weights=weight)
        variance = (1 - ALIKE) * (weight**2).sum() + ALIKE * (together**2).sum()
        independent = float(weight.sum() ** 2 / max(variance, 1e-300))
        return independent / (independent + ENOUGH)

    def step(self, level: int) -> float:
        """What to add to the logarithm of a forecast, because too many or too few promises were missed."""
        promised = np.array([math.inf if o.promised is None else o.promised[level] for o in self.known])
        weight = np.where(promised <= self.age, self.weight, 0.0)
        if not weight.any():
            return 0.0
        missed = float((weight * (self.waits > promised)).sum() / weight.sum())
        excess = missed - (1 - LEVELS[level])
        return float(np.clip(GAIN * excess * self.trust(weight), -MOST, MOST))


def quantile(values: Floats, ended: NDArray[np.bool_], weight: Floats, level: float) -> float:
    """The weighted quantile of values of which some are only lower bounds (not `ended`)."""
    order = np.argsort(values, kind="stable")
    value, mass = values[order], weight[order]
    at_risk = np.cumsum(mass[::-1])[::-1]
    stays = 1.0 - np.where(ended[order], mass, 0.0) / np.maximum(at_risk, 1e-300)
    below = 1.0 - np.cumprod(np.maximum(stays, 0.0))
    at = int(np.searchsorted(below, level - 1e-9, side="left"))
    return float(value[min(at, len(value) - 1)])
