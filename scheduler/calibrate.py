"""Correcting forecasts by how earlier ones turned out.

A simulated wait can be off in ways that history shows: users who send jobs in waves, lengths that belong
together. So each quantile is multiplied by a factor, the one that would have made earlier forecasts right:
over past forecasts, wait / simulated quantile is a ratio, and for p90 the factor is the ratio that nine tenths
stayed below. Forecasts like this one count most: recent ones, of waits about as long, of the same tenant.

A job that still waits counts too, as "more than this much so far" (Kaplan and Meier again); leaving it out
would make every wait look short. Only what was known at `now` is used, and without enough of it the factor
is 1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .history import History

Floats = NDArray[np.float64]

LEVELS = (0.5, 0.9)
SHORTEST_S = 60.0
"""Waits below this are all alike."""
HALF_LIFE_S = 2 * 86400.0
"""Forecasts older than this count half."""
STRANGER = 0.3
"""What a forecast for another tenant's job counts."""
WIDTH = 0.7
"""How alike two waits must be: this much in the logarithm costs 1/e."""
ENOUGH = 15.0
"""Past forecasts (by weight) that make half of the correction count."""


def corrected(
    raw: tuple[float, float], tenant: str, accelerators_m: int, history: History, now: float
) -> tuple[float, float]:
    """p50 and p90 after correction."""
    known = [outcome for outcome in history.outcomes.values() if outcome.made_at_s < now]
    if not known:
        return raw
    waits = np.array([now - o.made_at_s if o.waited_s is None else o.waited_s for o in known])
    ended = np.array([o.waited_s is not None for o in known])
    middle = np.log(np.maximum([o.raw[0] for o in known], SHORTEST_S))
    unlike = np.abs(middle - math.log(max(raw[0], SHORTEST_S)))
    unlike += 0.3 * np.abs(np.log([max(o.accelerators_m, 1) / max(accelerators_m, 1) for o in known]))
    age = np.array([now - o.made_at_s for o in known])
    weight = np.exp(-unlike / WIDTH) * 0.5 ** (age / HALF_LIFE_S)
    weight *= np.where(np.array([o.tenant == tenant for o in known]), 1.0, STRANGER)
    trust = float(weight.sum() ** 2 / max((weight**2).sum(), 1e-12))
    trust = trust / (trust + ENOUGH)
    result = []
    for level, value in enumerate(raw):
        simulated = np.maximum([o.raw[level] for o in known], SHORTEST_S)
        ratio = quantile(np.maximum(waits, 1.0) / simulated, ended, weight, LEVELS[level])
        result.append(max(value, SHORTEST_S) * ratio**trust)
    return result[0], max(result)


def quantile(values: Floats, ended: NDArray[np.bool_], weight: Floats, level: float) -> float:
    """The weighted quantile of values of which some are only lower bounds (not `ended`)."""
    order = np.argsort(values, kind="stable")
    value, mass = values[order], weight[order]
    at_risk = np.cumsum(mass[::-1])[::-1]
    stays = 1.0 - np.where(ended[order], mass, 0.0) / np.maximum(at_risk, 1e-300)
    below = 1.0 - np.cumprod(np.maximum(stays, 0.0))
    at = int(np.searchsorted(below, level - 1e-9, side="left"))
    return float(value[min(at, len(value) - 1)])
