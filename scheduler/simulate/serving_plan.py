"""The answer of `busbar plan-capacity`: fleets and bounds on one load, and what to buy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..autoscale.fleet import FleetSettings
from ..autoscale.mix import Limits
from ..autoscale.step_model import Slo
from ..errors import ServingModelError
from ..fit.model import ModelShape
from .serving_cluster import ServingSettings
from .serving_engine import Policy, run
from .serving_policies import HPA_MOST, Bounds, Hpa, Ours, Static, bounds, rated_in_flight, static_replicas
from .serving_pools import Pool, columns_of, step_models
from .serving_result import ServingResult
from .serving_trace import Buckets, ServingTrace, rates_by_minute

Progress = Callable[[str, float, float], None]
POWER_DOMAIN = ""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a load."""

    pools: tuple[Pool, ...]
    slo: Slo
    shape: ModelShape
    start_s: float = 60.0
    sleeping: int = 0
    wake_s: float = 5.0
    warm: int = 0
    budget_per_h: float | None = None
    watts: float | None = None
    quota: int | None = None
    min_replicas: int = 1
    policies: tuple[str, ...] = ("busbar", "hpa", "static")
    warm_up_s: float = 300.0

    def __post_init__(self) -> None:
        for name, value in (("start", self.start_s), ("wake", self.wake_s)):
            if not (math.isfinite(value) and value >= 0):
                raise ServingModelError(f"the {name} time is {value:g} s; it must be zero or more")
        if self.sleeping and self.warm:
            raise ServingModelError(
                "replicas sleep either from the beginning, for nothing, or as scaling.warm does it; give one"
            )
        if (self.sleeping or self.warm) and self.wake_s > self.start_s:
            raise ServingModelError("a sleeping replica takes longer to wake than another to start; use none")

    @property
    def limits(self) -> Limits:
        return Limits(
            stock={pool.type: pool.stock for pool in self.pools},
            quota=self.quota,
            watts={} if self.watts is None else {POWER_DOMAIN: self.watts},
            budget_per_h=self.budget_per_h,
            min_replicas=self.min_replicas,
        )

    @property
    def lead_s(self) -> float:
        """How far ahead the fleet looks: sleeping replicas are there sooner."""
        return self.wake_s if self.sleeping else self.start_s


@dataclass(frozen=True, slots=True)
class Plan:
    """Fleets on one load, beside the bounds."""

    trace: str
    requests: int
    bounds: Bounds
    static_replicas: int
    results: tuple[ServingResult, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Types that cannot hold the model, and why."""

    def to_json(self) -> dict[str, object]:
        """All numbers."""
        rows = []
        for result in self.results:
            ratio = round(result.cost_per_h / self.bounds.mix_per_h, 4) if self.bounds.mix_per_h else None
            rows.append(result.to_json() | {"cost_over_bound": ratio})
        return {
            "trace": self.trace,
            "requests": self.requests,
            "bound_mix_per_h": round(self.bounds.mix_per_h, 4),
            "bound_single_per_h": round(self.bounds.single_per_h, 4),
            "best_single_type": self.bounds.single.key,
            "bound_peak_replicas": dict(self.bounds.peak),
            "carried_in_the_worst_minute": round(self.bounds.carried, 4),
            "busiest_minute_without_limits": dict(self.bounds.unlimited_peak),
            "static_replicas": self.static_replicas,
            "fleets": rows,
            "cannot_hold_the_model": dict(self.refused),
        }

    def sentences(self, question: Question) -> list[str]:
        """What to buy, and what does not fit."""
        found = [f"{kind} is left out: {why}." for kind, why in sorted(self.refused.items())]
        stock = {pool.type: pool.stock for pool in question.pools}
        wanted = {key: count for key, count in sorted(self.bounds.unlimited_peak.items()) if count}
        text = ", ".join(f"{count} {key}" for key, count in wanted.items())
        found.append(f"The busiest minute costs least on {text}, if nothing limits it.")
        missing = {key: count - stock[key] for key, count in wanted.items() if count > stock[key]}
        if missing:
            more = ", ".join(f"{count} more {key}" for key, count in missing.items())
            found.append(f"That needs {more} than the pools have.")
        if self.bounds.carried < 1:
            found.append(
                f"Within stock, quota, watts and budget, the worst minute carries {100 * self.bounds.carried:.1f} % of"
                " its load: the SLO cannot hold then, whatever decides. Raise a limit or lower the load."
            )
        single = self.bounds.single.key
        most = max([self.static_replicas, *(r.peak[single] for r in self.results if r.policy != "busbar")])
        if most > stock[single]:
            found.append(
                f"The HPA and the static fleet are compared as if there were {most} {single}; the pool has"
                f" {stock[single]}."
            )
        return found


def answer(trace: ServingTrace, question: Question, progress: Progress | None = None) -> Plan:
    """Simulate the fleets on the load.

    Raises:
        ServingModelError: bad numbers, a load that ends with the warm-up, or no pool holds the model or meets the SLO.
    """
    buckets = Buckets.of(trace)
    models, refused = step_models(question.pools, question.shape)
    columns = columns_of(question.pools, models, buckets, question.slo)
    if trace.duration_s < question.warm_up_s + 60:
        raise ServingModelError(
            f"{trace.name}: the load lasts {trace.duration_s:.0f} s; it must last at least"
            f" {question.warm_up_s + 60:.0f} s, because the first {question.warm_up_s:.0f} s are not counted"
        )
    minutes = rates_by_minute(trace, buckets)

    def show(name: str) -> Callable[[float, float], None]:
        return lambda done, total: progress(name, done, total) if progress is not None else None

    bound = bounds(columns, minutes, question.limits, question.warm_up_s, show("bound"))
    static = static_replicas(bound.single, minutes)
    most = math.ceil(HPA_MOST * static)
    results = []
    for name in question.policies:
        policy: Policy
        if name == "busbar":
            fleet = FleetSettings(start_s=question.lead_s, down_after_s=max(300.0, question.lead_s))
            policy = Ours.of(columns, question.limits, question.slo, fleet, trace.earlier)
        elif name == "hpa":
            rated = rated_in_flight(models[bound.single.key], bound.single, buckets.means, minutes)
            policy = Hpa(bound.single, rated, most)
        else:
            policy = Static(bound.single, static)
        ours = name == "busbar"
        settings = ServingSettings(
            question.start_s,
            question.sleeping if ours else 0,
            question.wake_s,
            question.warm_up_s,
            question.warm if ours else 0,
        )
        result = run(trace, buckets, columns, models, question.slo, policy, settings, show(name))
        if isinstance(policy, Ours):
            result.calibration = policy.fleet.forecast.calibration
        results.append(result)
    return Plan(trace.name, len(trace), bound, static, tuple(results), refused)
