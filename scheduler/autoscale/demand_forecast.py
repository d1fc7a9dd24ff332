"""The load of a service at the time a replica asked for now would be ready.

Every `BIN_S` seconds the observed rate goes in and three forecasts for one horizon are made:

    level    a running mean of about a minute
    trend    the level, and the slope of the last minutes carried on over the horizon
    day      the level times how much the same hour of earlier days rose over the same time

When their time comes they are compared with the minute that was observed. The one with the smallest recent error is
used, and the quantile of its own past errors (observed / forecast) is the margin: a service whose load is steady gets
little, one with bursts gets much. `calibration` is the share of the time in which the load stayed inside the
quantile: what was promised beside what came true. All of this but the earlier days (`day_profile.py`) begins anew with
the process, and is learned within the hour.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ServingModelError
from .day_profile import DayProfile

BIN_S = 10.0
METHODS = ("level", "trend", "day")


@dataclass(frozen=True, slots=True)
class ForecastSettings:
    """Constants of the forecast."""

    horizon_s: float = 90.0
    """How far ahead: the time to start a replica and the time to the next decision."""
    quantile: float = 0.9
    """Of past errors; what the margin covers."""
    level_s: float = 60.0
    """Time constant of the level."""
    slope_bins: int = 30
    """Observations that the slope is fitted to (five minutes)."""
    slope_reach_s: float = 180.0
    """The slope is carried on for at most this long."""
    errors: int = 360
    """Past errors kept (one hour)."""
    fewest_errors: int = 30
    first_margin: float = 1.2
    """Margin until `fewest_errors` are known."""
    most_margin: float = 1.3
    """A load that errs by more cannot be forecast: provisioning for it would cost more than what panic misses."""

    def __post_init__(self) -> None:
        if not self.horizon_s > 0:
            raise ServingModelError(f"the forecast's horizon is {self.horizon_s:g} s; it must be above zero")
        if not 0.5 <= self.quantile < 1:
            raise ServingModelError(f"the forecast's quantile is {self.quantile:g}; it must be in [0.5, 1)")


@dataclass(frozen=True, slots=True)
class Forecast:
    """Requests per second at the horizon."""

    now: float
    expected: float
    upper: float
    """At the quantile."""
    method: str


@dataclass(slots=True)
class DemandForecast:
    """One service's history, by total rate. Feed `observe` every `BIN_S` seconds, in order."""

    settings: ForecastSettings = field(default_factory=ForecastSettings)
    days: DayProfile = field(default_factory=DayProfile)
    """Of earlier days; it goes on from what was known before."""
    _level: float | None = None
    _recent: deque[float] = field(default_factory=deque)
    _pending: deque[tuple[float, Mapping[str, float], float]] = field(default_factory=deque)
    _errors: dict[str, deque[float]] = field(default_factory=dict)
    _inside: int = 0
    _scored: int = 0
    _margins: dict[str, float] = field(default_factory=dict)

    def observe(self, now_s: float, rate: float) -> None:
        """The mean rate of the bin that ends at `now_s`."""
        if not math.isfinite(rate) or rate < 0:
            raise ServingModelError(f"an observed rate is {rate:g}; it must be zero or more")
        settings = self.settings
        weight = 1 - math.exp(-BIN_S / settings.level_s)
        self._level = rate if self._level is None else self._level + weight * (rate - self._level)
        self._recent.append(rate)
        while len(self._recent) > max(settings.slope_bins, 6):
            self._recent.popleft()
        self.days.observe(now_s, rate)
        self._score(now_s)
        made = self._methods(now_s)
        self._pending.append((now_s + settings.horizon_s, made, self.forecast(now_s).upper))

    def forecast(self, now_s: float) -> Forecast:
        """At `now_s` + horizon."""
        made = self._methods(now_s)
        method = min(made, key=lambda name: (self._mean_error(name), METHODS.index(name)))
        expected = made[method]
        margin = self._margins.get(method, self.settings.first_margin)
        return Forecast(self._level or 0.0, expected, expected * margin, method)

    @property
    def calibration(self) -> float | None:
        """Share of the scored forecasts that the load stayed inside; None before the first."""
        return self._inside / self._scored if self._scored else None

    def _methods(self, now_s: float) -> dict[str, float]:
        level = self._level or 0.0
        ahead = self.settings.horizon_s
        made = {"level": level}
        slope = self._slope()
        made["trend"] = max(
            0.0, level + slope * min(ahead + self.settings.level_s, self.settings.slope_reach_s)
        )
        before, after = self.days.at(now_s - self.settings.level_s), self.days.at(now_s + ahead)
        if before and after is not None:
            made["day"] = level * after / before
        return made

    def _slope(self) -> float:
        """Requests per second per second, least squares; 0 with too few observations."""
        rates = self._recent
        count = len(rates)
        if count < 6:
            return 0.0
        middle, mean = (count - 1) / 2, sum(rates) / count
        above = sum((i - middle) * (rate - mean) for i, rate in enumerate(rates))
        return above / (count * (count * count - 1) / 12) / BIN_S

    def _score(self, now_s: float) -> None:
        last = list(self._recent)[-6:]
        seen = sum(last) / len(last)
        while self._pending and self._pending[0][0] <= now_s + 1e-9:
            _, made, upper = self._pending.popleft()
            self._scored += 1
            self._inside += seen <= upper
            for name, value in made.items():
                errors = self._errors.setdefault(name, deque(maxlen=self.settings.errors))
                errors.append(seen / value if value > 0 else (1.0 if seen <= 0 else 2.0))
                if len(errors) >= self.settings.fewest_errors:
                    order = sorted(errors)
                    place = math.ceil(self.settings.quantile * len(order)) - 1
                    self._margins[name] = min(max(1.0, order[place]), self.settings.most_margin)

    def _mean_error(self, name: str) -> float:
        errors = self._errors.get(name)
        if not errors or len(errors) < self.settings.fewest_errors:
            return 1.0 if name != "level" else 0.999
        return sum(abs(error - 1) for error in errors) / len(errors)
