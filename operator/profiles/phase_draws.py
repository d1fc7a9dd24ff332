"""What a board draws in each phase of serving, from what boards draw and from what their engines count. Pure.

A meter's second holds many steps, so no meter tells prompts from decoding. But an engine counts the seconds of both, and
their parts of a minute differ from minute to minute. A minute under one limit is one equation:

    watts = part of prompts · W(prompts) + part of decoding · W(decoding) + the rest · W(idle)

Least squares over such minutes give the three, with their standard errors. A phase is told only where its error is small:
where prompts and decoding always come in the same parts, nobody can tell them apart, and only their mean is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from busbar.operator.profiles.paces import LONGEST_S, STEADY
from busbar.scheduler.power.curves import level_of

Floats = NDArray[np.float64]

MINUTE_S = 60.0
"""An equation is of so long: engines are asked every few seconds, so the ends of a shorter one would not be those of the meter."""
HALF_LIFE = 600.0
"""Minutes after so many more of which a minute counts half: models of load and drivers change."""
LEAST_MINUTES = 10.0
"""Of a place, before anything is told of it, and of a phase in it a tenth."""
MOST_ERROR = 0.05
"""Of what a board draws at most: the standard error of watts that are told."""
LEAST_ERROR = 0.005
"""The same, of one minute: meters are no better."""
MOST_PLACES = 1000
"""Of which equations are kept; then what has not been added to for longest is forgotten."""
RIDGE = 1e-6
PHASES = 3


class DrawPlace(NamedTuple):
    """What draws alike."""

    workload_class: str
    accelerator: str
    accelerators: int
    mode: str


@dataclass(frozen=True, slots=True)
class ReplicaDraw:
    """Replicas of one place on one node, at one moment."""

    name: str
    """Of the node and the replicas on it."""
    place: DrawPlace
    part: float
    """The limit of the boards, of what they draw at most."""
    board_w: float
    """Mean of the boards that they hold."""
    board_max_w: float
    prefill_s: float
    """Of steps with more tokens of prompts than decoded ones, since the engines' starts; the mean of the replicas."""
    decode_s: float
    """Of all others."""


@dataclass(frozen=True, slots=True)
class PhaseDraw:
    """Watts of one board; None: not known well enough."""

    busy: float
    """At the mix of prompts and decoding that was seen."""
    prefill: float | None
    decode: float | None
    idle: float | None


@dataclass(slots=True)
class _Minute:
    since: ReplicaDraw
    since_s: float
    low: float
    high: float
    joules: float = 0.0
    looked_s: float = 0.0


@dataclass(slots=True)
class _Sums:
    """Normal equations of a place under one limit."""

    board_max_w: float
    squares: Floats = field(default_factory=lambda: np.zeros((PHASES, PHASES)))
    products: Floats = field(default_factory=lambda: np.zeros(PHASES))
    watts_squared: float = 0.0
    minutes: float = 0.0

    def add(self, parts: Floats, watts: float) -> None:
        keep = 0.5 ** (1 / HALF_LIFE)
        self.squares = keep * self.squares + np.outer(parts, parts)
        self.products = keep * self.products + parts * watts
        self.watts_squared = keep * self.watts_squared + watts * watts
        self.minutes = keep * self.minutes + 1

    def solved(self) -> PhaseDraw | None:
        """None: too little is known."""
        spent = self.squares.sum(axis=1)  # parts add up to 1, so this is what was spent in each phase
        if self.minutes < LEAST_MINUTES or spent[0] + spent[1] < LEAST_MINUTES / 10:
            return None
        inverse = np.linalg.inv(self.squares + RIDGE * np.eye(PHASES))
        watts = inverse @ self.products
        left = max(self.watts_squared - float(watts @ self.products), 0.0) / max(self.minutes - PHASES, 1.0)
        variance = max(left, (LEAST_ERROR * self.board_max_w) ** 2)

        def told(mix: Floats) -> float | None:
            error_w = math.sqrt(variance * float(mix @ inverse @ mix))
            value = float(mix @ watts)
            sure = error_w <= MOST_ERROR * self.board_max_w and 0 < value <= 1.5 * self.board_max_w
            return value if sure else None

        busy = told(np.array([spent[0], spent[1], 0.0]) / (spent[0] + spent[1]))
        if busy is None:
            return None
        each = [
            told(np.eye(PHASES)[phase]) if spent[phase] >= LEAST_MINUTES / 10 else None
            for phase in range(PHASES)
        ]
        return PhaseDraw(busy, *each)


class PhaseDraws:
    """What is known of all classes since the start."""

    def __init__(self) -> None:
        self._minutes: dict[str, _Minute] = {}
        self._sums: dict[tuple[DrawPlace, int], _Sums] = {}
        """By place and limit, in per cent."""

    def look(self, draws: Iterable[ReplicaDraw], now_s: float) -> None:
        """To be called once a second with all that there are."""
        seen = {}
        for draw in draws:
            minute = self._minutes.get(draw.name)
            seen[draw.name] = minute = self._looked(minute, draw, now_s)
            minute.looked_s = now_s
        self._minutes = seen

    def of_class(self, workload_class: str) -> dict[tuple[DrawPlace, int], PhaseDraw]:
        """By place and limit, in per cent."""
        found = {}
        for (place, level), sums in self._sums.items():
            if place.workload_class == workload_class and (draw := sums.solved()) is not None:
                found[place, level] = draw
        return found

    def _looked(self, minute: _Minute | None, draw: ReplicaDraw, now_s: float) -> _Minute:
        fresh = _Minute(draw, now_s, draw.part, draw.part)
        if minute is None or now_s - minute.looked_s > LONGEST_S:
            return fresh
        minute.joules += draw.board_w * (now_s - minute.looked_s)
        minute.low, minute.high = min(minute.low, draw.part), max(minute.high, draw.part)
        prefill_s, decode_s = draw.prefill_s - minute.since.prefill_s, draw.decode_s - minute.since.decode_s
        if minute.high - minute.low > STEADY or min(prefill_s, decode_s) < 0:
            return fresh
        passed_s = now_s - minute.since_s
        if passed_s < MINUTE_S:
            return minute
        parts = np.array([prefill_s, decode_s, 0.0]) / passed_s
        parts[2] = 1.0 - parts.sum()
        if parts[2] < 0:  # engines are asked a moment before or after the meters
            parts = np.array([prefill_s, decode_s, 0.0]) / (prefill_s + decode_s)
        watts = minute.joules / passed_s
        if math.isfinite(watts) and bool(np.isfinite(parts).all()):
            self._add((draw.place, level_of((minute.low + minute.high) / 2)), draw.board_max_w, parts, watts)
        return fresh

    def _add(self, at: tuple[DrawPlace, int], board_max_w: float, parts: Floats, watts: float) -> None:
        sums = self._sums.pop(at, None) or _Sums(board_max_w)
        sums.add(parts, watts)
        self._sums[at] = sums
        if len(self._sums) > MOST_PLACES:
            del self._sums[next(iter(self._sums))]
