"""One power cap for each pool: lowered where watts bind, no lower than they ask for, and raised where there is room."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from busbar.scheduler.autoscale.caps import Ways, carrying, decided, lifted, weighed, within
from busbar.scheduler.autoscale.columns import Column, Effort, LimitKind, Limits, Row, allowed, capped_key
from busbar.scheduler.autoscale.mix import cheapest

EXACT = Effort(nodes=None, seconds=None, gap=0.0)
SLOWER = {0.8: 1.05, 0.6: 1.2}
"""By cap."""


def pool(
    name: str, cost: float, rate: float, watts: float, slower: dict[float, float] = SLOWER
) -> list[Column]:
    whole = Column(name, name, cost, (rate,), watts=watts)
    return [
        whole,
        *(
            replace(whole, key=capped_key(name, cap), rates=(rate / slow,), watts=cap * watts, power_cap=cap)
            for cap, slow in slower.items()
        ),
    ]


def feed(most: float, *of: str, watts: float = 400.0, name: str = "feed") -> Row:
    return Row(name, dict.fromkeys(of or ("a",), watts), most, LimitKind.POWER)


A = Ways.of(pool("a", 4.0, 1.0, 400.0))


def test_columns_are_one_for_each_pool_under_its_cap() -> None:
    [column] = A.under({"a": 0.6})
    assert (column.key, column.pool, column.power_cap, column.watts) == ("a", "a", 0.6, 240.0)
    assert [c.power_cap for c in decided([column])] == [1.0]
    assert A.known({"a": 0.6, "b": 0.8}) == {"a": 0.6}
    assert A.known({"a": 0.7}) == {}
    [row] = weighed([feed(1000.0)], A.under({"a": 0.6}))
    assert row.weights == {"a": 240.0}
    quota = Row("quota", {"a": 1.0}, 3.0, LimitKind.QUOTA)
    assert weighed([quota], A.under({"a": 0.6})) == (quota,)


def test_more_replicas_at_lower_limits_carry_what_few_at_full_watts_do_not() -> None:
    limits = Limits(stock={"a": 8}, rows=(feed(1600.0),))
    assert carrying(A, {}, [4.5], limits, {"a": 4}, EXACT) == {"a": 0.8}, "no lower than the watts ask for"
    assert carrying(A, {}, [5.5], limits, {"a": 4}, EXACT) == {"a": 0.6}
    assert carrying(A, {}, [3.9], limits, {"a": 4}, EXACT) == {}, "four carry it"
    full = replace(limits, stock={"a": 4})
    assert carrying(A, {}, [4.5], full, {"a": 4}, EXACT) == {}, "no room for more replicas"


def test_what_is_wanted_fits_the_watts_by_lower_caps() -> None:
    assert within(A, {}, {"a": 4}, [feed(1600.0)]) == {}
    assert within(A, {}, {"a": 4}, [feed(1599.0)]) == {"a": 0.8}
    assert within(A, {}, {"a": 4}, [feed(1000.0)]) == {"a": 0.6}
    assert within(A, {}, {"a": 4}, [feed(100.0)]) == {"a": 0.6}, "as far as there are caps"
    assert within(A, {}, {"a": 4}, [replace(feed(100.0), kind=LimitKind.QUOTA)]) == {}


def test_the_pool_that_loses_least_for_a_watt_is_limited_first() -> None:
    both = Ways.of([*pool("a", 4.0, 1.0, 400.0), *pool("b", 1.0, 1.0, 400.0, {0.8: 1.5, 0.6: 2.0})])
    row = feed(1450.0, "a", "b")
    assert within(both, {}, {"a": 2, "b": 2}, [row]) == {"a": 0.8}
    assert within(both, {}, {"b": 4}, [row]) == {"b": 0.8}, "a pool without replicas saves nothing"
    alone = Ways.of([*pool("a", 4.0, 1.0, 400.0), Column("b", "b", 1.0, (1.0,), watts=400.0)])
    assert within(alone, {}, {"b": 4}, [row]) == {}, "a pool without caps"


def test_caps_are_raised_as_far_as_there_are_watts() -> None:
    low = {"a": 0.6}
    assert lifted(A, low, {"a": 4}, [feed(1600.0)]) == {}
    assert lifted(A, low, {"a": 4}, [feed(1400.0)]) == {"a": 0.8}
    assert lifted(A, low, {"a": 4}, [feed(1200.0)]) == low
    assert lifted(A, low, {"a": 4}, [feed(1600.0)], short=["feed"]) == low, "others lack watts there"
    assert lifted(A, low, {"a": 4}, [feed(1600.0)], short=["another"]) == {}
    assert lifted(A, low, {}, [feed(100.0)]) == {}, "without replicas there is nothing to limit"
    both = Ways.of([*pool("a", 4.0, 1.0, 400.0), *pool("b", 1.0, 1.0, 400.0)])
    rows = [feed(100.0), feed(1600.0, "b", name="other")]
    assert lifted(both, {"a": 0.6, "b": 0.6}, {"a": 4, "b": 4}, rows) == low, (
        "another domain's want is its own"
    )


@pytest.mark.parametrize("seed", range(20))
def test_caps_never_carry_less_and_keep_the_watts(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"p{number}" for number in range(rng.randint(1, 3))]
    ways = Ways.of(
        column
        for name in names
        for column in pool(
            name,
            rng.uniform(0.5, 8.0),
            rng.uniform(0.5, 6.0),
            rng.uniform(70.0, 700.0),
            {0.8: rng.uniform(1.0, 1.15), 0.6: rng.uniform(1.15, 1.6)},
        )
    )
    weights = {name: ways.by_pool[name][0].watts for name in names}
    row = Row("feed", weights, rng.uniform(800.0, 4000.0), LimitKind.POWER)
    limits = Limits(stock={name: rng.randint(3, 12) for name in names}, rows=(row,), min_replicas=1)
    load = [rng.uniform(2.0, 60.0)]
    before = cheapest(decided(ways.under({})), load, limits, effort=EXACT)
    caps = carrying(ways, {}, load, limits, before.replicas, EXACT)
    columns = ways.under(caps)
    under = replace(limits, rows=weighed(limits.rows, columns))
    after = cheapest(decided(columns), load, under, effort=EXACT, least=before.replicas)
    assert allowed(columns, after.replicas, under)
    assert after.carried >= before.carried - 1e-6
    for name in caps:
        higher = ways.step(caps, name, up=True)
        assert higher is not None
        more = ways.under(higher)
        fits = allowed(more, after.replicas, replace(limits, rows=weighed(limits.rows, more)))
        assert not fits, "a cap lower than the watts ask for"
