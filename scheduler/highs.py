"""Linear and mixed-integer programs through HiGHS: the only module that imports `highspy`, and only when
used.

(`highspy` and `ortools` cannot share a process, and most decisions need neither.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .errors import SolverError


@dataclass
class Program:
    """minimise cost @ x  with  lower <= x <= upper  and  low_i <= row_i @ x <= high_i."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def variable(
        self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, integer: bool = False
    ) -> int:
        """Add a variable; returns its index. Keep explicit bounds: the simplex is much slower without."""
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Sequence[tuple[int, float]], low: float = -math.inf, high: float = math.inf) -> int:
        """Add a row of (variable, coefficient); returns its index."""
        self.starts.append(len(self.index))
        for variable, value in terms:
            self.index.append(variable)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1


@dataclass(frozen=True, slots=True)
class Deadline:
    """When an answer that takes several programs must be there, by the clock that HiGHS counts its limits by."""

    begun_s: float
    ends_s: float
    """Infinite: never."""

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """So many seconds from now on; None: no clock ends it."""
        now_s = time.monotonic()
        return cls(now_s, math.inf if seconds is None else now_s + seconds)

    def at(self, part: float) -> Deadline:
        """The end of that part of the time."""
        return Deadline(self.begun_s, self.begun_s + part * (self.ends_s - self.begun_s))

    @property
    def left_s(self) -> float | None:
        """None: no clock ends it."""
        return None if math.isinf(self.ends_s) else max(0.0, self.ends_s - time.monotonic())

    @property
    def is_past(self) -> bool:
        return self.left_s == 0.0


@dataclass(frozen=True)
class Solution:
    """The solver's result. `optimal` is False if a limit stopped it: then `x` is the best found."""

    x: list[float]
    objective: float
    duals: list[float]
    optimal: bool


def solve(
    program: Program,
    seconds: float | None = None,
    nodes: int | None = None,
    gap: float = 0.01,
    interior: bool = False,
    start: Sequence[float] | None = None,
) -> Solution | None:
    """Solve; None if infeasible, or if a limit struck before any solution was found.

    Args:
        seconds: time limit; leave None where the same input must give the same bytes.
        nodes: limit on branch-and-bound nodes.
        start: a feasible solution to begin with, so that a limit never leaves less than this.
        interior: LP by interior point without crossover: a central solution instead of a vertex.

    Raises:
        SolverError: `highspy` is not installed, or it failed.
    """
    library = _library()
    highs = _solver(library, program, _options(program, seconds, nodes, gap, interior))
    if start is not None:
        known_solution = library.HighsSolution()
        known_solution.col_value = list(start)
        highs.setSolution(known_solution)
    return _solved(library, highs)


class Linear:
    """A linear program that is solved again and again with small changes, each time from the last basis."""

    def __init__(self, program: Program) -> None:
        """
        Args:
            program: its integers are taken for continuous.

        Raises:
            SolverError: as `solve`.
        """
        self._library = _library()
        relaxed = replace(program, integer=[])
        self._highs = _solver(self._library, relaxed, _options(relaxed, None, None, 0.0, False))

    def set_bounds(self, variable: int, low: float, high: float) -> None:
        """Other bounds of a variable."""
        self._highs.changeColBounds(variable, low, high)

    def set_coefficient(self, row: int, variable: int, value: float) -> None:
        """Another coefficient."""
        self._highs.changeCoeff(row, variable, value)

    def solve(self) -> Solution | None:
        """Solve; None if infeasible. Raises SolverError."""
        return _solved(self._library, self._highs)


def _library() -> Any:
    try:
        import highspy
    except ImportError as error:
        raise SolverError("this needs highspy: pip install 'busbar[scheduler]'") from error
    return highspy


def _solver(library: Any, program: Program, options: Mapping[str, object]) -> Any:
    highs = library.Highs()
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(_model(library, program))
    return highs


def _solved(library: Any, highs: Any) -> Solution | None:
    highs.run()
    status = highs.getModelStatus()
    known = library.HighsModelStatus
    if status in (known.kInfeasible, known.kUnboundedOrInfeasible):
        return None
    solution = highs.getSolution()
    found = status in (known.kOptimal, known.kTimeLimit, known.kSolutionLimit, known.kIterationLimit)
    if not found and status != known.kUnknown:
        raise SolverError(f"the solver ended with {highs.modelStatusToString(status)}")
    if not solution.value_valid:
        return None
    objective = float(highs.getInfo().objective_function_value)
    duals = list(solution.row_dual) if solution.dual_valid else []
    return Solution(list(solution.col_value), objective, duals, status == known.kOptimal)


def _options(
    program: Program, seconds: float | None, nodes: int | None, gap: float, interior: bool
) -> dict[str, object]:
    options: dict[str, object] = {"output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": gap}
    if seconds is not None:
        options["time_limit"] = seconds
    if nodes is not None:
        options["mip_max_nodes"] = nodes
    if interior and not any(program.integer):
        options |= {"solver": "ipm", "run_crossover": "off"}
    return options


def _model(highspy: Any, program: Program) -> Any:
    infinity = highspy.kHighsInf
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.low)
    lp.col_cost_ = np.array(program.cost, float)
    lp.col_lower_ = np.array(program.lower, float)
    lp.col_upper_ = np.array([infinity if math.isinf(u) else u for u in program.upper], float)
    lp.row_lower_ = np.array([-infinity if math.isinf(v) else v for v in program.low], float)
    lp.row_upper_ = np.array([infinity if math.isinf(v) else v for v in program.high], float)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array([*program.starts, len(program.index)], np.int32)
    lp.a_matrix_.index_ = np.array(program.index, np.int32)
    lp.a_matrix_.value_ = np.array(program.values, float)
    if any(program.integer):
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if flag else kinds.kContinuous for flag in program.integer]
    return lp
