"""Small programs with known answers."""

from __future__ import annotations

import sys

import pytest

from busbar.scheduler import SolverError
from busbar.scheduler.highs import Program, solve


def test_a_linear_program_and_its_prices() -> None:
    """Most of 3x + 2y with x + y <= 4 and x <= 2: x = y = 2, worth 10; the dual of the sum is 2."""
    program = Program()
    x, y = program.variable(-3.0, upper=2.0), program.variable(-2.0, upper=9.0)
    row = program.row([(x, 1.0), (y, 1.0)], high=4.0)
    found = solve(program)
    assert found is not None
    assert found.optimal
    assert found.x == pytest.approx([2.0, 2.0])
    assert found.objective == pytest.approx(-10.0)
    assert found.duals[row] == pytest.approx(-2.0)


def test_a_knapsack_in_whole_numbers() -> None:
    """A knapsack of 6 with values 10, 6, 5 and weights 5, 3, 3: the two light items, 11; the relaxation gives 12."""
    program = Program()
    items = [program.variable(-value, integer=True) for value in (10.0, 6.0, 5.0)]
    program.row(list(zip(items, (5.0, 3.0, 3.0), strict=True)), high=6.0)
    found = solve(program, gap=0.0)
    assert found is not None
    assert [round(value) for value in found.x] == [0, 1, 1]
    fractions = Program(cost=program.cost, lower=program.lower, upper=program.upper, integer=[False] * 3)
    fractions.row(list(zip(items, (5.0, 3.0, 3.0), strict=True)), high=6.0)
    relaxed = solve(fractions)
    assert relaxed is not None
    assert relaxed.objective == pytest.approx(-12.0)


def test_an_infeasible_program_has_no_solution() -> None:
    program = Program()
    program.row([(program.variable(), 1.0)], low=2.0)
    assert solve(program) is None


def test_a_search_that_hits_its_limit_is_no_worse_than_its_start() -> None:
    program = Program()
    items = [program.variable(-1.0, integer=True) for _ in range(4)]
    program.row([(item, 1.0) for item in items], high=3.0)
    found = solve(program, nodes=0, start=[1.0, 1.0, 0.0, 0.0])
    assert found is not None
    assert found.objective <= -2.0


def test_without_highspy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(SolverError, match=r"pip install 'busbar\[scheduler\]'"):
        solve(Program())
