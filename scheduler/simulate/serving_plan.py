"""The answer of `busbar plan-capacity`: fleets and bounds on one load, and what to buy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..autoscale.fleet import FleetSettings
from ..autoscale.mix import Column, Effort, Limits, cheapest
from ..autoscale.step_model import Slo, StepModel, kv_token_bytes
from ..errors import ServingModelError
from ..fit.model import ModelShape
from .serving_cluster import Moves, ServingSettings
from .serving_engine import Policy, run
from .serving_failures import Failures, NodePlaces
from .serving_policies import HPA_MOST, Bounds, Hpa, Ours, Static, bounds, rated_in_flight, static_replicas
from .serving_pools import Pool, columns_of, out_of_reach, step_models
from .serving_result import ServingResult, late_for_each
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
    caps: tuple[float, ...] = ()
    """Parts of their watts to which boards may be limited, so that more replicas have room within `watts`."""
    quota: int | None = None
    min_replicas: int = 1
    policies: tuple[str, ...] = ("busbar", "hpa", "static")
    warm_up_s: float = 300.0
    failures: Failures = field(default_factory=Failures)
    min_zones: int = 0
    """Zones of the pools in which replicas must stand."""
    zone_reserve: float = 0.0
    """The part of the load that the replicas outside of any one zone must carry."""

    def __post_init__(self) -> None:
        for name, value in (("start", self.start_s), ("wake", self.wake_s)):
            if not (math.isfinite(value) and value >= 0):
                raise ServingModelError(f"the {name} time is {value:g} s; it must be zero or more")
        if self.caps and self.watts is None:
            raise ServingModelError("caps are of use only where watts are limited; give --watts, too")
        if self.sleeping and self.warm:
            raise ServingModelError(
                "replicas sleep either from the beginning, for nothing, or as scaling.warm does it; give one"
            )
        if (self.sleeping or self.warm) and self.wake_s > self.start_s:
            raise ServingModelError("a sleeping replica takes longer to wake than another to start; use none")
        if self.sleeping and self.failures.any:
            raise ServingModelError(
                "replicas that sleep for nothing stand on no node, so nothing can fail with them; use warm, or no failures"
            )
        zones = {pool.zone for pool in self.pools if pool.zone}
        if self.min_zones > min(len(zones), self.min_replicas):
            raise ServingModelError(
                f"replicas are to stand in {self.min_zones} zones, with pools in {len(zones)} and at least"
                f" {self.min_replicas} replicas; name more zones (--pools TYPE:ZONE=…), or raise --min-replicas"
            )
        if not 0 <= self.zone_reserve <= 1:
            raise ServingModelError(
                f"the zone reserve is {self.zone_reserve:g}; it is a part of the load, from 0 to 1"
            )
        if self.zone_reserve and self.min_zones < 2:
            raise ServingModelError(
                "a zone reserve is kept for the loss of one of the zones that --min-zones asks for; give at least 2"
            )

    @property
    def limits(self) -> Limits:
        return Limits(
            stock={pool.name: pool.stock for pool in self.pools},
            quota=self.quota,
            watts={} if self.watts is None else {POWER_DOMAIN: self.watts},
            budget_per_h=self.budget_per_h,
            min_replicas=self.min_replicas,
            min_domains=self.min_zones,
            domain_reserve=self.zone_reserve,
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
    """Pools that cannot hold the model, and why."""
    undisturbed: tuple[ServingResult, ...] = ()
    """The same fleets without failures; empty: none were asked for."""
    without_a_node: Mapping[str, float] = field(default_factory=dict)
    """Part of the busiest minute that is carried without one node of each pool."""
    beyond: tuple[int, str] = (0, "")
    """Requests that no pool serves within the SLO, and a sentence about them."""

    def to_json(self) -> dict[str, object]:
        """All numbers."""
        rows = []
        for result in self.results:
            ratio = round(result.cost_per_h / self.bounds.mix_per_h, 4) if self.bounds.mix_per_h else None
            row = result.to_json() | {"cost_over_bound": ratio}
            for calm in self.undisturbed:
                if calm.policy == result.policy:
                    row["attainment_without_failures"] = round(calm.attainment, 5)
                    row["cost_per_h_without_failures"] = round(calm.cost_per_h, 3)
                    row["late_for_each_lost_replica"] = late_for_each(result, calm)
            rows.append(row)
        return {
            "trace": self.trace,
            "requests": self.requests,
            "requests_no_pool_serves": self.beyond[0],
            "bound_mix_per_h": round(self.bounds.mix_per_h, 4),
            "bound_single_per_h": round(self.bounds.single_per_h, 4),
            "best_single_type": self.bounds.single.key,
            "bound_peak_replicas": dict(self.bounds.peak),
            "carried_in_the_worst_minute": round(self.bounds.carried, 4),
            "busiest_minute_without_limits": dict(self.bounds.unlimited_peak),
            "static_replicas": self.static_replicas,
            "fleets": rows,
            "cannot_hold_the_model": dict(self.refused),
            "carried_without_a_node": {key: round(part, 4) for key, part in self.without_a_node.items()},
        }

    def sentences(self, question: Question) -> list[str]:
        """What to buy, and what does not fit."""
        found = [f"{kind} is left out: {why}." for kind, why in sorted(self.refused.items())]
        found += filter(None, (self.beyond[1], *(result.unheld() for result in self.results)))
        stock = {pool.name: pool.stock for pool in question.pools}
        if any("@" in key and count for key, count in self.bounds.peak.items()):
            found.append(
                "Replicas of TYPE@PERCENT have their boards limited to so much of their watts; what that costs them is"
                " what was published for training on V100s, and half of it for decoding."
            )
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
        return [*found, *self._failed(question)]

    def _failed(self, question: Question) -> list[str]:
        """What failed, what became of the requests, and whether one node more is needed."""
        found = []
        for result, calm in zip(self.results, self.undisturbed, strict=True) if self.undisturbed else ():
            told = result.told
            each = late_for_each(result, calm)
            found.append(
                f"{result.policy}: {told.sentence()} {100 * result.attainment:.2f} % within the SLO,"
                f" {100 * calm.attainment:.2f} % without failures"
                + ("." if each is None else f": {each:.1f} requests late for each replica that failed.")
            )
        if not question.failures.any:
            return found
        short = {key: part for key, part in self.without_a_node.items() if part < 1}
        if not short:
            found.append("With any one node away, the pools still carry the busiest minute.")
        for key, part in sorted(short.items()):
            found.append(
                f"Without one node of {key}, the pools carry {100 * part:.1f} % of the busiest minute: for N+1, add a node."
            )
        return found


def answer(
    trace: ServingTrace,
    question: Question,
    progress: Progress | None = None,
    undisturbed: Sequence[ServingResult] = (),
) -> Plan:
    """Simulate the fleets on the load.

    Args:
        undisturbed: the same fleets on this load without failures, where that is known already.

    Raises:
        ServingModelError: bad numbers, a load that ends with the warm-up, or no pool holds the model or meets the SLO.
        TraceError: the load lasts too long.
    """
    trace.refuse_long()
    buckets = Buckets.of(trace)
    models, refused = step_models(question.pools, question.shape, question.caps)
    columns = columns_of(question.pools, models, buckets, question.slo, question.caps)
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
    load = _Load(trace, question, buckets, columns, models, minutes, bound, static)
    results = [load.simulate(name, question.failures, show(name)) for name in question.policies]
    calm = list(undisturbed)
    if question.failures.any and not calm:
        for name, result in zip(question.policies, results, strict=True):
            same = question.failures.of_nodes and result.told.node_failures == 0
            shown = show(f"{name} without failures")
            calm.append(result if same else load.simulate(name, Failures(), shown))
    return Plan(
        trace.name,
        len(trace),
        bound,
        static,
        tuple(results),
        refused,
        tuple(calm),
        load.without_a_node() if question.failures.any else {},
        out_of_reach(trace, buckets, columns, models, question.slo),
    )


@dataclass(frozen=True, slots=True)
class _Load:
    """One load, and what its fleets are made of."""

    trace: ServingTrace
    question: Question
    buckets: Buckets
    columns: tuple[Column, ...]
    models: Mapping[str, StepModel]
    minutes: Sequence[Sequence[float]]
    bound: Bounds
    static: int

    def simulate(self, name: str, failures: Failures, show: Callable[[float, float], None]) -> ServingResult:
        """One fleet."""
        question, policy, ours = self.question, self._policy(name), name == "busbar"
        settings = ServingSettings(
            question.start_s,
            question.sleeping if ours else 0,
            question.wake_s,
            question.warm_up_s,
            question.warm if ours else 0,
            Moves(kv_token_bytes(question.shape)) if ours else None,
            failures,
        )
        places = None
        if question.failures.any:  # also without failures of its own, so that both wait for places alike
            most = None if ours else {self.bound.single.pool: math.ceil(HPA_MOST * self.static)}
            places = NodePlaces.of(question.pools, failures, self.trace.duration_s, most)
        result = run(
            self.trace,
            self.buckets,
            self.columns,
            self.models,
            question.slo,
            policy,
            settings,
            show,
            places,
        )
        if isinstance(policy, Ours):
            result.calibration = policy.fleet.forecast.calibration
        return result

    def _policy(self, name: str) -> Policy:
        question, single = self.question, self.bound.single
        if name == "busbar":
            fleet = FleetSettings(
                start_s=question.lead_s,
                down_after_s=max(300.0, question.lead_s),
            )
            return Ours.of(
                self.columns, question.limits, question.slo, fleet, self.trace.earlier, question.wake_s
            )
        if name == "hpa":
            rated = rated_in_flight(self.models[single.key], single, self.buckets.means, self.minutes)
            return Hpa(single, rated, math.ceil(HPA_MOST * self.static))
        return Static(single, self.static)

    def without_a_node(self) -> dict[str, float]:
        """Part of the busiest minute that the mix carries without one node of each pool."""
        limits, busiest = self.question.limits, max(self.minutes, key=sum)
        found = {}
        for pool in self.question.pools:
            if pool.stock:
                left = dict(limits.stock) | {pool.name: max(0, pool.stock - pool.per_node)}
                fewer = replace(limits, stock=left, min_replicas=0, min_domains=0, domain_reserve=0.0)
                found[pool.name] = cheapest(
                    self.columns, busiest, fewer, effort=Effort(nodes=500, seconds=None)
                ).carried
        return found
