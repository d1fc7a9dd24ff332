"""How far the computed rate of a replica is believed: less, where answers are late although the replicas should do.

The rate follows from the step model of an idle moment's engine. What it does not know (time between steps, neighbours on
the machine, bursts) shows as answers outside the target while fewer requests come than the ready replicas should carry.
Each minute of that lowers the belief; minutes that keep the target near the computed capacity raise it slowly again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from busbar.kube.contracts.demand import WindowDemand

WINDOW_S = 60
LEAST_ANSWERS = 30
"""Fewer say nothing about a percentile."""
LOWER, RAISE = 0.9, 1.02
LEAST = 0.5
"""Late answers can have other causes (a slow client, one sick replica): more than twice the replicas do not help."""
NEAR = 0.7
"""Part of the capacity from which on a kept target speaks for the computed rate."""


@dataclass
class Trust:
    """One service's; begins with the process."""

    factor: float = 1.0
    _next_s: float = -math.inf

    def take(
        self, window: WindowDemand | None, percentile: float, capacity_rps: float, settled: bool, now_s: float
    ) -> bool:
        """One reading; whether the factor has changed.

        Args:
            window: of `WINDOW_S`.
            capacity_rps: of the ready replicas, with the factor.
            settled: whether as many replicas are ready as are wanted.
        """
        if window is None or not settled or self._next_s == -math.inf:
            self._next_s = now_s + WINDOW_S  # the window must not reach back to when it was not so
            return False
        if now_s < self._next_s or window.answered < LEAST_ANSWERS or capacity_rps <= 0:
            return False
        self._next_s = now_s + WINDOW_S
        kept = window.within >= percentile / 100 * window.answered
        used = window.arrivals / WINDOW_S / capacity_rps
        before = self.factor
        if not kept and used <= 1:
            self.factor = max(LEAST, self.factor * LOWER)
        elif kept and used >= NEAR:
            self.factor = min(1.0, self.factor * RAISE)
        return self.factor != before
