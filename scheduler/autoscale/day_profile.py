"""How a service's load usually goes over a day: its mean rate by time of day, over the last days. It lasts over restarts.

Rates go into bins of `BIN_S` seconds. A bin counts as one of an earlier day once it is half a day old; until then it says
nothing about its time of day, since what is forecast may be in it. Of the first `DAYS` days each counts the same; after
them each new one makes a `DAYS`-th of the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

DAY_S = 86_400.0
BIN_S = 300.0
BINS = round(DAY_S / BIN_S)
DAYS = 7


@dataclass(slots=True)
class DayProfile:
    """One service's. Another thread may copy its two tables at any time."""

    means: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Bin of the day -> requests per second, and of how many days."""
    today: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Bin since 1970, the oldest first -> sum and number of the rates that were seen in it."""

    def observe(self, at_s: float, rate: float) -> None:
        """A rate that was seen; seconds since 1970, or any other time that goes on from day to day."""
        bin_ = math.floor(at_s / BIN_S)
        total, count = self.today.get(bin_, (0.0, 0))
        self.today[bin_] = (total + rate, count + 1)
        while (oldest := next(iter(self.today))) <= bin_ - BINS // 2:
            total, count = self.today.pop(oldest)
            self.remember(oldest * BIN_S, total / count)

    def remember(self, at_s: float, rate: float) -> None:
        """The mean rate of a whole bin of an earlier day."""
        bin_ = math.floor(at_s / BIN_S) % BINS
        mean, days = self.means.get(bin_, (0.0, 0))
        days = min(days + 1, DAYS)
        self.means[bin_] = (mean + (rate - mean) / days, days)

    def at(self, at_s: float) -> float | None:
        """Mean rate of earlier days at that time, between the middles of two bins; None: not known."""
        place = (at_s % DAY_S) / BIN_S - 0.5
        low = math.floor(place)
        left, right = self.means.get(low % BINS), self.means.get((low + 1) % BINS)
        if left is None or right is None:
            return None
        return left[0] + (place - low) * (right[0] - left[0])
