"""Replicas that must carry part of the load without any one failure domain: the mix, what is kept where there is no room, the fleet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from busbar.scheduler.autoscale.domain_loss import bears_loss, losses, worst_loss
from busbar.scheduler.autoscale.fleet import Cause, Decision, Fleet, FleetSettings, Observation
from busbar.scheduler.autoscale.mix import Column, Effort, Limits, cheapest, spread
from busbar.scheduler.autoscale.step_model import Slo

EXACT = Effort(nodes=None, seconds=None, gap=0.0)
NEAR, FAR = (
    Column(name, name, 1.0, (1.0,), failure_domain=zone) for name, zone in (("near", "a"), ("far", "b"))
)
TINY = Column("tiny", "tiny", 0.2, (0.1,), failure_domain="b")


def drawn(rng: random.Random, buckets: int, types: int) -> tuple[list[Column], list[float]]:
    columns = [
        Column(
            f"t{number}",
            f"t{number}",
            rng.uniform(0.5, 5),
            tuple(rng.uniform(0.5, 4) for _ in range(buckets)),
            failure_domain=rng.choice(["a", "b", "c", ""]),
        )
        for number in range(types)
    ]
    return columns, [rng.uniform(0.2, 4) for _ in range(buckets)]


def carries(columns: Sequence[Column], load: float, replicas: Mapping[str, int], part: float) -> bool:
    """One bucket, by adding up: all of the load, and the part of it without each domain that others are outside of."""
    able = {c.key: c.rates[0] * replicas[c.key] for c in columns}
    domains = {c.failure_domain for c in columns} - {""}
    left = {
        lost: sum(able[c.key] for c in columns if c.failure_domain not in {"", lost})
        for lost in domains
        if domains - {lost}
    }
    return sum(able.values()) >= load - 1e-9 and all(rest >= part * load - 1e-9 for rest in left.values())


@pytest.mark.parametrize("seed", range(20))
def test_the_mix_costs_what_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    columns, [load] = drawn(rng, 1, 4)
    part, stock = rng.choice([0.3, 0.8, 1.0]), {c.pool: rng.randint(0, 4) for c in columns}
    best: float | None = None
    for counts in itertools.product(*(range(stock[c.pool] + 1) for c in columns)):
        replicas = {c.key: count for c, count in zip(columns, counts, strict=True)}
        cost = sum(c.cost_per_h * replicas[c.key] for c in columns)
        if carries(columns, load, replicas, part) and (best is None or cost < best):
            best = cost
    limits = Limits(stock=stock, domain_reserve=part)
    mix = cheapest(columns, [load], limits, effort=EXACT)
    if best is None:
        assert not carries(columns, load, mix.replicas, part)
    else:
        assert carries(columns, load, mix.replicas, part)
        assert mix.cost_per_h == pytest.approx(best)
        for effort in (Effort(nodes=0, seconds=0.0), Effort(nodes=1, seconds=0.01)):
            hurried = cheapest(columns, [load], limits, effort=effort, incumbent=mix.replicas)
            assert carries(columns, load, hurried.replicas, part)


@pytest.mark.parametrize("seed", range(20))
def test_without_any_one_domain_the_rest_carries_the_part_of_every_bucket(seed: int) -> None:
    rng = random.Random(100 + seed)
    columns, load = drawn(rng, 4, 5)
    part = rng.uniform(0.1, 1.0)
    for effort in (EXACT, Effort(seconds=0.05)):
        mix = cheapest(columns, load, Limits(domain_reserve=part), effort=effort)
        assert mix.carried == 1
        for lost in {c.failure_domain for c in columns} - {""}:
            rest = [c for c in columns if c.failure_domain not in {"", lost}]
            if rest:
                left = spread(rest, [part * rate for rate in load], mix.replicas)
                assert left.fullest <= 1 + 1e-6
                assert not left.impossible
    plain = cheapest(columns, load, Limits(), effort=EXACT)
    assert plain.cost_per_h <= cheapest(columns, load, Limits(domain_reserve=part), effort=EXACT).cost_per_h


def test_the_load_comes_before_the_reserve_and_what_has_room_of_it_is_kept() -> None:
    short = Limits(stock={"near": 4, "far": 1}, domain_reserve=1.0)
    mix = cheapest([NEAR, FAR], (4.0,), short, effort=EXACT)
    assert (mix.carried, mix.replicas) == (1.0, {"near": 3, "far": 1}), (
        "a fourth would not help where a is lost"
    )
    assert worst_loss([NEAR, FAR], (4.0,), mix.replicas) == (0.25, "a")
    few = Limits(stock={"near": 4, "far": 4}, quota=4, domain_reserve=1.0)
    mix = cheapest([NEAR, FAR], (4.0,), few, effort=EXACT)
    assert (mix.carried, mix.replicas) == (1.0, {"near": 2, "far": 2})
    mix = cheapest([NEAR, FAR], (9.0,), short, effort=EXACT)
    assert (round(mix.carried, 3), mix.replicas) == (0.556, {"near": 4, "far": 1}), (
        "not even the load has room"
    )


def test_replicas_whose_domain_is_not_known_and_buckets_of_one_domain_are_left_out() -> None:
    nowhere = Column("nowhere", "nowhere", 0.1, (1.0,))
    mix = cheapest([NEAR, FAR, nowhere], (2.0,), Limits(domain_reserve=1.0), effort=EXACT)
    assert mix.replicas == {"near": 2, "far": 2, "nowhere": 0}
    long = Column("long", "long", 5.0, (1.0, 1.0), failure_domain="a")
    short = Column("short", "short", 1.0, (1.0, 0.0), failure_domain="b")
    mix = cheapest([long, short], (1.0, 1.0), Limits(domain_reserve=1.0), effort=EXACT)
    assert mix.replicas == {"long": 2, "short": 1}, "nobody but a serves the second bucket"
    assert losses([NEAR], (1.0,), 1.0) == []
    assert bears_loss([NEAR], (1.0,), {"near": 1}, Limits(domain_reserve=1.0))


# -- the fleet -----------------------------------------------------------------------------------------


def seen(now: float, rate: float, live: dict[str, int]) -> Observation:
    return Observation(now, (rate,), 0, dict(live), {})


def driven(item: Fleet, rate: float, live: dict[str, int], begin: int, seconds: int) -> list[Decision]:
    """The decisions at a steady load; replicas are there at once."""
    found = []
    for second in range(begin, begin + seconds):
        decision = item.decide(seen(float(second), rate, live))
        if decision is not None:
            found.append(decision)
            live.clear()
            live.update(decision.target)
    return found


def fleet(*columns: Column, **limits: object) -> Fleet:
    made = Limits(min_replicas=2, min_domains=2, **limits)  # type: ignore[arg-type]
    return Fleet(columns, made, Slo(), FleetSettings())


def test_a_fleet_begins_with_a_reserve_and_keeps_it_when_the_load_falls() -> None:
    item = fleet(NEAR, FAR, domain_reserve=1.0)
    live = item.begin((3.0,))
    assert live == {"near": 3, "far": 3}
    driven(item, 3.0, live, 1, 900)
    driven(item, 1.0, live, 901, 1800)
    assert live == {"near": 1, "far": 1}


def test_a_reserve_that_is_missing_is_added() -> None:
    item, live = fleet(NEAR, TINY, domain_reserve=0.5), {"near": 2, "tiny": 1}
    [first, *_] = driven(item, 1.5, live, 1, 60)
    assert (first.cause, first.target["near"]) == (Cause.DOMAINS, 2)
    assert bears_loss([NEAR, TINY], (1.5,), live, item.limits)
    assert item.exposed is None


def test_a_reserve_that_has_no_room_is_told_and_nothing_alternates() -> None:
    item, live = fleet(NEAR, FAR, domain_reserve=1.0, stock={"near": 9, "far": 1}), {"near": 4, "far": 1}
    decisions = driven(item, 3.0, live, 1, 3600)
    part, zone = item.exposed or (1.0, "")
    assert (round(part, 3), zone) == (0.333, "a")
    assert {d.cause for d in decisions} <= {Cause.IDLE}, "there is nothing to add for it"
    assert live == {"near": 2, "far": 1}
    item.limits = Limits(min_replicas=2, min_domains=2, domain_reserve=1.0)
    driven(item, 3.0, live, 3601, 60)
    assert live == {"near": 3, "far": 3}
    assert item.exposed is None, "it has room now"


def test_where_the_reserve_has_no_room_beside_what_is_live_replicas_move() -> None:
    item, live = fleet(NEAR, FAR, domain_reserve=0.6, quota=4), {"near": 3, "far": 1}
    [first, *rest] = driven(item, 3.0, live, 1, 900)
    assert (first.cause, first.target, rest) == (Cause.DOMAINS, {"near": 2, "far": 2}, [])
