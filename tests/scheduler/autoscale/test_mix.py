"""The cheapest mix, beside brute force, the best single type and every kind of limit."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from busbar.scheduler.autoscale.mix import (
    Column,
    Effort,
    LimitKind,
    Limits,
    Mix,
    Row,
    Switching,
    allowed,
    best_single_type,
    binding,
    cheapest,
    held_back_by,
    spread,
)
from busbar.scheduler.errors import ServingModelError

EXACT = Effort(nodes=None, seconds=None, gap=0.0)


def column(key: str, cost: float, *rates: float, **rest: object) -> Column:
    return Column(key, key, cost, rates, **rest)  # type: ignore[arg-type]


def overload(columns: Sequence[Column], load: Sequence[float], mix: Mix) -> float:
    """How far the fullest column is above its replicas, by adding up the weights."""
    worst = 0.0
    for item in columns:
        work = sum(
            load[b] * row.get(item.key, 0.0) / item.rates[b]
            for b, row in enumerate(mix.weights)
            if row.get(item.key)
        )
        worst = max(worst, work - mix.replicas[item.key])
    return worst


def two_types_carry(a: Column, b: Column, load: Sequence[float], first: int, second: int) -> bool:
    """Whether the load fits, without a solver: give the first type the buckets at which it is relatively best."""
    room, left = float(first), 0.0
    order = sorted(
        (i for i, rate in enumerate(load) if rate > 0),
        key=lambda i: math.inf if b.rates[i] == 0 else a.rates[i] / b.rates[i],
        reverse=True,
    )
    for i in order:
        need = load[i] / a.rates[i] if a.rates[i] else math.inf
        share = 1.0 if need <= room else (room / need if need < math.inf else 0.0)
        room -= share * need if share else 0.0
        if share < 1:
            if b.rates[i] == 0:
                return share >= 1 - 1e-9
            left += (1 - share) * load[i] / b.rates[i]
    return left <= second + 1e-9


@pytest.mark.parametrize("seed", range(12))
def test_two_types_cost_what_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    buckets = rng.randint(1, 4)
    columns = [
        column(
            key,
            rng.uniform(0.5, 8),
            *(0.0 if rng.random() < 0.15 else rng.uniform(0.3, 6) for _ in range(buckets)),
        )
        for key in ("a", "b")
    ]
    load = [rng.uniform(0.1, 4) if any(c.rates[b] for c in columns) else 0.0 for b in range(buckets)]
    stock = {"a": rng.randint(2, 9), "b": rng.randint(2, 9)}
    now = {"a": rng.randint(0, 3), "b": rng.randint(0, 3)}
    start, drop = rng.choice([(0.0, 0.0), (0.2, 0.1)])

    def objective(first: int, second: int) -> float:
        return sum(
            c.cost_per_h * (n + start * max(n - now[c.key], 0) + drop * max(now[c.key] - n, 0))
            for c, n in zip(columns, (first, second), strict=True)
        )

    best = min(
        (
            objective(*n)
            for n in itertools.product(range(stock["a"] + 1), range(stock["b"] + 1))
            if two_types_carry(columns[0], columns[1], load, *n)
        ),
        default=None,
    )
    mix = cheapest(columns, load, Limits(stock=stock), Switching(now, start, drop), EXACT)
    if best is None:
        assert mix.carried < 1
    else:
        assert mix.objective == pytest.approx(best, rel=1e-6)
        assert mix.carried == 1
        assert overload(columns, load, mix) < 1e-4


@pytest.mark.parametrize("seed", range(5))
def test_large_instances_are_never_dearer_than_the_best_single_type(seed: int) -> None:
    rng = random.Random(seed)
    columns = [
        column(
            f"t{j}",
            rng.uniform(0.5, 8),
            *(rng.uniform(0.2, 10) for _ in range(100)),
            watts=rng.uniform(70, 700),
        )
        for j in range(6)
    ]
    load = [rng.uniform(0, 2) for _ in range(100)]
    single = best_single_type(columns, load)
    assert single is not None
    mix = cheapest(columns, load, effort=Effort(nodes=1, seconds=None))
    assert mix.cost_per_h <= sum(c.cost_per_h * single.get(c.key, 0) for c in columns) + 1e-9
    assert overload(columns, load, mix) < 1e-4


def test_a_limit_that_strikes_at_once_leaves_the_better_of_last_mix_and_single_type() -> None:
    rng = random.Random(3)
    columns = [column(f"t{j}", 1.0 + j, *(rng.uniform(0.5, 5) for _ in range(60))) for j in range(5)]
    load = [rng.uniform(0, 1) for _ in range(60)]
    good = cheapest(columns, load, effort=EXACT)
    kept = cheapest(columns, load, effort=Effort(nodes=0, seconds=0.0), incumbent=good.replicas)
    assert kept.objective == pytest.approx(good.objective)
    assert not kept.optimal
    assert overload(columns, load, kept) < 1e-4


SMALL = [column("small", 1.0, 2.0, 0.5), column("big", 4.0, 10.0, 8.0)]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(), {"small": 2, "big": 1}),
        (Limits(stock={"small": 0}), {"small": 0, "big": 2}),
        (Limits(quota=2), {"small": 0, "big": 2}),
        (Limits(min_replicas=5), {"small": 4, "big": 1}),
        (Limits(min_per_domain={"": 4}), {"small": 3, "big": 1}),
    ],
)
def test_each_limit_changes_the_mix(limits: Limits, expected: Mapping[str, int]) -> None:
    assert cheapest(SMALL, (4.0, 8.0), limits, effort=EXACT).replicas == expected


def test_what_exceeds_the_budget_is_carried_in_part() -> None:
    mix = cheapest(SMALL, (4.0, 8.0), Limits(budget_per_h=5.0), effort=EXACT)
    assert mix.cost_per_h <= 5.0
    assert 0.5 < mix.carried < 1
    assert cheapest(SMALL, (4.0, 8.0), Limits(budget_per_h=6.0), effort=EXACT).carried == 1


def test_watts_are_counted_in_their_domain_only() -> None:
    columns = [
        column("left", 1.0, 1.0, watts=100.0, power_domain="a"),
        column("right", 2.0, 1.0, watts=100.0, power_domain="b"),
    ]
    assert cheapest(columns, (4.0,), Limits(watts={"a": 250.0}), effort=EXACT).replicas == {
        "left": 2,
        "right": 2,
    }


def test_several_accelerators_per_replica_count_against_the_stock() -> None:
    pair = Column("pair", "pool", 2.0, (3.0,), accelerators=2)
    one = Column("one", "pool", 1.5, (1.0,))
    mix = cheapest([pair, one], (9.0,), Limits(stock={"pool": 7}), effort=EXACT)
    assert mix.replicas == {"pair": 3, "one": 0}
    assert cheapest([pair, one], (9.0,), Limits(stock={"pool": 5}), effort=EXACT).carried == pytest.approx(
        7 / 9
    )


def test_a_bucket_that_nothing_serves_is_named_and_the_rest_is_carried() -> None:
    mix = cheapest([column("a", 1.0, 2.0, 0.0)], (3.0, 1.0), effort=EXACT)
    assert (mix.impossible, mix.replicas, mix.carried) == ((1,), {"a": 2}, 1.0)


def test_hysteresis_keeps_what_runs_when_the_gain_is_small() -> None:
    columns = [column("a", 1.0, 1.0), column("b", 0.95, 1.0)]
    running = {"a": 4, "b": 0}
    assert cheapest(columns, (4.0,), effort=EXACT).replicas == {"a": 0, "b": 4}
    kept = cheapest(columns, (4.0,), switching=Switching(running, 0.1, 0.0), effort=EXACT)
    assert kept.replicas == running


@pytest.mark.parametrize("seed", range(24))
def test_with_every_kind_of_row_the_mix_costs_what_brute_force_finds(seed: int) -> None:
    rng = random.Random(100 + seed)
    columns = [
        column(
            key, rng.uniform(0.5, 4), rng.uniform(0.5, 3), rng.uniform(0.5, 3),
            watts=rng.uniform(100, 400), power_domain=rng.choice("xy"), failure_domain=rng.choice(["r", "s", ""] if seed % 2 == 0 else "rs"),
        )
        for key in ("a", "b", "c")
    ]  # fmt: skip
    load = [rng.uniform(0.5, 4), rng.uniform(0.5, 4)]
    rows = (
        Row("the quota", {"a": 1.0, "b": rng.uniform(1, 3)}, rng.uniform(2, 12), LimitKind.QUOTA),
        Row("the power", {"b": 0.4, "c": rng.uniform(0.1, 0.7)}, rng.uniform(0.5, 4), LimitKind.POWER),
        Row("money a month", {k: rng.uniform(0.5, 4) for k in "abc"}, rng.uniform(4, 30), LimitKind.BUDGET),
        Row("kWh a day", {k: rng.uniform(0.07, 0.7) for k in "abc"}, rng.uniform(0.5, 5), LimitKind.BUDGET),
    )
    limits = Limits(
        stock={"a": rng.randint(1, 5), "b": rng.randint(1, 5), "c": rng.randint(1, 5)},
        quota=rng.randint(4, 12),
        watts={"x": rng.uniform(300, 1800), "y": rng.uniform(300, 1800)},
        budget_per_h=rng.uniform(3, 30),
        min_replicas=rng.randint(0, 2),
        min_per_domain={c.failure_domain: 1 for c in columns} if seed % 2 else {},
        min_domains=rng.randint(0, 2) if seed % 2 == 0 else 0,
        rows=rows,
    )
    best = None
    for counts in itertools.product(range(6), repeat=3):
        replicas = dict(zip("abc", counts, strict=True))
        if within_by_hand(columns, replicas, limits):
            routed = spread(columns, load, replicas)
            cost = sum(c.cost_per_h * replicas[c.key] for c in columns)
            if routed.fullest <= 1 + 1e-9 and not routed.impossible and (best is None or cost < best):
                best = cost
    try:
        mix = cheapest(columns, load, limits, effort=EXACT)
    except ServingModelError:
        assert best is None
        return
    if best is None:
        assert mix.carried < 1
    else:
        assert mix.carried == 1
        assert mix.cost_per_h == pytest.approx(best)
    assert within_by_hand(columns, mix.replicas, limits)


def within_by_hand(columns: Sequence[Column], replicas: Mapping[str, int], limits: Limits) -> bool:
    """Every limit, without the code under test."""
    assert limits.quota is not None
    assert limits.budget_per_h is not None
    pools = all(replicas[pool] <= stock for pool, stock in limits.stock.items())
    watts = all(
        sum(c.watts * replicas[c.key] for c in columns if c.power_domain == domain) <= most + 1e-6
        for domain, most in limits.watts.items()
    )
    spread_out = all(
        sum(replicas[c.key] for c in columns if c.failure_domain == domain) >= least
        for domain, least in limits.min_per_domain.items()
    )
    domains = {c.failure_domain for c in columns if replicas[c.key] > 0} - {""}
    rows = all(sum(w * replicas[p] for p, w in row.weights.items()) <= row.most + 1e-6 for row in limits.rows)
    count, cost = sum(replicas.values()), sum(c.cost_per_h * replicas[c.key] for c in columns)
    return (
        pools and watts and spread_out and rows and len(domains) >= limits.min_domains
        and limits.min_replicas <= count <= limits.quota and cost <= limits.budget_per_h + 1e-6
    )  # fmt: skip


def test_the_rows_that_leave_no_room_for_one_more_are_named() -> None:
    rows = (
        Row("the quota", {"small": 1.0}, 3.0, LimitKind.QUOTA),
        Row("the power", {"big": 700.0}, 1500.0, LimitKind.POWER),
    )
    limits = Limits(rows=rows)
    assert held_back_by(SMALL, {"small": 2, "big": 1}, limits) == []
    assert held_back_by(SMALL, {"small": 3, "big": 1}, limits) == ["the quota"]
    assert held_back_by(SMALL, {"small": 3, "big": 2}, limits) == ["the quota", "the power"]


def test_replicas_stand_in_as_many_failure_domains_as_asked() -> None:
    columns = [
        column("a1", 1.0, 2.0, failure_domain="a"), column("a2", 1.5, 2.0, failure_domain="a"),
        column("b", 3.0, 2.0, failure_domain="b"), column("nowhere", 0.5, 2.0),
    ]  # fmt: skip
    assert cheapest(columns, (4.0,), effort=EXACT).replicas["nowhere"] == 2
    two = cheapest(columns, (4.0,), Limits(min_domains=2), effort=EXACT)
    assert two.replicas == {"a1": 1, "a2": 0, "b": 1, "nowhere": 0}
    assert cheapest(columns, (0.0,), Limits(min_domains=2), effort=EXACT).replicas == two.replicas
    for effort in (Effort(nodes=0, seconds=0.0), Effort(nodes=1, seconds=0.01)):
        kept = cheapest(columns, (4.0,), Limits(min_domains=2), effort=effort, incumbent=two.replicas)
        assert kept.objective <= two.objective
    with pytest.raises(ServingModelError, match="by failure domain"):
        cheapest(columns, (4.0,), Limits(min_domains=3), effort=EXACT)
    with pytest.raises(ServingModelError, match="by failure domain"):
        cheapest(columns, (4.0,), Limits(min_domains=2, quota=1), effort=EXACT)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(stock={"small": 1, "big": 0}), "the pools have room for 1 replicas of at least 2"),
        (Limits(quota=1), "the quota of accelerators is 1, and 2 replicas take 2 at least"),
        (Limits(budget_per_h=1.5), "the budget per hour is 1.5, and 2 replicas take 2 at least"),
        (Limits(stock={"small": 1}, budget_per_h=4.9), "is 4.9, and 2 replicas take 5 at least"),
        (Limits(watts={"": 100.0}), "the power in watts is 100, and 2 replicas take 144 at least"),
        (Limits(rows=(Row("the row", {"small": 3.0, "big": 2.0}, 3.0, LimitKind.QUOTA),)), "the row is 3"),
        (Limits(stock={"small": 1}, budget_per_h=5.0, rows=(Row("r", {"big": 1.0}, 0.0, LimitKind.QUOTA),)), "r is 0"),
        (
            Limits(budget_per_h=4.0, rows=(Row("r", {"small": 1.0}, 1.0, LimitKind.QUOTA),)),
            "not within stock, quota, power and budget together",
        ),
    ],
)  # fmt: skip
def test_a_minimum_of_replicas_that_a_limit_forbids_is_told_with_its_numbers(
    limits: Limits, words: str
) -> None:
    columns = [column("small", 1.0, 2.0, watts=72.0), column("big", 4.0, 8.0, watts=700.0)]
    with pytest.raises(ServingModelError, match=words):
        cheapest(columns, (1.0,), replace(limits, min_replicas=2), effort=EXACT)


def test_the_kind_of_limit_that_binds_is_the_one_without_which_more_is_carried() -> None:
    def bound(*rows: Row, load: float = 8.0, **limits: object) -> LimitKind | None:
        within = Limits(rows=rows, **limits)  # type: ignore[arg-type]
        mix = cheapest(SMALL, (load, 0.0), within, effort=EXACT)
        return binding(SMALL, (load, 0.0), within, mix.carried, EXACT)

    quota = Row("the quota", {"small": 1.0, "big": 1.0}, 1.0, LimitKind.QUOTA)
    power = Row("the power", {"small": 70.0, "big": 700.0}, 75.0, LimitKind.POWER)
    money = Row("the budget", {"small": 1.0, "big": 4.0}, 1.5, LimitKind.BUDGET)
    assert bound(quota, stock={"big": 0}) is LimitKind.QUOTA
    assert bound(power) is LimitKind.POWER
    assert bound(money) is LimitKind.BUDGET
    assert bound(budget_per_h=1.5) is LimitKind.BUDGET
    assert bound(quota, power, stock={"big": 0}) is LimitKind.QUOTA, "both bind: the first"
    assert bound(quota, power) is LimitKind.POWER, "within the quota, a large one would do"
    assert bound(stock={"small": 1, "big": 0}) is None
    assert bound(quota, stock={"small": 1, "big": 0}) is None, "the stock alone"


def test_bounds_add_to_what_runs_or_take_from_it() -> None:
    columns = [column("a", 1.0, 1.0), column("b", 0.5, 1.0)]
    assert cheapest(columns, (3.0,), least={"a": 2}, effort=EXACT).replicas == {"a": 2, "b": 1}
    assert cheapest(columns, (3.0,), most={"b": 1}, effort=EXACT).replicas == {"a": 2, "b": 1}


def test_weights_over_what_is_ready_level_the_columns() -> None:
    columns = [column("a", 1.0, 1.0), column("b", 1.0, 3.0)]
    mix = spread(columns, (4.0,), {"a": 1, "b": 1})
    assert mix.weights[0] == {"a": pytest.approx(0.25), "b": pytest.approx(0.75)}
    assert mix.carried == pytest.approx(1.0)
    assert spread(columns, (8.0,), {"a": 1, "b": 1}).carried == pytest.approx(0.5)
    assert spread(columns, (8.0,), {}).impossible == (0,)


@pytest.mark.parametrize(
    ("columns", "load", "limits", "words"),
    [
        ([], (1.0,), Limits(), "no pool"),
        ([column("a", 1.0, 1.0), column("a", 1.0, 1.0)], (1.0,), Limits(), "twice"),
        ([column("a", 1.0, 1.0)], (1.0, 2.0), Limits(), "1 buckets, the load has 2"),
        ([column("a", 1.0, 1.0)], (-1.0,), Limits(), "negative"),
        ([column("a", 1.0, 1.0)], (math.nan,), Limits(), "not a number"),
        ([column("a", 1.0, 1.0)], (1.0,), Limits(stock={"a": 1}, min_replicas=2), "minimum of replicas"),
    ],
)
def test_bad_numbers_are_refused(
    columns: list[Column], load: tuple[float, ...], limits: Limits, words: str
) -> None:
    with pytest.raises(ServingModelError, match=words):
        cheapest(columns, load, limits)


@pytest.mark.parametrize(
    ("cost", "rate", "words"), [(-1.0, 1.0, "price"), (1.0, -1.0, "rate"), (1.0, math.nan, "rate")]
)
def test_bad_columns_are_refused(cost: float, rate: float, words: str) -> None:
    assert column("a", 0.0, 0.0).rates == (0.0,)
    with pytest.raises(ServingModelError, match=words):
        column("a", cost, rate)


def test_allowed_counts_every_row() -> None:
    assert allowed(SMALL, {"small": 1, "big": 1}, Limits(budget_per_h=5.0, quota=2))
    assert not allowed(SMALL, {"small": 2, "big": 1}, Limits(quota=2))
