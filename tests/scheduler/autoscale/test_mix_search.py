"""The search for better mixes by exchanges: what its cuts rule out is surely no mix, and the clock ends it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping

import pytest

from busbar.scheduler import highs
from busbar.scheduler.autoscale.mix import Column, Effort, best_single_type, cheapest, spread
from busbar.scheduler.autoscale.mix_search import Cuts, Exchange, improved
from busbar.scheduler.autoscale.spread import Level
from busbar.scheduler.highs import Deadline, Solution

FOREVER, PAST = Deadline(0.0, math.inf), Deadline(0.0, 0.0)


def instance(rng: random.Random, buckets: int, types: int) -> tuple[list[Column], list[float]]:
    columns = [
        Column(
            f"t{j}",
            f"t{j}",
            rng.uniform(0.5, 8),
            tuple(0.0 if rng.random() < 0.2 else rng.uniform(0.2, 10) for _ in range(buckets)),
        )
        for j in range(types)
    ]
    served = [any(c.rates[b] for c in columns) for b in range(buckets)]
    return columns, [rng.uniform(0, 6) * served[b] for b in range(buckets)]


def work(columns: list[Column], load: list[float]) -> dict[str, dict[int, float]]:
    return {
        c.key: {b: load[b] / c.rates[b] for b in range(len(load)) if load[b] > 0 and c.rates[b] > 0}
        for c in columns
    }


def carries(columns: list[Column], load: list[float], replicas: Mapping[str, int]) -> bool:
    found = spread(columns, load, replicas)
    return found.carried >= 1 and not found.impossible


def test_cuts_forbid_nothing_that_carries_the_load_whatever_the_prices() -> None:
    rng, ruled_out = random.Random(4), 0
    for _ in range(12):
        columns, load = instance(rng, 4, 3)
        cuts = Cuts(work(columns, load))
        for _ in range(6):
            priced = rng.sample(columns, rng.randint(1, 3))
            cuts.add({c.key: rng.uniform(-0.2, 1.0) for c in priced})
        for counts in itertools.product(range(4), repeat=3):
            replicas = {c.key: n for c, n in zip(columns, counts, strict=True)}
            if cuts.forbid(replicas):
                ruled_out += 1
                assert not carries(columns, load, replicas), (replicas, load)
    assert ruled_out > 100


def test_the_prices_of_an_overloaded_mix_forbid_it() -> None:
    rng, tried = random.Random(5), 0
    for _ in range(80):
        columns, load = instance(rng, 5, 3)
        replicas = {c.key: rng.randint(1, 2) for c in columns}
        if carries(columns, load, replicas) or spread(columns, load, replicas).impossible:
            continue
        tried += 1
        cuts = Cuts(work(columns, load))
        level = Level(columns, load)
        level.fill(replicas)
        cuts.add(level.prices)
        assert cuts.forbid(replicas)
        assert cuts.forbid({key: count - 1 for key, count in replicas.items()})
    assert tried > 10


def exchange(costs: Mapping[str, float], least: Mapping[str, float], asked: list[dict[str, int]]) -> Exchange:
    """A mix carries the load where its replicas, weighted by `least`, are at least ten."""

    def missing(replicas: Mapping[str, int]) -> Mapping[str, float] | None:
        asked.append(dict(replicas))
        return None if sum(least[key] * count for key, count in replicas.items()) >= 10 else {}

    return Exchange(
        lambda key, count: costs[key] * count,
        lambda replicas: replicas["a"] != 3,
        missing,
        Cuts({"a": {}, "b": {}}),
    )


def test_one_replica_may_take_the_place_of_two_and_two_of_one_within_the_limits() -> None:
    asked: list[dict[str, int]] = []
    pair = exchange({"a": 1.0, "b": 1.5}, {"a": 3.0, "b": 6.0}, asked)
    assert improved({"a": 6, "b": 0}, pair, FOREVER) == {"a": 0, "b": 2}
    other = exchange({"a": 1.0, "b": 2.5}, {"a": 3.0, "b": 6.0}, asked)
    assert improved({"a": 0, "b": 2}, other, FOREVER) == {"a": 4, "b": 0}
    assert all(replicas["a"] != 3 for replicas in asked)


def test_nothing_is_tried_when_the_time_is_up() -> None:
    asked: list[dict[str, int]] = []
    begun = {"a": 9, "b": 9}
    assert improved(begun, exchange({"a": 1.0, "b": 1.0}, {"a": 5.0, "b": 5.0}, asked), PAST) == begun
    assert asked == []


def test_a_whole_answer_without_time_takes_a_few_programs_and_is_no_dearer_than_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved, solve = [0], highs._solved

    def counted(library: object, solver: object) -> Solution | None:
        solved[0] += 1
        return solve(library, solver)

    monkeypatch.setattr(highs, "_solved", counted)
    rng = random.Random(6)
    for _ in range(5):
        columns, load = instance(rng, 60, 5)
        columns.append(Column("all", "all", 3.0, tuple(rng.uniform(0.5, 5) for _ in load)))
        solved[0] = 0
        found = cheapest(columns, load, effort=Effort(seconds=0.0))
        assert solved[0] <= 3, "the relaxation, and what the first mixes carry"
        assert found.carried == 1
        single = best_single_type(columns, load)
        assert single is not None
        assert found.cost_per_h <= sum(c.cost_per_h * single[c.key] for c in columns) + 1e-9
        better = cheapest(columns, load, effort=Effort(seconds=30.0))
        assert better.objective <= found.objective


def test_a_deadline_is_counted_from_its_beginning() -> None:
    never, soon = Deadline.after(None), Deadline.after(100.0)
    assert (never.left_s, never.is_past, never.at(0.5).left_s) == (None, False, None)
    assert soon.at(0.25).ends_s == soon.begun_s + 25
    assert 99 < (soon.left_s or 0) <= 100
    assert Deadline.after(0.0).is_past
