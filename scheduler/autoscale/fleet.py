"""The replicas of one service over GPU types, decided over and over: forecast, panic, cheapest addition, careful removal.

    decision = fleet.decide(observation)         every second; None: nothing changes

In this order:

- panic: the last ten seconds exceed what is live (starting replicas included), or more requests than the SLO lets be
  late have waited half the TTFT target while nothing starts. Acts at once, on those seconds, without averages. Where they
  exceed what is ready, or nothing is, the queue that grows until another replica is ready counts as load, too, and is not added
  for again until it should be worked off.
- forecast: every `period_s`, the quantile of the load when a replica asked for now would be ready. Where it exceeds what is live
  by more than `forecast_tolerance`, what is missing is added cheapest first; where the whole mix chosen anew is cheaper by
  more than `resolve_gain`, the new types start and the old ones leave when those are ready.
- budget: where what is live costs more per hour than it may, the mix within the budget that carries most remains.
- domains: where what is live stands in too few failure domains, or would carry too little without one of them, the mix of which
  that is not so is started beside it, or in its place where there is no room for both.
- switch: where another mix is cheaper by more than `resolve_gain`, for the load of the last `down_after_s` and for what is
  expected, it is started beside what is live.
- idle: what the load of the last `down_after_s` did not need leaves, one type at a time, none of which a replica may
  still start, and only if the replicas that are ready carry the load without it.

Load is requests per second by bucket; the forecast is of the sum, and buckets keep their shares of the last minutes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..errors import ServingModelError
from .columns import TOLERANCE, LimitKind, domains_of
from .day_profile import DayProfile
from .demand_forecast import BIN_S, DemandForecast, ForecastSettings
from .domain_loss import bears_loss, worst_loss
from .mix import Column, Effort, Limits, Mix, Switching, allowed, binding, cheapest, spread
from .step_model import Slo

CARRIED_GAIN = 0.01
"""Where the limits leave no room beside what runs, replicas are exchanged for this much more of the load."""
DAY_S = 86_400.0
RATE_S = 10
"""Seconds over which an observation's rates are counted."""


class Cause(Enum):
    """Why the replicas change."""

    FORECAST = "forecast"
    PANIC = "panic"
    IDLE = "idle"
    SWITCH = "switch"
    BUDGET = "budget"
    DOMAINS = "domains"


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Constants of the decisions."""

    start_s: float = 60.0
    """From a decision to a ready replica."""
    period_s: float = 30.0
    down_after_s: float = 300.0
    """A lower number must have been enough for this long."""
    resolve_gain: float = 0.08
    """A whole new mix must be cheaper by more than this part."""
    switch_horizon_s: float = 3600.0
    """The time over which a started replica must earn its start."""
    quantile: float = 0.9
    shares_s: float = 300.0
    """Time constant of the buckets' shares."""
    panic_tolerance: float = 1.1
    """Ten seconds may exceed what is live by this factor: arrivals vary."""
    forecast_tolerance: float = 1.05
    """The forecast's quantile may exceed what is live by this factor: it is not known more exactly, and what is missing at one plan is
    often enough at the next."""
    overdue_s: int = 3
    """Seconds in a row with more overdue requests than the SLO tolerates: one long prompt passes."""
    removal_s: float = 60.0
    """Between two removals."""
    panic_step: float = 1.05
    """A queue without overload asks for this much more than what is live."""
    backlog_s: float = 60.0
    """Time in which requests that wait too long shall be worked off; a start where that takes longer."""
    panic_most: float = 2.0
    """No replica is added for a queue where what is live but for one carries this many times the load and the rate that works it
    off: computed rates may be wrong by as much, and beyond that another replica does not shorten it."""
    effort: Effort = field(default_factory=lambda: Effort(nodes=500, seconds=None))

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and self.start_s >= 0):
            raise ServingModelError(f"the start time is {self.start_s:g} s; it must be zero or more")
        if self.down_after_s < self.start_s:
            raise ServingModelError(
                f"the window before replicas leave ({self.down_after_s:g} s) is shorter than a start"
                f" ({self.start_s:g} s): they would leave and be missed before they are back; make it longer"
            )

    @property
    def work_off_s(self) -> float:
        """Time in which the queue of an overload is worked off, from when what was asked for is ready."""
        return max(self.backlog_s, self.start_s)

    @property
    def forecast(self) -> ForecastSettings:
        return ForecastSettings(horizon_s=self.start_s + self.period_s, quantile=self.quantile)


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known at one second."""

    now_s: float
    rates: tuple[float, ...]
    """Requests per second by bucket over the last ten seconds."""
    overdue: int
    """Requests that no replica has begun and that wait at least half the TTFT target."""
    ready: Mapping[str, int]
    starting: Mapping[str, int]
    in_flight: int = 0

    @property
    def live(self) -> dict[str, int]:
        keys = {*self.ready, *self.starting}
        return {key: self.ready.get(key, 0) + self.starting.get(key, 0) for key in sorted(keys)}


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas wanted from now on, by column."""

    target: Mapping[str, int]
    cause: Cause
    load_rps: float
    """The load that they are for."""


@dataclass(slots=True)
class Fleet:
    """One service's state between decisions."""

    columns: Sequence[Column]
    limits: Limits
    slo: Slo
    settings: FleetSettings
    rest_until_s: float = -math.inf
    """No replica leaves before: whoever begins with replicas that run has not seen what they were needed for."""
    days: DayProfile = field(default_factory=DayProfile)
    """Of the load, from before."""
    forecast: DemandForecast = field(init=False)
    limited: LimitKind | None = None
    """What kept the last addition from carrying its whole load; None: nothing, or there was none since the load fits."""
    wanted_rps: float = 0.0
    """The load of that addition."""
    exposed: tuple[float, str] | None = None
    """Less than `Limits.domain_reserve`, although nothing can be added for it: the part of the load that is carried without a failure
    domain, and that domain."""
    _shares: list[float] = field(default_factory=list)
    _next_bin_s: float = 0.0
    _next_plan_s: float = 0.0
    _needed: deque[tuple[float, float]] = field(default_factory=deque)
    _last_switch_s: float = -math.inf
    _last_wait_s: float = -math.inf
    _last_removal_s: float = -math.inf
    _futile_until_s: float = -math.inf
    _added_s: dict[str, float] = field(default_factory=dict)
    """When a replica was added last, by column."""
    _additions: deque[tuple[float, int, bool]] = field(default_factory=deque)
    """Of the last day: when, how many replicas, and whether in a panic."""
    _overdue_s: int = 0
    _bought_until_s: float = -math.inf
    """Until then a queue is one that replicas were added for already, and these stay."""

    def __post_init__(self) -> None:
        self.forecast = DemandForecast(self.settings.forecast, self.days)

    @property
    def late_share(self) -> float:
        """The part of the replicas added for load in the last day that were added when it was there already (a panic), with one
        such addition before all that are known."""
        late = sum(count for _, count, in_panic in self._additions if in_panic)
        return (late + 1) / (sum(count for _, count, _ in self._additions) + 1)

    @property
    def needed_rps(self) -> float:
        """The most that replicas were wanted for in the last `down_after_s`."""
        return max((total for _, total in self._needed), default=0.0)

    def begin(self, rates: Sequence[float], now_s: float = 0.0) -> dict[str, int]:
        """Replicas for a known first load."""
        self._shares = _normalised(rates)
        self._next_bin_s = now_s + BIN_S
        self._next_plan_s = now_s + self.settings.period_s
        return dict(self._cheapest(rates).replicas)

    def adopt(
        self, columns: Sequence[Column], limits: Limits, settings: FleetSettings, shares: Sequence[float]
    ) -> None:
        """Speeds, prices, limits or start times have changed; what was seen of the load stays.

        Args:
            shares: of the buckets, used until there is a load."""
        if {c.key for c in columns} != {c.key for c in self.columns}:
            self._futile_until_s = -math.inf
        self.columns, self.limits, self.settings = columns, limits, settings
        self.forecast.settings = settings.forecast
        self._shares = self._shares or _normalised(shares)

    def plan_soon(self) -> None:
        """Plan in the next decision: what replicas sustain, or what they may draw, is different from now on."""
        self._next_plan_s = self._futile_until_s = -math.inf

    def decide(self, seen: Observation) -> Decision | None:
        """What to change now, or None."""
        if seen.now_s >= self._next_bin_s:
            self._learn(seen)
        if not self._shares:
            self._shares = _normalised(seen.rates)
        if self._shares and self._costs_too_much(seen.live):
            load = self.load(sum(seen.rates))
            return Decision(dict(self._cheapest(load, live=seen.live).replicas), Cause.BUDGET, sum(load))
        decision = self._panic(seen) if seen.now_s >= self._futile_until_s else None
        if decision is not None and not _changes(decision.target, seen.live):
            # The limits leave nothing to add: not asked again every second.
            self._futile_until_s = seen.now_s + self.settings.period_s
        if decision is None and seen.now_s >= self._next_plan_s:
            self._next_plan_s = seen.now_s + self.settings.period_s
            decision = self._planned(seen)
        if decision is None or not _changes(decision.target, seen.live):
            return None
        self._remember(decision, seen)
        return decision

    def _remember(self, decision: Decision, seen: Observation) -> None:
        live = seen.live
        more = {k: count - live.get(k, 0) for k, count in decision.target.items() if count > live.get(k, 0)}
        self._added_s |= dict.fromkeys(more, seen.now_s)
        if more and decision.cause in (Cause.FORECAST, Cause.PANIC):
            self._additions.append((seen.now_s, sum(more.values()), decision.cause is Cause.PANIC))
        while self._additions and self._additions[0][0] < seen.now_s - DAY_S:
            self._additions.popleft()

    def _costs_too_much(self, live: Mapping[str, int]) -> bool:
        """What is live is above the budget: it was lowered, or prices have risen."""
        most = self.limits.budget_per_h
        cost = sum(c.cost_per_h * live.get(c.key, 0) for c in self.columns)
        return most is not None and cost > most + TOLERANCE

    def _learn(self, seen: Observation) -> None:
        missed = math.floor((seen.now_s - self._next_bin_s) / BIN_S)
        self._next_bin_s += BIN_S * (1 + missed)
        total = sum(seen.rates)
        self.forecast.observe(seen.now_s, total)
        weight = 1 - math.exp(-BIN_S / self.settings.shares_s)
        if not self._shares:
            self._shares = _normalised(seen.rates)
        elif total > 0:
            self._shares = [
                old + weight * (rate / total - old)
                for old, rate in zip(self._shares, seen.rates, strict=True)
            ]

    def _panic(self, seen: Observation) -> Decision | None:
        live, load = seen.live, self.load(sum(seen.rates))
        tolerated = (1 - self.slo.percentile / 100) * RATE_S * sum(seen.rates)
        self._overdue_s = self._overdue_s + 1 if seen.overdue > tolerated else 0
        waits = (
            self._overdue_s >= self.settings.overdue_s
            and not any(seen.starting.values())
            and seen.now_s >= self._bought_until_s
        )
        if not any(load):
            return None
        asked = self._with_queue(load, seen.ready)
        if not (waits or self._may_exceed(asked, live)):
            return None
        now = spread(self.columns, asked, live)
        if now.fullest <= self.settings.panic_tolerance and not waits and not self._misses(load, live):
            return None
        self._note(seen.now_s, sum(seen.rates))
        factor = 1.0
        if waits:
            self._last_wait_s = seen.now_s
            if not self._shortens(seen, now.fullest) and not self._misses(load, live):
                return None
            factor = max(1.0, self.settings.panic_step / now.fullest) if now.fullest > 0 else 1.0
        elif asked is not load:
            self._bought_until_s = seen.now_s + self.settings.start_s + self.settings.work_off_s
        return self._add([rate * factor for rate in asked], live, seen.now_s, Cause.PANIC)

    def _with_queue(self, load: list[float], ready: Mapping[str, int]) -> list[float]:
        """The load, and where it overloads what is ready, or nothing is, what works off the queue that grows until a replica asked
        for now is ready."""
        settings = self.settings
        if not self._may_exceed(load, ready):
            return load
        routed = spread(self.columns, load, ready)
        able = [b for b, rate in enumerate(load) if rate > 0 and any(c.rates[b] > 0 for c in self.columns)]
        total = sum(load[b] for b in able)
        carried = sum(load[b] for b in able if b not in routed.impossible) / max(1.0, routed.fullest)
        if total <= settings.panic_tolerance * carried:
            return load
        return self.load(sum(load) + (total - carried) * settings.start_s / settings.work_off_s)

    def _shortens(self, seen: Observation, fullest: float) -> bool:
        """Whether one more replica may shorten the queue of requests that wait too long."""
        live, total = sum(seen.live.values()), sum(seen.rates)
        asked = self.settings.panic_most * (1 + seen.overdue / self.settings.backlog_s / total)
        return live <= 1 or fullest * asked > (live - 1) / live

    def _may_exceed(self, load: Sequence[float], live: Mapping[str, int]) -> bool:
        """A bound without the solver: every bucket on a column that is best for it, given what is live."""
        room = {c.key: float(live.get(c.key, 0)) for c in self.columns}
        for bucket, rate in enumerate(load):
            left = rate
            for column in self._order(bucket):
                if left <= 0:
                    break
                taken = min(left, room[column.key] * column.rates[bucket])
                room[column.key] -= taken / column.rates[bucket]
                left -= taken
            if left > 1e-9 and any(c.rates[bucket] > 0 for c in self.columns):
                return True
        return False

    def _order(self, bucket: int) -> list[Column]:
        """Columns that serve the bucket, the one with the least use for other buckets first."""
        return sorted((c for c in self.columns if c.rates[bucket] > 0), key=lambda c: (max(c.rates), c.key))

    def _planned(self, seen: Observation) -> Decision | None:
        if not self._shares:
            return None
        ahead = self.forecast.forecast(seen.now_s)
        load = self.load(ahead.upper)
        self._note(seen.now_s, ahead.upper)
        live = seen.live
        level = spread(self.columns, load, live)
        if level.fullest > self.settings.forecast_tolerance or self._misses(load, live):
            return self._add(load, live, seen.now_s)
        self.limited = self.exposed = None
        if self._in_too_few_domains(live):
            return self._over_domains(load, live)
        reserve = self._reserved(load, live)
        return reserve if reserve is not None else self._remove(load, seen)

    def _reserved(self, load: Sequence[float], live: Mapping[str, int]) -> Decision | None:
        """What is missing for the loss of a failure domain; None: nothing, or nothing that can be added."""
        if bears_loss(self.columns, load, live, self.limits):
            return None
        try:
            added = self._cheapest(load, least=live).replicas
        except ServingModelError:
            added = live  # it is above the limits already
        if not bears_loss(self.columns, load, added, self.limits):
            added = self._over_domains(load, live).target
        before, after = (worst_loss(self.columns, load, replicas) for replicas in (live, added))
        if after[0] < self.limits.domain_reserve - TOLERANCE:
            self.exposed = after
        return Decision(added, Cause.DOMAINS, sum(load)) if after[0] > before[0] + TOLERANCE else None

    def _over_domains(self, load: Sequence[float], live: Mapping[str, int]) -> Decision:
        """What is live stands in too few failure domains: the mix that does not, beside it where there is room."""
        whole = self._cheapest(load, live=live)
        target = self._beside(whole, live) or self._instead(whole, live)
        return Decision(target, Cause.DOMAINS, sum(load))

    def _add(
        self, load: Sequence[float], live: Mapping[str, int], now_s: float, cause: Cause = Cause.FORECAST
    ) -> Decision:
        """Cheapest first; the whole anew where the addition is too dear."""
        whole = self._cheapest(load, live=live)
        try:
            added = self._cheapest(load, least=live)
        except ServingModelError:
            if not self._in_too_few_domains(live):
                raise
            return self._over_domains(load, live)  # there is no room for them beside all that is live
        self.wanted_rps = sum(load)
        self.limited = self._held_back(load, max(added.carried, whole.carried))
        if self._is_dear(added, whole) and whole.carried >= added.carried:
            both = self._beside(whole, live)
            if both is not None:
                self._last_switch_s = now_s
                return Decision(both, cause, sum(load))
        if whole.carried > added.carried + CARRIED_GAIN:
            return Decision(self._instead(whole, live), Cause.SWITCH, sum(load))
        return Decision(added.replicas, cause, sum(load))

    def _in_too_few_domains(self, live: Mapping[str, int]) -> bool:
        return len(domains_of(self.columns, live)) < self.limits.min_domains

    def _held_back(self, load: Sequence[float], carried: float) -> LimitKind | None:
        if carried >= 1:
            return None
        return binding(self.columns, load, self.limits, carried, self.settings.effort)

    def _remove(self, load: Sequence[float], seen: Observation) -> Decision | None:
        if seen.now_s < max(self.rest_until_s, self._bought_until_s):
            return None
        if seen.now_s - self._last_wait_s < self.settings.down_after_s:
            return None
        if seen.now_s - self._last_removal_s < self.settings.removal_s:
            return None
        peak = self.load(self.needed_rps)
        kept = self._cheapest(peak, most=self._all(seen.live))
        if kept.carried < 1:
            return None
        return self._switched(kept, peak, load, seen) or self._left(kept, load, seen)

    def _all(self, live: Mapping[str, int]) -> dict[str, int]:
        """Also the columns without a replica."""
        return {c.key: live.get(c.key, 0) for c in self.columns}

    def _switched(
        self, kept: Mix, peak: Sequence[float], load: Sequence[float], seen: Observation
    ) -> Decision | None:
        """Another mix beside what is live. It must be cheaper for what is expected, too: what only the window needs was bought
        already, and leaves with it."""
        live = seen.live
        if seen.now_s - self._last_switch_s < self.settings.start_s + self.settings.down_after_s:
            return None
        whole = self._cheapest(peak, live=live)
        if not self._is_dear(kept, whole):
            return None
        fewer = self._cheapest(load, most=self._all(live))
        if not self._is_dear(fewer, self._cheapest(load, live=live)):
            return None
        both = self._beside(whole, live)
        if both is None or not _changes(both, live):
            return None
        self._last_switch_s = seen.now_s
        return Decision(both, Cause.SWITCH, sum(load))

    def _is_dear(self, mix: Mix, whole: Mix) -> bool:
        """Whether the whole anew is cheaper by enough."""
        return mix.cost_per_h > (1 + self.settings.resolve_gain) * whole.cost_per_h

    def _left(self, kept: Mix, load: Sequence[float], seen: Observation) -> Decision | None:
        """One type without what the window did not need."""
        live = seen.live
        surplus = {
            c.key: (live.get(c.key, 0) - kept.replicas[c.key]) * c.cost_per_h
            for c in self.columns
            if live.get(c.key, 0) > kept.replicas[c.key]
            and seen.now_s - self._added_s.get(c.key, -math.inf) >= self.settings.forecast.horizon_s
        }
        for key in sorted(surplus, key=lambda key: (-surplus[key], key)):
            target = dict(live) | {key: kept.replicas[key]}
            ready = {k: min(count, target.get(k, 0)) for k, count in seen.ready.items()}
            if (
                spread(self.columns, load, ready).fullest <= 1
                and not self._misses(load, ready)
                and self._as_reserved(load, seen.ready, ready)
            ):
                self._last_removal_s = seen.now_s
                return Decision(target, Cause.IDLE, sum(load))
        return None

    def _as_reserved(
        self, load: Sequence[float], before: Mapping[str, int], after: Mapping[str, int]
    ) -> bool:
        """Whether the loss of a failure domain is borne after a removal, or at least as well as before it."""
        if bears_loss(self.columns, load, after, self.limits):
            return True
        was, is_now = (worst_loss(self.columns, load, replicas)[0] for replicas in (before, after))
        return is_now >= was - TOLERANCE

    def _beside(self, whole: Mix, live: Mapping[str, int]) -> dict[str, int] | None:
        """The new mix beside the old replicas, if the limits leave room for both."""
        both = {c.key: max(whole.replicas[c.key], live.get(c.key, 0)) for c in self.columns}
        return both if allowed(self.columns, both, self.limits) else None

    def _instead(self, whole: Mix, live: Mapping[str, int]) -> dict[str, int]:
        """The new mix with as many old replicas beside it as the limits allow; the least useful go first."""
        both = {c.key: max(whole.replicas[c.key], live.get(c.key, 0)) for c in self.columns}
        for column in sorted(self.columns, key=lambda c: (max(c.rates), c.key)):
            while both[column.key] > whole.replicas[column.key] and not allowed(
                self.columns, both, self.limits
            ):
                both[column.key] -= 1
        return both

    def _misses(self, load: Sequence[float], replicas: Mapping[str, int]) -> bool:
        """Some bucket that a column could serve has no replica of such a column."""
        return any(
            rate > 0
            and any(c.rates[b] > 0 for c in self.columns)
            and not any(c.rates[b] > 0 and replicas.get(c.key, 0) > 0 for c in self.columns)
            for b, rate in enumerate(load)
        )

    def _cheapest(
        self,
        load: Sequence[float],
        live: Mapping[str, int] | None = None,
        least: Mapping[str, int] | None = None,
        most: Mapping[str, int] | None = None,
    ) -> Mix:
        switching = None
        if live is not None:
            start = (self.settings.start_s + self.settings.down_after_s) / self.settings.switch_horizon_s
            switching = Switching(live, start_weight=start)
        return cheapest(
            self.columns, load, self.limits, switching, self.settings.effort, live, least=least, most=most
        )

    def load(self, total: float) -> list[float]:
        """So many requests per second, by bucket."""
        return [total * share for share in self._shares]

    def _note(self, now_s: float, total: float) -> None:
        self._needed.append((now_s, total))
        while self._needed[0][0] < now_s - self.settings.down_after_s:
            self._needed.popleft()


def _normalised(rates: Sequence[float]) -> list[float]:
    total = sum(rates)
    return [rate / total for rate in rates] if total > 0 else []


def _changes(target: Mapping[str, int], live: Mapping[str, int]) -> bool:
    return any(target.get(key, 0) != live.get(key, 0) for key in {*target, *live})
