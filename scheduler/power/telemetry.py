"""What the controller knows of a node: what it can draw, what it does now, and how work slows down under a cap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from ..errors import PowerError


class Phase(StrEnum):
    """What the boards of a node spend their time on."""

    IDLE = "Idle"
    PREFILL = "Prefill"
    DECODE = "Decode"
    TRAINING = "Training"


@dataclass(frozen=True, slots=True)
class NodePower:
    """What a node can draw, and what its work is worth."""

    name: str
    host_w: float
    """The most that everything but the boards draws."""
    boards: int
    board_min_w: float
    """The lowest limit that the boards accept."""
    board_max_w: float
    """What a board draws at most if nobody limits it."""
    board_factor: float = 1.0
    """Watts at the feed for each watt of a board: fans, regulators and supplies."""
    weight: float = 1.0
    """What a second lost here costs beside a second lost elsewhere: priority, slack of the SLO."""
    controllable: bool = True
    """False: the boards refuse limits, so the node counts with all it can draw."""
    first_token: float = 0.0
    """What the part by which first tokens come later counts beside work lost elsewhere; 0: they have no target."""
    slope: float = field(init=False)
    """Watts of the node for one watt of limit on each of its boards."""
    floor_w: float = field(init=False)
    """What the node draws at most with its boards at their lowest limit; it holds this without any lease."""
    nameplate_w: float = field(init=False)
    """What the node draws at most."""

    def __post_init__(self) -> None:
        numbers = (
            self.host_w,
            self.board_min_w,
            self.board_max_w,
            self.board_factor,
            self.weight,
            self.first_token,
        )
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or self.boards < 0:
            raise PowerError(f"node {self.name!r}: watts, factor and weight must be finite and not negative")
        if self.board_min_w > self.board_max_w:
            raise PowerError(
                f"node {self.name!r}: the lowest limit of a board, {self.board_min_w:g} W, is above its highest, "
                f"{self.board_max_w:g} W"
            )
        slope = self.boards * self.board_factor
        object.__setattr__(self, "slope", slope)
        object.__setattr__(self, "floor_w", self.host_w + slope * self.board_min_w)
        object.__setattr__(self, "nameplate_w", self.host_w + slope * self.board_max_w)

    def board_limit_w(self, lease_w: float) -> float:
        """The limit per board that keeps the whole node within its lease."""
        if not self.slope:
            return self.board_min_w
        return min(max((lease_w - self.host_w) / self.slope, self.board_min_w), self.board_max_w)


@dataclass(frozen=True, slots=True)
class PhaseLoad:
    """Part of a node's time."""

    phase: Phase
    share: float
    """Of the last seconds, 0 to 1."""
    board_w: float
    """What a board draws in this phase without a limit."""
    stretch_s: float = 0.0
    """How long the node stays in the phase in one go, in the mean and without a limit; 0: unknown."""
    curve: CapCurve | None = None
    """What limits cost here, by the part of what a board draws at most; None: what they cost in this phase everywhere."""


@dataclass(frozen=True, slots=True)
class NodeTelemetry:
    """What a node last said of itself."""

    node: str
    at_s: float
    """The controller's clock when it asked for this."""
    epoch: int
    """Start of the node's agent and driver; a later start has a larger number."""
    clock_s: float
    """The node's monotonic clock when it answered."""
    sequence: int
    """The newest lease of this epoch whose limits are in force by read-back; 0: none. No older one is accepted."""
    limit_w: float
    """What the limits that the node read back let it draw."""
    drawn_w: float
    """Mean of the last second."""
    spread_w: float = 0.0
    """Standard deviation of the 1 s means of the last minute."""
    phases: tuple[PhaseLoad, ...] = ()
    bucket_j: float | None = None
    """What the token bucket of the lease in force holds; None: it has none, or nobody knows."""


def plausible(node: NodePower, told: NodeTelemetry) -> bool:
    """Whether the numbers can be those of this node at all. Others are treated like silence."""
    for number in (told.at_s, told.clock_s, told.limit_w, told.drawn_w, told.spread_w):
        if not 0 <= number < math.inf:
            return False
    if told.drawn_w > 1.5 * node.nameplate_w or not math.isfinite(told.bucket_j or 0.0):
        return False
    for load in told.phases:
        if not (0 <= load.share <= 1 and 0 <= load.board_w < math.inf and 0 <= load.stretch_s < math.inf):
            return False
    return True


@dataclass(frozen=True, slots=True)
class CapCurve:
    """How much slower a phase runs when it gets only a fraction of the watts that it wants."""

    points: tuple[tuple[float, float], ...]
    """(fraction of the watts wanted, slowdown), the fraction rising; outside, the nearest point holds."""

    def __post_init__(self) -> None:
        fractions = [fraction for fraction, _ in self.points]
        if not self.points or fractions != sorted(set(fractions)):
            raise PowerError("a cap curve needs points with rising fractions")
        if not all(
            math.isfinite(fraction) and fraction > 0 and math.isfinite(slowdown) and slowdown >= 1
            for fraction, slowdown in self.points
        ):
            raise PowerError("a cap curve's fractions must be above 0 and its slowdowns at least 1")

    def softened(self, part: float) -> CapCurve:
        """A curve of which only this part of the excess counts: for phases that wait for memory."""
        return CapCurve(tuple((fraction, 1 + part * (slowdown - 1)) for fraction, slowdown in self.points))


UNKNOWN_CURVE = CapCurve(tuple((f / 100, 100 / f) for f in (10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100)))
"""A phase of which nothing is known: half the watts, half the speed."""

COMPUTE_CURVE = CapCurve(
    (
        (0.25, 3.4),
        (0.40, 1.8),
        (0.51, 1.38),
        (0.59, 1.17),
        (0.68, 1.11),
        (0.78, 1.06),
        (0.87, 1.04),
        (0.94, 1.01),
        (1.0, 1.0),
    )
)
"""Medians over the training jobs that Zeus measured on V100s under power limits (NSDI 2023, its published traces); below
0.51, nothing was measured there, and the curve goes on steeper."""

Curves = Mapping[Phase, CapCurve]

PRIOR_CURVES: Curves = MappingProxyType(
    {
        Phase.PREFILL: COMPUTE_CURVE,
        Phase.TRAINING: COMPUTE_CURVE,
        Phase.DECODE: COMPUTE_CURVE.softened(0.5),
    }
)
"""What limits cost while nobody has measured it on the boards at hand. Decode waits for memory; that it feels half of what
the others feel is an assumption."""
