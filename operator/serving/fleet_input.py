"""What a service's fleet is decided over: a column for each pool with a known speed, the limits, the times of a start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile
from busbar.operator.errors import TargetUnreachable
from busbar.operator.profiles.table import Workload, rates_of
from busbar.operator.serving.replica_speed import Speeds
from busbar.operator.serving.room import no_less_than
from busbar.operator.serving.sizes import BUCKETS, Sizes
from busbar.operator.watch.projections import Pod
from busbar.scheduler.autoscale.caps import Ways
from busbar.scheduler.autoscale.columns import capped_key
from busbar.scheduler.autoscale.day_profile import DayProfile
from busbar.scheduler.autoscale.fleet import FleetSettings
from busbar.scheduler.autoscale.mix import Column, Effort, Limits, cheapest, domains_of
from busbar.scheduler.autoscale.step_model import Bucket, Slo, StepModel, max_rate
from busbar.scheduler.errors import ServingModelError
from busbar.scheduler.explain.service_room import ServiceRoom

START_S = 60.0
"""A start takes so long until one was seen."""
DOWN_AFTER_S = 300.0
"""A lower number of replicas must have been enough for so long."""
LEAST_RATE = 1e-3
"""Slower than this a replica serves nobody within the target."""
EFFORT = Effort(nodes=500, seconds=0.25)


@dataclass(frozen=True)
class Seen:
    """What is known of a service at one moment."""

    service: ModelService
    pods: tuple[Pod, ...]
    pools: tuple[AcceleratorPool, ...]
    """Those that the service may use."""
    profiles: tuple[PerformanceProfile, ...]
    demand: ServiceDemand | None
    reading: int
    """Number of the gateway's answer; each is used once."""
    counted_s: float
    """How long the gateway has counted."""
    now_s: float
    """Time of day, in seconds since 1970; it never jumps."""
    off: bool = False
    made_by: Workload | None = None
    """What is known of the model; None: nothing."""
    room: ServiceRoom | None = None
    """What quota, budgets, power and the pools leave to it; None: not known yet."""
    days: DayProfile = field(default_factory=DayProfile)
    """Of its load; it is added to."""


def columns_of(
    seen: Seen, speeds: Speeds, sizes: Sizes, slo: Slo, blocked: Iterable[str] = (), trust: float = 1.0
) -> tuple[Column, ...]:
    """One column for each pool with a speed. A pool without one is taken for the slowest, where a replica runs there
    already, or where all pools with a speed are in `blocked`. `trust` is the part of the computed rates that is believed.

    Raises:
        TargetUnreachable: no type that was measured keeps the target; says which comes nearest.
        ServingModelError: no pool has a speed; says why.
    """
    models, means, shares = speeds.models, sizes.means, sizes.shares
    if not models:
        raise ServingModelError("; ".join(sorted(set(speeds.refused.values()))) or "no pool is open to it")
    rates = {
        name: tuple(trust * _useful(max_rate(model, bucket, slo)) for bucket in means)
        for name, model in models.items()
    }
    if not any(
        rate > 0 and share > 0 for row in rates.values() for rate, share in zip(row, shares, strict=True)
    ):
        bucket = next(mean for mean, share in zip(means, shares, strict=True) if share > 0)
        unknown = "".join(f"; {why}" for why in sorted(set(speeds.refused.values())))
        raise TargetUnreachable(
            f"no type keeps the target at any load; {nearest(models.values(), bucket)}{unknown}"
        )
    slowest = tuple(min(row[b] for row in rates.values()) for b in range(BUCKETS))
    used, any_pool = alive(seen), rates.keys() <= set(blocked)
    prices, zones = prices_of(seen.service, seen.pools), zones_of(seen)
    known = {zones[name] for name in rates.keys() & zones.keys() - set(blocked) if _holds(seen, name)}
    if len(known) < (seen.service.spec.scaling.min_zones or 0):
        used = used | dict.fromkeys(zones, 1)  # the pools with a speed are in too few zones
    return tuple(
        Column(
            pool.metadata.name,
            pool.metadata.name,
            prices[pool.metadata.name],
            rates.get(pool.metadata.name, slowest),
            failure_domain=zones.get(pool.metadata.name, ""),
        )
        for pool in sorted(seen.pools, key=lambda p: p.metadata.name)
        if pool.metadata.name in rates or used.get(pool.metadata.name) or any_pool
    )


def ways_of(
    seen: Seen, columns: Iterable[Column], speeds: Speeds, sizes: Sizes, slo: Slo, trust: float = 1.0
) -> Ways:
    """These columns, and in pools where replicas can run under power caps one for each cap whose cost is known."""
    boards, found = seen.room.boards if seen.room is not None else {}, list[Column]()
    for column in columns:
        draw, under = boards.get(column.pool), speeds.capped.get(column.pool, {})
        found.append(column if draw is None else replace(column, watts=float(draw.at(1.0))))
        if draw is None:
            continue
        for cap, model in under.items():
            rates = (trust * _useful(max_rate(model, bucket, slo)) for bucket in sizes.means)
            key, watts = capped_key(column.pool, cap), float(draw.at(cap))
            # A step that is computed to be faster under a cap is not: rounding.
            slower = tuple(map(min, rates, column.rates))
            found.append(replace(column, key=key, rates=slower, watts=watts, power_cap=cap))
    return Ways.of(found)


def _holds(seen: Seen, pool: str) -> bool:
    return seen.room is None or seen.room.stock.get(pool, 1) > 0


def usable_pools(
    service: ModelService, pools: Iterable[AcceleratorPool], tenant: str
) -> tuple[AcceleratorPool, ...]:
    """Those that the service's types and its tenant leave."""
    types = service.spec.accelerators
    return tuple(
        pool
        for pool in pools
        if (types is None or pool.spec.accelerator in types)
        and (pool.spec.tenants is None or tenant in pool.spec.tenants)
    )


def zones_of(seen: Seen) -> Mapping[str, str]:
    """The zone of each pool that is in one, where the service asks for several."""
    if seen.service.spec.scaling.min_zones is None or seen.room is None:
        return {}
    return seen.room.zones


def nearest(models: Iterable[StepModel], bucket: Bucket) -> str:
    """The type that comes nearest to the target with one such request alone, and its times."""
    models, length = tuple(models), bucket.prompt_tokens + bucket.output_tokens
    if all(model.kv_tokens < length for model in models):
        best = max(models, key=lambda m: m.kv_tokens)
        return (
            f"{best.name} comes nearest: its KV cache holds {best.kv_tokens:.0f} tokens, and a request has"
            f" {length:.0f}"
        )
    prompt = bucket.prompt_tokens
    fitting = [model for model in models if model.kv_tokens >= length]
    best = min(fitting, key=lambda m: m.prompt_s(prompt) + m.decode_s(1, prompt))
    alone_s = best.decode_s(1, prompt)
    return (
        f"{best.name} comes nearest: alone, with {prompt:.0f} token{'' if prompt == 1 else 's'} of prompt, it takes"
        f" {1000 * (best.prompt_s(prompt) + alone_s):.0f} ms to the first token and"
        f" {1000 * alone_s:.1f} ms per token"
    )


def prices_of(service: ModelService, pools: Iterable[AcceleratorPool]) -> dict[str, float]:
    """What a replica costs per hour in each pool; the types' exchange rates where a pool has no price."""
    pools, count = tuple(pools), service.spec.shape.accelerators_per_pod
    if priced(pools):
        return {pool.metadata.name: pool.spec.price_per_hour * count for pool in pools}
    rates = rates_of(pools)
    return {pool.metadata.name: max(rates[pool.spec.accelerator], 1e-3) * count for pool in pools}


def priced(pools: Iterable[AcceleratorPool]) -> bool:
    """Whether every pool has a price, so that costs are money."""
    return all(pool.spec.price_per_hour > 0 for pool in pools)


def settings_of(seen: Seen) -> FleetSettings:
    starts = start_seconds(seen.service, seen.pods)
    start_s = max(starts.values(), default=START_S)
    asked_s = float(seen.service.spec.scaling.down_after_seconds or DOWN_AFTER_S)
    return FleetSettings(start_s=start_s, down_after_s=max(asked_s, start_s), effort=EFFORT)


def window_too_short(service: ModelService, start_s: float) -> str:
    """That `scaling.downAfterSeconds` is not kept; empty where it is."""
    asked_s = service.spec.scaling.down_after_seconds
    if asked_s is None or asked_s >= start_s:
        return ""
    return (
        f"scaling.downAfterSeconds is {asked_s}, which is shorter than a start: replicas leave after {start_s:.0f} s, because"
        " sooner they would be missed before others are ready."
    )


def start_seconds(service: ModelService, pods: Iterable[Pod]) -> dict[str, float]:
    """From a replica's creation until it took requests, by pool: the fastest now, else what the status remembers."""
    known = {
        row.pool: row.start_seconds
        for row in (service.status.pools if service.status is not None else None) or ()
        if row.start_seconds is not None
    }
    now: dict[str, float] = {}
    for pod in pods:
        if pod.restarts or pod.sleep is not None:
            continue  # since then it was ready again for another reason
        if pod.ready and pod.ready_since is not None and pod.created_at is not None:
            took = max(0.0, (pod.ready_since - pod.created_at).total_seconds())
            now[pod.pool] = min(took, now.get(pod.pool, took))
    return known | now


def limits_of(
    seen: Seen, columns: Iterable[Column], target: Mapping[str, int], blocked: Iterable[str]
) -> Limits:
    """In replicas: what the pools hold, what quota, budgets and power allow, and the service's bounds. Pools in `blocked` take no
    more. What is there or wanted already is never above a limit: taking it back is the scheduler's to decide. Of the zones
    that the service asks for, as many as `columns` have room in."""
    spec, blocked = seen.service.spec, set(blocked)
    stock: dict[str, int] = {}
    for pool in seen.pools:
        name, now = pool.metadata.name, target.get(pool.metadata.name, 0)
        told = pool.status.capacity if pool.status is not None else None
        most = spec.replica_ceiling if told is None else int(told) // spec.shape.accelerators_per_pod
        if seen.room is not None:
            most = min(most, seen.room.stock.get(name, most))
        stock[name] = now if name in blocked else max(most, now)
    ceiling = max(spec.replica_ceiling, spec.min_replicas, 1)
    rows = no_less_than(seen.room.rows, target) if seen.room is not None else ()
    limits = Limits(
        stock=stock,
        quota=ceiling,
        budget_per_h=spec.scaling.max_cost_per_hour if priced(seen.pools) else None,
        min_replicas=max(spec.min_replicas, 1),
        min_domains=spec.scaling.min_zones or 0,
        domain_reserve=spec.scaling.zone_reserve or 0.0,
        rows=rows,
    )
    return limits.over_domains(columns)


def split(
    columns: Sequence[Column], limits: Limits, load: Sequence[float], before: Mapping[str, int], count: int
) -> dict[str, int]:
    """So many replicas over the pools, whatever the load needs: the cheapest that carry it, else those that carry most. What is
    there stays where it is more than before, and nothing is added where it is fewer."""
    now = sum(before.values())
    if now == count:
        return dict(before)
    zones = min(limits.min_domains, count, len(domains_of(columns, before)) + max(0, count - now))
    exact = replace(limits, quota=count, budget_per_h=None, min_replicas=count, min_domains=zones)
    known = {column.key: before.get(column.key, 0) for column in columns}
    try:
        least, most = (known, None) if count > now else (None, known)
        made = cheapest(columns, load, exact, effort=EFFORT, least=least, most=most)
    except ServingModelError:  # more than the pools hold: the scheduler says what they wait for
        return moved(columns, limits, before, count, count)
    return {name: replicas for name, replicas in made.replicas.items() if replicas}


def moved(
    columns: Iterable[Column], limits: Limits, target: Mapping[str, int], least: int, most: int
) -> dict[str, int]:
    """The target with as many replicas as it may have: the cheapest pools get more, the dearest lose some, and the failure
    domains that the limits ask for come first."""
    found = dict(target)
    order = sorted(columns, key=lambda c: (c.cost_per_h, c.key))
    while sum(found.values()) > most and (there := [c for c in reversed(order) if found.get(c.key, 0) > 0]):
        spare = [c for c in there if _in_enough(order, found | {c.key: found[c.key] - 1}, limits)]
        found[(spare or there)[0].key] -= 1
    while sum(found.values()) < least and order:
        free = [c for c in order if found.get(c.key, 0) < limits.stock.get(c.key, least)]
        if not free:  # more than the pools hold: the scheduler says what they wait for
            free = order[:1]
        elsewhere = [c for c in free if c.failure_domain not in {"", *domains_of(order, found)}]
        chosen = free[0] if _in_enough(order, found, limits) or not elsewhere else elsewhere[0]
        found[chosen.key] = found.get(chosen.key, 0) + 1
    return found


def _in_enough(columns: Sequence[Column], replicas: Mapping[str, int], limits: Limits) -> bool:
    return len(domains_of(columns, replicas)) >= limits.min_domains


def _useful(rate: float) -> float:
    return rate if rate >= LEAST_RATE else 0.0


def alive(seen: Seen) -> dict[str, int]:
    return _by_pool(p for p in seen.pods if p.stays and not p.parked)


def ready(seen: Seen) -> dict[str, int]:
    return _by_pool(p for p in seen.pods if p.takes_requests)


def _by_pool(pods: Iterable[Pod]) -> dict[str, int]:
    found: dict[str, int] = {}
    for pod in pods:
        found[pod.pool] = found.get(pod.pool, 0) + 1
    return found


def target_of(service: ModelService) -> dict[str, int] | None:
    """The target that the status remembers; None where the latency target did not decide."""
    rows = (service.status.pools if service.status is not None else None) or ()
    found = {row.pool: row.desired for row in rows if row.desired}
    return found or None
