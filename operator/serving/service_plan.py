"""The cheapest replicas of a service for a load that somebody states, from what is known of the service now.

The same speeds, sizes and program as the decisions of ``fleets.py``. Unlike those it begins with nothing: what runs and
what a start costs play no part, and ``maxReplicas`` is only mentioned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from busbar.kube.contracts.service_plan import PlannedPool, ServicePlanAnswer, ServicePlanRequest
from busbar.kube.types import AcceleratorPool
from busbar.kube.types.model_service import ModelServiceSpec
from busbar.operator.serving.fleet_input import Seen, columns_of, priced, ways_of
from busbar.operator.serving.power_caps import capped_sentences
from busbar.operator.serving.replica_speed import Speeds, speeds
from busbar.operator.serving.room import reserve_missing, zones_missing
from busbar.operator.serving.sizes import Sizes
from busbar.scheduler.autoscale.caps import carrying, decided, weighed
from busbar.scheduler.autoscale.domain_loss import worst_loss
from busbar.scheduler.autoscale.mix import (
    Column,
    Effort,
    Limits,
    Mix,
    allowed,
    capacity,
    cheapest,
    held_back_by,
)
from busbar.scheduler.autoscale.step_model import Slo
from busbar.scheduler.errors import SchedulerError

EFFORT = Effort(nodes=500, seconds=1.0)
WHOLE = 1 - 1e-6
"""A mix that carries this part of the load carries it."""
NOT_LOOKED_AT = "Work of others that can be stopped counts as room."
NOTHING_PLANNED = (
    "Quota, budgets, power and what others hold are not looked at before the scheduler's first round."
)


def refused(asked: ServicePlanRequest, reason: str) -> ServicePlanAnswer:
    """There is no mix."""
    return ServicePlanAnswer(possible=False, reason=reason, rate=asked.rate)


def service_plan(seen: Seen, sizes: Sizes, trust: float, asked: ServicePlanRequest) -> ServicePlanAnswer:
    """The cheapest mix, or why there is none. `trust`: the part of the computed rates that is believed."""
    slo = _slo(seen.service.spec, asked)
    if slo is None:
        return refused(asked, "Which target? spec.slo has not both times; give both in the question.")
    if not sizes.known:
        return refused(asked, "No request was answered lately, so the sizes of requests are not known.")
    limitable = seen.room.boards if seen.room is not None else ()
    known = speeds(seen.service, seen.pools, seen.profiles, slo, seen.made_by, limitable)
    shares = sizes.shares
    load = [asked.rate * share for share in shares]
    try:
        columns = columns_of(replace(seen, pods=()), known, sizes, slo, trust=trust)
        limits = _limits(seen, columns)
        ways = ways_of(seen, columns, known, sizes, slo, trust)
        caps = carrying(ways, {}, load, limits, {}, EFFORT)
        limits = replace(limits, rows=weighed(limits.rows, ways.under(caps)))
        columns = decided(ways.under(caps))
        mix = cheapest(columns, load, limits, effort=EFFORT)
        alone = {c.key: _alone(c, load, limits) for c in columns}
    except SchedulerError as error:
        return _framed(refused(asked, _sentence(str(error))), slo, sizes)
    in_money = priced(seen.pools)
    kinds = {pool.metadata.name: pool.spec.accelerator for pool in seen.pools}
    answer = ServicePlanAnswer(
        possible=_carries_all(mix),
        reason=_reason(mix, asked.rate, sizes, held_back_by(columns, mix.replicas, limits)),
        rate=asked.rate,
        pools=tuple(
            PlannedPool(
                pool=c.key,
                accelerator=kinds[c.key],
                replicas=mix.replicas.get(c.key, 0),
                requests_per_second=_digits(capacity([c], shares, {c.key: 1})),
                cost_per_hour=c.cost_per_h if in_money else None,
                alone=alone[c.key],
            )
            for c in columns
        ),
        cost_per_hour=round(mix.cost_per_h, 6) if in_money else None,
        notes=(
            *capped_sentences(caps),
            *_zone_notes(seen, columns, load, mix, limits),
            *_notes(seen, known, mix, trust, in_money),
        ),
    )
    return _framed(answer, slo, sizes)


def _slo(spec: ModelServiceSpec, asked: ServicePlanRequest) -> Slo | None:
    """The targets of the question, else those of the service; None if one is missing."""
    own = spec.slo
    ttft = asked.ttft_milliseconds or (own.ttft_milliseconds if own is not None else None)
    tpot = asked.tpot_milliseconds or (own.tpot_milliseconds if own is not None else None)
    percentile = asked.percentile or (own.percentile if own is not None else None) or 99.0
    return Slo(ttft / 1000, tpot / 1000, percentile) if ttft and tpot else None


def _limits(seen: Seen, columns: Iterable[Column]) -> Limits:
    """What the pools hold and quota, budgets and power allow, as far as it is known, and the fewest replicas and zones."""
    each = seen.service.spec.shape.accelerators_per_pod
    stock = {
        pool.metadata.name: int(pool.status.capacity) // each
        for pool in seen.pools
        if pool.status is not None and pool.status.capacity is not None
    }
    room = seen.room
    if room is not None:
        stock = {name: min(stock.get(name, count), count) for name, count in room.stock.items()}
    least = max(seen.service.spec.min_replicas, 1)
    limits = Limits(
        stock=stock,
        min_replicas=least,
        min_domains=seen.service.spec.scaling.min_zones or 0,
        domain_reserve=seen.service.spec.scaling.zone_reserve or 0.0,
        rows=room.rows if room is not None else (),
    )
    return limits.over_domains(columns)


def _alone(column: Column, load: Sequence[float], limits: Limits) -> int | None:
    """Replicas of one pool that carry the load without the others, in one zone."""
    limits = replace(limits, min_domains=0, domain_reserve=0.0)
    if not allowed([column], {column.key: limits.min_replicas}, limits):
        return None
    mix = cheapest([column], load, limits, effort=EFFORT)
    return mix.replicas[column.key] if _carries_all(mix) else None


def _carries_all(mix: Mix) -> bool:
    return mix.carried >= WHOLE and not mix.impossible


def _reason(mix: Mix, rate: float, sizes: Sizes, rows: Sequence[str]) -> str:
    count = sum(mix.replicas.values())
    if mix.carried < WHOLE:
        why = f"{' and '.join(rows)} allow no more" if rows else "the pools hold too little"
        return (
            f"{_sentence(why)[:-1]}: {count} replicas carry {100 * mix.carried:.0f} % of {rate:g} requests/s"
            " within the target."
        )
    words = "1 replica carries" if count == 1 else f"{count} replicas carry"
    if not mix.impossible:
        return f"{words} {rate:g} requests/s within the target."
    late = sum(sizes.shares[bucket] for bucket in mix.impossible)
    shortest = min(sizes.means[bucket].prompt_tokens for bucket in mix.impossible)
    return (
        f"{words} {100 * (1 - late):.3g} % of {rate:g} requests/s within the target; no type keeps it for the others,"
        f" with prompts of {shortest:.0f} tokens and more."
    )


def _zone_notes(
    seen: Seen, columns: Sequence[Column], load: Sequence[float], mix: Mix, limits: Limits
) -> tuple[str, ...]:
    """In which zones the replicas cannot stand, and what they do not carry without one."""
    scaling = seen.service.spec.scaling
    lost = worst_loss(columns, load, mix.replicas)
    found = (
        zones_missing(scaling.min_zones, limits, seen.room),
        reserve_missing(scaling.zone_reserve, lost if lost[0] < limits.domain_reserve * WHOLE else None),
    )
    return tuple(filter(None, found))


def _notes(seen: Seen, known: Speeds, mix: Mix, trust: float, in_money: bool) -> tuple[str, ...]:
    """What is not known, and what would stop the service from having the mix."""
    spec, count = seen.service.spec, sum(mix.replicas.values())
    found = [_sentence(why) for why in sorted({*known.refused.values(), *known.predicted.values()})]
    found += [f"The capacity of pool {name} is not known yet." for name in _unknown_stock(seen.pools)]
    if not in_money:
        found.append(
            "Not every pool has a pricePerHour; the types' exchange rates stand in, and no cost is told."
        )
    if trust < 1:
        text = f"Replicas count for {100 * trust:.0f} % of their computed rate: answers were late below it."
        found.append(text)
    if count > spec.replica_ceiling:
        found.append(f"spec.maxReplicas allows {spec.replica_ceiling}; this mix has {count}.")
    most, cost = spec.scaling.max_cost_per_hour, mix.cost_per_h
    if most is not None and in_money and cost > most:
        found.append(f"spec.scaling.maxCostPerHour allows {most:g}; this mix costs {cost:g}.")
    return (*found, NOT_LOOKED_AT if seen.room is not None else NOTHING_PLANNED)


def _unknown_stock(pools: Iterable[AcceleratorPool]) -> list[str]:
    return sorted(p.metadata.name for p in pools if p.status is None or p.status.capacity is None)


def _framed(answer: ServicePlanAnswer, slo: Slo, sizes: Sizes) -> ServicePlanAnswer:
    """With the target and the sizes that it is for."""
    pairs = list(zip(sizes.shares, sizes.means, strict=True))
    return answer.model_copy(
        update={
            "ttft_milliseconds": 1000 * slo.ttft_s,
            "tpot_milliseconds": 1000 * slo.tpot_s,
            "percentile": slo.percentile,
            "prompt_tokens": round(sum(share * mean.prompt_tokens for share, mean in pairs), 1),
            "output_tokens": round(sum(share * mean.output_tokens for share, mean in pairs), 1),
        }
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _digits(value: float) -> float:
    return float(f"{value:.3g}")
