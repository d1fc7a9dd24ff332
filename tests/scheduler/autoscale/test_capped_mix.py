"""Columns under power caps in the mix: they help where watts bind, cost nothing where they do not, and keep every limit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from busbar.scheduler.autoscale.fleet import Fleet, FleetSettings
from busbar.scheduler.autoscale.mix import Column, Effort, Limits, Mix, Switching, allowed, cheapest
from busbar.scheduler.autoscale.step_model import Bucket, Slo, StepModel, max_rate
from busbar.scheduler.errors import ServingModelError
from busbar.scheduler.power import Phase
from busbar.scheduler.power.curves import PUBLISHED, slowdown

EXACT = Effort(nodes=None, seconds=None, gap=0.0)
CAPS = (0.8, 0.6)
DOMAINS = ("a", "b")


def under_caps(column: Column, slower: Sequence[float]) -> list[Column]:
    return [
        column,
        *(
            replace(
                column,
                key=f"{column.key}@{cap}",
                rates=tuple(rate / slow for rate in column.rates),
                watts=cap * column.watts,
                power_cap=cap,
            )
            for cap, slow in zip(CAPS, slower, strict=True)
        ),
    ]


def instance(seed: int) -> tuple[list[Column], list[Column], list[float], Limits]:
    """Types without caps, the same with them, a load, and limits that bind in most of the instances."""
    rng = random.Random(seed)
    buckets = rng.randint(1, 3)
    whole = [
        Column(
            f"t{number}",
            f"t{number}",
            rng.uniform(0.5, 8.0),
            tuple(0.0 if rng.random() < 0.1 else rng.uniform(0.5, 6.0) for _ in range(buckets)),
            watts=rng.uniform(70.0, 700.0),
            power_domain=rng.choice(DOMAINS),
        )
        for number in range(rng.randint(1, 3))
    ]
    every = [each for c in whole for each in under_caps(c, (rng.uniform(1.02, 1.15), rng.uniform(1.15, 1.6)))]
    load = [rng.uniform(0.5, 8.0) for _ in range(buckets)]
    stock = {c.pool: rng.randint(3, 12) for c in whole}
    watts = {domain: rng.uniform(800.0, 4000.0) for domain in DOMAINS}
    return whole, every, load, Limits(stock=stock, watts=watts, min_replicas=1)


def capped(columns: Sequence[Column], mix: Mix) -> int:
    return sum(mix.replicas[c.key] for c in columns if c.power_cap < 1)


@pytest.mark.parametrize("seed", range(40))
def test_capped_columns_never_make_a_mix_dearer_or_carry_less_and_keep_all_limits(seed: int) -> None:
    whole, every, load, limits = instance(seed)
    before = cheapest(whole, load, limits, effort=EXACT)
    after = cheapest(every, load, limits, effort=EXACT)
    assert allowed(every, after.replicas, limits)
    assert after.carried >= before.carried - 1e-4
    if before.carried >= 1:
        assert after.objective <= before.objective + 1e-6
    for column in every:
        for higher in every:
            if column.pool == higher.pool and column.power_cap < higher.power_cap:
                less, more = after.replicas[column.key], after.replicas[higher.key]
                step = {**after.replicas, column.key: less - 1, higher.key: more + 1}
                assert not less or not allowed(every, step, limits), "a cap lower than the watts ask for"


@pytest.mark.parametrize("seed", range(12))
def test_where_watts_do_not_bind_nothing_is_capped(seed: int) -> None:
    whole, every, load, limits = instance(seed)
    for free in (replace(limits, watts={}), replace(limits, watts=dict.fromkeys(DOMAINS, 1e6))):
        before, after = (cheapest(columns, load, free, effort=EXACT) for columns in (whole, every))
        assert capped(every, after) == 0
        assert (after.objective, after.carried) == (before.objective, before.carried)


def test_more_replicas_at_lower_watts_carry_a_load_that_few_at_full_watts_do_not() -> None:
    whole = Column("A100", "A100", 4.0, (1.0,), watts=400.0, power_domain="a")
    every = under_caps(whole, (1.05, 1.2))
    limits = Limits(stock={"A100": 8}, watts={"a": 1600.0})
    before, after = (cheapest(columns, [4.5], limits, effort=EXACT) for columns in ([whole], every))
    assert before.carried == pytest.approx(4 / 4.5)
    assert after.carried == 1
    assert sum(after.replicas.values()) == 5
    assert after.replicas["A100@0.8"] == 5, "no lower than the watts ask for"


def test_a_capped_replica_that_runs_is_not_replaced_for_nothing() -> None:
    every = under_caps(Column("A100", "A100", 4.0, (1.0,), watts=400.0, power_domain="a"), (1.05, 1.2))
    limits = Limits(stock={"A100": 8}, watts={"a": 1e6})
    now = {"A100": 1, "A100@0.8": 2}
    kept = cheapest(every, [2.5], limits, Switching(now, start_weight=0.2), EXACT)
    assert {key: count for key, count in kept.replicas.items() if count} == now
    anew = cheapest(every, [2.5], limits, effort=EXACT)
    assert capped(every, anew) == 0
    assert cheapest(every, [2.5], limits, effort=EXACT, least=now).replicas["A100@0.8"] == 2


def test_a_fleet_adds_capped_replicas_when_its_feed_is_full() -> None:
    every = tuple(under_caps(Column("A100", "A100", 4.0, (1.0,), watts=400.0, power_domain="a"), (1.05, 1.2)))
    limits = Limits(stock={"A100": 8}, watts={"a": 1600.0}, min_replicas=1)
    fleet = Fleet(every, limits, Slo(), FleetSettings())
    assert capped(every, Mix(fleet.begin([2.5]), (), 0.0, 0.0)) == 0
    more = fleet.begin([4.5])
    assert allowed(every, more, limits)
    assert capped(every, Mix(more, (), 0.0, 0.0)) > 0


def test_a_cap_slows_prompts_more_than_decoding() -> None:
    whole = StepModel("A100", 0.01, 0.001, 1e-6, 1e-4, 1e-9, 1e5, 400.0)
    slow = [slowdown(PUBLISHED[phase], 0.6) for phase in (Phase.PREFILL, Phase.DECODE)]
    under = whole.under_cap("A100@60%", 0.6, *slow)
    assert under.prompt_s(512) / whole.prompt_s(512) == pytest.approx(slow[0])
    assert under.decode_s(8, 8000) / whole.decode_s(8, 8000) == pytest.approx(slow[1])
    assert (under.watts, under.kv_tokens) == (240.0, whole.kv_tokens)
    bucket = Bucket(500, 200)
    assert 0 < max_rate(under, bucket, Slo()) < max_rate(whole, bucket, Slo())


@pytest.mark.parametrize("cap", [0.0, -0.5, 1.1, float("nan")])
def test_a_cap_is_a_part_of_the_watts(cap: float) -> None:
    with pytest.raises(ServingModelError, match="power cap"):
        Column("a", "a", 1.0, (1.0,), power_cap=cap)
    Column("a", "a", 1.0, (1.0,), power_cap=0.5)
