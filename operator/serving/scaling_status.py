"""What a service's status says of its scaling: replicas by pool, how the latency target is kept, the forecast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from busbar.kube.types import AcceleratorPool, ModelService
from busbar.kube.types.service_status import DemandForecastStatus, PoolReplicas, ScaledBy, ServiceLevelStatus
from busbar.operator.serving.fleet_input import start_seconds
from busbar.operator.serving.fleet_plan import Plan
from busbar.operator.serving.history import Counts, percentile_ms
from busbar.operator.serving.power_caps import caps_of
from busbar.operator.serving.replica_speed import PERCENTILE
from busbar.operator.watch.projections import Pod, Sleep
from busbar.operator.write.status import clip


def pool_rows(
    service: ModelService,
    pods: Iterable[Pod],
    pools: Mapping[str, AcceleratorPool],
    plan: Plan | None,
    desired: int,
    watts: Mapping[str, float] | None = None,
) -> list[PoolReplicas]:
    """One row for each pool that has replicas or shall have some.

    Args:
        pods: the replicas that have not ended.
        watts: that they draw, by pool; None: what the status has stays.
    """
    pods = tuple(pods)
    told = by_pool(service, plan, desired)
    target, decides = told or {}, told is not None
    old = {row.pool: row for row in (service.status.pools if service.status is not None else None) or ()}
    starts = start_seconds(service, pods)
    rows = []
    for name in sorted({p.pool for p in pods} | {name for name, count in target.items() if count}):
        pool, here = pools.get(name), [p for p in pods if p.pool == name]
        ready = sum(p.takes_requests for p in here)
        cap = _cap(plan, old.get(name), name)
        same = old[name] if name in old and old[name].power_cap_percent == cap else None
        rows.append(
            PoolReplicas(
                pool=name,
                replicas=len(here),
                ready=ready,
                starting=sum(p.stays and not (p.takes_requests or p.parked) for p in here) or None,
                sleeping=sum(p.sleep is Sleep.ASLEEP and not p.leaving for p in here) or None,
                desired=target.get(name, 0) if decides else None,
                accelerator=pool.spec.accelerator if pool is not None else None,
                cost_per_hour=_cost(service, pool),
                watts=_watts(watts, old.get(name), name) if here else None,
                start_seconds=_near(starts.get(name), old[name].start_seconds if name in old else None),
                requests_per_second=_near(
                    plan.rates.get(name) if plan is not None else None,
                    same.requests_per_second if same is not None else None,
                ),
                mode=plan.modes.get(name) if plan is not None else None,
                predicted=True if plan is not None and name in plan.predicted else None,
                power_cap_percent=cap,
            )
        )
    return rows


def by_pool(service: ModelService, plan: Plan | None, desired: int) -> dict[str, int] | None:
    """The replicas wanted in each pool; None: in any that the scheduler chooses."""
    if desired <= 0:
        return None
    by_pool = service.spec.scaling.external
    if by_pool is not None:
        return dict(by_pool) if sum(by_pool.values()) == desired else None
    if plan is None or plan.target is None or plan.scaled_by(service) is ScaledBy.IN_FLIGHT:
        return None
    if plan.scaled_by(service) is ScaledBy.EXTERNAL and sum(plan.target.values()) != desired:
        return None
    return dict(plan.target)


def level_status(service: ModelService, plan: Plan | None, day: Counts | None) -> ServiceLevelStatus | None:
    """How the latency target is kept; None where there is none."""
    slo = service.spec.slo
    if plan is None:
        return None
    day = day or Counts()
    part = (slo.percentile if slo is not None and slo.percentile is not None else PERCENTILE) / 100
    recent, hour = plan.attainment, plan.attainment_hour
    return ServiceLevelStatus(
        scaled_by=plan.scaled_by(service),
        message=clip(plan.message) or None,
        attainment_recent=_share(recent[0]),
        attainment_hour=_share(hour[0]),
        requests_recent=recent[1],
        requests_hour=hour[1],
        attainment_day=_share(day.within / day.requests) if day.requests else None,
        requests_day=day.requests or None,
        ttft_milliseconds=_maybe(percentile_ms(day.first_token, part)),
        tpot_milliseconds=_maybe(percentile_ms(day.per_token, part)),
    )


def per_token(day: Counts | None) -> tuple[float | None, float | None]:
    """Cost of a million tokens and joules of one, in the last day; None: no token came, or nothing is known of it."""
    if day is None or not day.tokens:
        return None, None
    return _maybe(1e6 * day.cost / day.tokens or None), _maybe(day.joules / day.tokens or None)


def forecast_status(plan: Plan | None) -> DemandForecastStatus | None:
    """The demand that replicas are counted for."""
    if plan is None or plan.ahead is None:
        return None
    ahead = plan.ahead
    return DemandForecastStatus(
        now=_digits(ahead.now),
        at_ready=_digits(ahead.at_ready),
        p90=_digits(ahead.upper),
        ready_in_seconds=round(ahead.ready_in_s),
        method=ahead.method,
        inside=_share(ahead.inside),
        capacity=None if plan.capacity_rps is None else _digits(plan.capacity_rps),
    )


def capped_words(service: ModelService, plan: Plan | None) -> str:
    """Why power caps change with this plan; empty where they do not."""
    known = {pool: round(100 * cap) for pool, cap in caps_of(service).items()}
    if plan is None or plan.caps is None or not plan.caps_reason:
        return ""
    rows = (service.status.pools if service.status is not None else None) or ()
    there = {row.pool for row in rows} | {pool for pool, count in (plan.target or {}).items() if count}
    told = {pool: round(100 * cap) for pool, cap in plan.caps.items() if pool in there}
    return plan.caps_reason if told != known else ""


def _cap(plan: Plan | None, old: PoolReplicas | None, pool: str) -> int | None:
    if plan is None:
        return None
    if plan.caps is None:
        return old.power_cap_percent if old is not None else None
    return round(100 * plan.caps[pool]) if pool in plan.caps else None


def _cost(service: ModelService, pool: AcceleratorPool | None) -> float | None:
    if pool is None or pool.spec.price_per_hour <= 0:
        return None
    return round(pool.spec.price_per_hour * service.spec.shape.accelerators_per_pod, 6)


def _watts(watts: Mapping[str, float] | None, old: PoolReplicas | None, pool: str) -> float | None:
    known = old.watts if old is not None else None
    if watts is None:
        return known
    return _near(watts[pool], known) if pool in watts else None


def _near(new: float | None, old: float | None) -> float | None:
    """The old number while the new one is within 10 % of it: small changes are no reason to write."""
    if new is None or (old is not None and abs(new - old) <= 0.1 * old):
        return old
    return _digits(new)


def _maybe(value: float | None) -> float | None:
    return None if value is None else _digits(value)


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
