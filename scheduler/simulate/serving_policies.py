"""What a fleet is compared with: ours, a Kubernetes HPA, a static fleet, and two bounds.

- `Ours`: `autoscale.fleet`, the code that decides.
- `Hpa`: requests in flight per replica at what a replica has in flight at 70 % of its rated load; every 15 s over the
  mean of 60 s, 10 % tolerance, 300 s before it goes down, the best single type, at most 1.5 times the static fleet.
- `Static`: the best single type for the 99.9 % minute and 8 % more, always; what failed is asked for anew.
- `bounds`: for each minute, clairvoyant and without delay, start or margin, the cheapest mix and the cheapest number of
  the best single type.

The best single type is the one whose bound is the cheapest. Single types ignore the stock: where the stock is too
small, only a mix exists, and the comparison is with what one would have to buy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from ..autoscale.day_profile import BIN_S
from ..autoscale.fleet import Cause, Decision, Fleet, FleetSettings, Observation
from ..autoscale.mix import Column, Effort, Limits, cheapest
from ..autoscale.step_model import Bucket, Slo, StepModel, in_flight
from ..autoscale.warmth import SleepTerms, WantedHistory, missed
from ..errors import ServingModelError

HPA_TARGET, HPA_PERIOD_S, HPA_MEAN_S, HPA_TOLERANCE, HPA_DOWN_S, HPA_MOST = 0.7, 15, 60, 0.1, 300, 1.5
STATIC_MINUTE, STATIC_MARGIN = 0.999, 1.08


@dataclass(slots=True)
class Ours:
    """The mix, by forecast and panic."""

    fleet: Fleet
    name: str = "busbar"
    asked: Limits = field(default_factory=Limits)
    """The limits while all nodes are there."""
    wanted: WantedHistory = field(default_factory=WantedHistory)
    wake_s: float = 0.0
    """Until one that sleeps serves."""

    @classmethod
    def of(
        cls,
        columns: Sequence[Column],
        limits: Limits,
        slo: Slo,
        settings: FleetSettings,
        earlier: Sequence[tuple[float, float]] = (),
        wake_s: float = 0.0,
    ) -> Self:
        fleet = Fleet(columns, limits, slo, settings)
        for at_s, rate in earlier:
            # A window of ServeGen is ten minutes: both of the profile's bins in it.
            for part in range(2):
                fleet.forecast.days.remember(at_s + part * BIN_S, rate)
        return cls(fleet, asked=limits, wake_s=wake_s)

    def begin(self, rates: Sequence[float], now_s: float = 0.0) -> Mapping[str, int]:
        return self.fleet.begin(rates, now_s)

    def decide(self, seen: Observation) -> Decision | None:
        try:
            return self.fleet.decide(seen)
        except ServingModelError:
            if self.fleet.limits.stock == self.asked.stock:
                raise
            return None  # too little is left for the least number of replicas; the operator says so and waits

    def hold(self, stock: Mapping[str, int]) -> None:
        """As the operator's `limits_of`: what is away is no stock, and a domain without stock is not asked for."""
        held = {pool: min(most, stock.get(pool, most)) for pool, most in self.asked.stock.items()}
        self.fleet.limits = replace(self.asked, stock=held).over_domains(self.fleet.columns)

    def sleepers(self, now_s: float, wanted: int, most: int) -> int:
        fleet, settings = self.fleet, self.fleet.settings
        late = missed(fleet.forecast.calibration, fleet.late_share, settings.quantile)
        self.wanted.observe(now_s, wanted)
        terms = SleepTerms(settings.start_s, self.wake_s, late, settings.quantile)
        return self.wanted.choose(wanted, most, terms).count


@dataclass(slots=True)
class Static:
    """A fixed number of one type, asked for anew where failures took some of it and there is room."""

    column: Column
    replicas: int
    name: str = "static"
    stock: Mapping[str, int] = field(default_factory=dict)
    """Accelerators by pool that are there; a pool that is missing is not limited."""

    def begin(self, rates: Sequence[float], now_s: float = 0.0) -> Mapping[str, int]:
        return {self.column.key: self.replicas}

    def decide(self, seen: Observation) -> Decision | None:
        there = self.stock.get(self.column.pool)
        room = self.replicas if there is None else there // self.column.accelerators
        wanted = min(self.replicas, room)
        if seen.live.get(self.column.key, 0) >= wanted:
            return None
        return Decision({self.column.key: wanted}, Cause.FORECAST, sum(seen.rates))

    def hold(self, stock: Mapping[str, int]) -> None:
        self.stock = stock

    def sleepers(self, now_s: float, wanted: int, most: int) -> int:
        return 0


@dataclass(slots=True)
class Hpa:
    """The usual rule on requests in flight."""

    column: Column
    rated: float
    """Requests in flight of one replica at its target load."""
    most: int
    name: str = "hpa"
    _recent: deque[int] = field(default_factory=deque)
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)

    def begin(self, rates: Sequence[float], now_s: float = 0.0) -> Mapping[str, int]:
        work = sum(rate / self.column.rates[b] for b, rate in enumerate(rates) if self.column.rates[b] > 0)
        begun = max(1, min(math.ceil(work / HPA_TARGET), self.most))
        self._wanted.append((now_s, begun))
        return {self.column.key: begun}

    def decide(self, seen: Observation) -> Decision | None:
        self._recent.append(seen.in_flight)
        if len(self._recent) > HPA_MEAN_S:
            self._recent.popleft()
        if seen.now_s % HPA_PERIOD_S:
            return None
        now = seen.live.get(self.column.key, 0)
        mean = sum(self._recent) / len(self._recent)
        ratio = mean / (self.rated * max(now, 1))
        wanted = now if abs(ratio - 1) <= HPA_TOLERANCE else math.ceil(mean / (self.rated))
        wanted = max(1, min(wanted, self.most))
        self._wanted.append((seen.now_s, wanted))
        while self._wanted[0][0] < seen.now_s - HPA_DOWN_S:
            self._wanted.popleft()
        target = wanted if wanted >= now else min(now, max(count for _, count in self._wanted))
        if target == now:
            return None
        cause = Cause.FORECAST if target > now else Cause.IDLE
        return Decision({self.column.key: target}, cause, sum(seen.rates))

    def hold(self, stock: Mapping[str, int]) -> None:
        """It ignores the stock."""

    def sleepers(self, now_s: float, wanted: int, most: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Clairvoyant costs per hour, and what the busiest minute takes."""

    mix_per_h: float
    single_per_h: float
    single: Column
    carried: float
    """Of the minute that the limits let the mix carry least; 1 if all is carried."""
    peak: Mapping[str, int]
    """Most replicas of each column in any minute's mix."""
    unlimited_peak: Mapping[str, int]
    """The cheapest mix of the busiest minute without stock, quota, power or budget."""


def bounds(
    columns: Sequence[Column],
    minutes: Sequence[Sequence[float]],
    limits: Limits,
    warm_up_s: float = 300.0,
    progress: Callable[[float, float], None] | None = None,
) -> Bounds:
    """Over the counted minutes.

    Raises:
        ServingModelError: no type serves all buckets within the SLO, so there is nothing to compare with.
    """
    counted = list(minutes[math.ceil(warm_up_s / 60) :]) or list(minutes)
    single = best_single(columns, counted)
    cost, carried = 0.0, 1.0
    peak: dict[str, int] = {}
    effort = Effort(nodes=500, seconds=None, gap=1e-4)
    for number, load in enumerate(counted):
        mix = cheapest(columns, load, limits, effort=effort)
        cost += mix.cost_per_h
        carried = min(carried, mix.carried)
        peak = {key: max(peak.get(key, 0), count) for key, count in mix.replicas.items()}
        if progress is not None:
            progress(number + 1, len(counted))
    ones = sum(single.cost_per_h * _needed(single, load) for load in counted)
    busiest = max(counted, key=lambda load: _work(single, load))
    whole = [column for column in columns if column.power_cap >= 1]
    unlimited = cheapest(whole, busiest, Limits(min_replicas=limits.min_replicas), effort=effort)
    return Bounds(cost / len(counted), ones / len(counted), single, carried, peak, unlimited.replicas)


def best_single(columns: Sequence[Column], minutes: Sequence[Sequence[float]]) -> Column:
    """The type whose numbers per minute cost least, of those that serve every bucket that some type serves."""
    served = [b for b in range(len(minutes[0])) if any(c.rates[b] > 0 for c in columns)]
    able = [c for c in columns if c.power_cap >= 1 and all(c.rates[b] > 0 for b in served)]
    if not served or not able:
        raise ServingModelError(
            "no single GPU type of the pools serves all prompt lengths of this load within the SLO, so there is no"
            " single-type fleet to compare with; raise the SLO's TTFT or add a faster type"
        )
    return min(able, key=lambda c: (sum(c.cost_per_h * _needed(c, load) for load in minutes), c.key))


def static_replicas(column: Column, minutes: Sequence[Sequence[float]]) -> int:
    """For the 99.9 % minute and 8 % more."""
    loads = sorted(_work(column, load) for load in minutes)
    return max(1, math.ceil(STATIC_MARGIN * loads[min(int(STATIC_MINUTE * len(loads)), len(loads) - 1)]))


def rated_in_flight(
    model: StepModel, column: Column, buckets: Sequence[Bucket], minutes: Sequence[Sequence[float]]
) -> float:
    """Requests in flight of one replica that serves the trace's mean mix at `HPA_TARGET` of its full rate.

    (70 % of what is in flight at the full rate is far more than what is in flight at 70 % of the rate, and an HPA with
    that target stays overloaded: 78 % attainment at a higher cost on the Azure hour.)"""
    totals = [sum(load[b] for load in minutes) for b in range(len(buckets))]
    work = {b: total / column.rates[b] for b, total in enumerate(totals) if total > 0 and column.rates[b] > 0}
    all_work = sum(work.values())
    return sum(
        in_flight(model, buckets[b], HPA_TARGET * column.rates[b]) * part / all_work
        for b, part in work.items()
    )


def _work(column: Column, load: Sequence[float]) -> float:
    return sum(rate / column.rates[b] for b, rate in enumerate(load) if column.rates[b] > 0)


def _needed(column: Column, load: Sequence[float]) -> int:
    return max(1, math.ceil(_work(column, load) - 1e-9))
