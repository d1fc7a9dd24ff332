"""Forecasts on loads whose future is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from busbar.scheduler.autoscale.day_profile import DAY_S
from busbar.scheduler.autoscale.demand_forecast import BIN_S, DemandForecast, ForecastSettings
from busbar.scheduler.errors import ServingModelError


def fed(
    rate: Callable[[float], float], until_s: float, forecast: DemandForecast | None = None
) -> DemandForecast:
    forecast = forecast or DemandForecast()
    for step in range(1, int(until_s / BIN_S) + 1):
        forecast.observe(step * BIN_S, rate(step * BIN_S))
    return forecast


def test_a_steady_load_has_no_margin() -> None:
    found = fed(lambda _: 7.0, 3600).forecast(3600)
    assert found.expected == pytest.approx(7.0)
    assert found.upper == pytest.approx(7.0)


def test_before_errors_are_known_there_is_a_first_margin() -> None:
    found = fed(lambda _: 8.0, 60).forecast(60)
    assert found.upper == pytest.approx(1.2 * found.expected)


def test_a_ramp_is_carried_on() -> None:
    found = fed(lambda t: 1 + t / 100, 3600).forecast(3600)
    assert found.method == "trend"
    assert found.expected == pytest.approx(1 + 3690 / 100, rel=0.03)


def test_the_same_hour_of_earlier_days_is_learned() -> None:
    """A day that repeats, with a doubling at ten: just before it, only the day's memory knows."""

    def day(t: float) -> float:
        return 10.0 if t % DAY_S < 36_000 else 20.0

    settings = ForecastSettings(horizon_s=600)
    forecast = DemandForecast(settings)
    for step in range(int(DAY_S / 300)):
        forecast.days.remember(step * 300.0, day(step * 300.0))
    fed(day, 35_800, forecast)
    assert forecast.forecast(35_800).upper >= 10
    made = forecast._methods(35_800)
    assert made["day"] == pytest.approx(20.0, rel=0.05)
    assert made["level"] == pytest.approx(10.0)


def test_the_margin_covers_its_quantile_of_a_noisy_load() -> None:
    rng = random.Random(4)
    forecast = fed(lambda t: rng.gauss(20, 3) + 5 * math.sin(t / 2000), 6 * 3600)
    assert forecast.calibration is not None
    assert 0.85 <= forecast.calibration <= 0.97


def test_bursts_widen_the_margin() -> None:
    calm = fed(lambda _: 10.0, 7200).forecast(7200)
    bursty = fed(lambda t: 30.0 if t % 1000 < 120 else 10.0, 7200).forecast(7200)
    assert bursty.upper / bursty.expected > 1.2 * calm.upper / calm.expected


def test_bad_values_are_refused() -> None:
    for rate in (-1.0, math.nan):
        with pytest.raises(ServingModelError, match="observed rate"):
            DemandForecast().observe(10, rate)
    with pytest.raises(ServingModelError, match="horizon"):
        ForecastSettings(horizon_s=0)
    with pytest.raises(ServingModelError, match="quantile"):
        ForecastSettings(quantile=1)
