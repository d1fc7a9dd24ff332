"""Prices: their bound equals the linear program's optimum, also where jobs accept several types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from busbar.scheduler.candidates.candidate import Candidate
from busbar.scheduler.candidates.prices import solve
from busbar.scheduler.candidates.watt_market import WattLimit
from busbar.scheduler.highs import Program
from busbar.scheduler.highs import solve as solve_program
from busbar.scheduler.model.snapshot import JobId, Resources

KINDS = ("a", "b", "c", "d")


Bids = dict[JobId, tuple[Candidate, ...]]


def _bids(values: dict[str, float], size: int = 1) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(kind, kind, "resident", size, Resources(1000), 1.0, value, 0.0)
        for kind, value in values.items()
    )


def _market(seed: int, jobs: int, sizes: tuple[int, ...]) -> Bids:
    random = Random(seed)
    found = {}
    for number in range(jobs):
        size = random.choice(sizes)
        values = {kind: size * random.uniform(0.1, 1.0) ** 2 for kind in KINDS if random.random() < 0.9}
        found[JobId(f"j{number:03d}")] = _bids(values or {"a": 1.0}, size)
    return found


def _optimum(jobs: Bids, capacity_m: dict[str, int], limits: Sequence[WattLimit] = ()) -> float:
    program = Program()
    used: dict[str, list[tuple[int, float]]] = {}
    drawn: list[list[tuple[int, float]]] = [[] for _ in limits]
    for bids in jobs.values():
        own = [program.variable(-candidate.value) for candidate in bids]
        program.row([(variable, 1.0) for variable in own], high=1.0)
        for variable, candidate in zip(own, bids, strict=True):
            used.setdefault(candidate.accelerator, []).append((variable, candidate.accelerators_m / 1000))
            for terms, limit in zip(drawn, limits, strict=True):
                if candidate.pool in limit.pools:
                    terms.append((variable, candidate.pods * candidate.draw_w))
    for kind, terms in used.items():
        program.row(terms, high=capacity_m[kind] / 1000)
    for terms, limit in zip(drawn, limits, strict=True):
        program.row(terms, high=limit.watts)
    solution = solve_program(program)
    assert solution is not None
    return -solution.objective


@pytest.mark.parametrize("seed", range(8))
def test_bound_is_the_optimum_for_single_accelerators(seed: int) -> None:
    jobs = _market(seed, 80, (1,))
    capacity_m = {"a": 9000, "b": 12000, "c": 20000, "d": 15000}
    assert solve(jobs, capacity_m).bound == pytest.approx(_optimum(jobs, capacity_m), rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_bound_holds_and_is_near_the_optimum_for_gangs(seed: int) -> None:
    jobs = _market(seed, 60, (1, 1, 1, 2, 4, 8))
    capacity_m = {"a": 24000, "b": 16000, "c": 32000, "d": 16000}
    best = _optimum(jobs, capacity_m)
    assert best - 1e-6 <= solve(jobs, capacity_m).bound <= best * 1.01


def test_two_types_that_substitute_each_other_rise_together() -> None:
    """Four jobs run equally well on either of two accelerators and are worth 4, 3, 2, 1: the third sets both prices.
    Raising one price alone never helps, because every job would choose the other accelerator."""
    jobs = {JobId(f"j{i}"): _bids({"a": 4.0 - i, "b": 4.0 - i}) for i in range(4)}
    market = solve(jobs, {"a": 1000, "b": 1000})
    assert market.bound == pytest.approx(7.0)
    assert market.price("a") == pytest.approx(market.price("b"))
    assert 2.0 <= market.price("a") <= 3.0


def test_a_job_of_several_sizes_counts_once_in_the_bound() -> None:
    """One job wants one accelerator for 3 or two for 5, another one for 1; of two there are enough for 5."""
    both = _bids({"a": 3.0}) + _bids({"a": 5.0}, 2)
    market = solve({JobId("x"): both, JobId("y"): _bids({"a": 1.0})}, {"a": 2000})
    assert market.bound == pytest.approx(5.0)


def _powered(seed: int, jobs: int, caps: bool) -> Bids:
    """Jobs of one to eight accelerators on two types, that draw very different watts, some of them also under a cap."""
    random = Random(seed)
    found = {}
    for number in range(jobs):
        size, bids = random.choice((1, 1, 2, 8)), []
        for kind in ("a", "b"):
            value, watts = size * random.uniform(0.1, 1.0), random.randint(100, 700)
            own = Candidate(kind, kind, "resident", size, Resources(1000), 1.0, value, 0.0, draw_w=watts)
            bids.append(own)
            if caps:
                bids.append(replace(own, value=0.8 * value, draw_w=watts // 2, power_cap=0.5))
        found[JobId(f"j{number:03d}")] = tuple(bids)
    return found


@pytest.mark.parametrize("caps", [False, True])
@pytest.mark.parametrize("carried", [0.0, 4000.0, 12_000.0, 20_000.0, 60_000.0])
@pytest.mark.parametrize("seed", range(4))
def test_bound_with_watts_is_near_the_optimum_and_never_below(seed: int, carried: float, caps: bool) -> None:
    """Where accelerators, watts, both or none of them are scarce."""
    jobs = _powered(seed, 60, caps)
    capacity_m = {"a": 20_000, "b": 30_000}
    limits = (WattLimit(("a", "b"), ("row",), carried),)
    best = _optimum(jobs, capacity_m, limits)
    market = solve(jobs, capacity_m, limits=limits)
    assert market.bound >= best - 1e-6
    assert market.bound <= 1.04 * best + 1e-6
    assert set(market.domains) == {"row"}
    assert market.watts == dict.fromkeys(("a", "b"), market.domains["row"])


def test_watts_cost_nothing_where_they_are_not_scarce() -> None:
    jobs = _powered(1, 60, caps=True)
    capacity_m = {"a": 20_000, "b": 30_000}
    plenty = solve(jobs, capacity_m, limits=(WattLimit(("a", "b"), ("row",), 1e6),))
    assert plenty.domains == {"row": 0.0}
    assert plenty.prices == pytest.approx(solve(jobs, capacity_m).prices)
    one = jobs[JobId("j000")][0]
    assert plenty.cost(one) == plenty.prices["a"] * one.accelerators_m / 1000


def test_each_limit_has_its_price() -> None:
    """The jobs of pool a have watts enough, those of b do not."""
    jobs = _powered(2, 60, caps=False)
    limits = (WattLimit(("a",), ("rack-0",), 1e6), WattLimit(("b",), ("rack-1", "rack-2"), 3000.0))
    market = solve(jobs, {"a": 20_000, "b": 30_000}, limits=limits)
    assert market.domains["rack-0"] == 0.0
    assert market.domains["rack-1"] == market.domains["rack-2"] == market.watts["b"] > 0
    first, second = jobs[JobId("j000")]
    assert market.cost(second) == pytest.approx(
        market.prices["b"] * second.pods + market.watts["b"] * second.pods * second.draw_w
    )
    assert market.cost(first) == pytest.approx(market.prices["a"] * first.pods)
