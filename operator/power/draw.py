"""What a feed draws, from the readings of its nodes, and when it was above its budget. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from busbar.operator.power.readings import Reading


@dataclass(frozen=True, slots=True)
class Draw:
    """One feed at one moment."""

    nodes: int = 0
    fresh: int = 0
    """Nodes whose reading is not too old."""
    unknown: int = 0
    """Nodes that have never been read: nothing is known of them."""
    simulated: int = 0
    """Nodes whose watts are invented."""
    watts: float = 0.0
    """Of the fresh nodes."""
    assumed_w: float = 0.0
    """Of the silent nodes, at their nameplates."""
    floor_w: float = 0.0
    nameplate_w: float = 0.0
    """Both of all nodes that were ever read."""
    age_s: float | None = None
    """Of the oldest reading."""
    capped: int = 0
    """Nodes with a board whose limit is below its nameplate."""
    refusing: tuple[str, ...] = ()
    """Nodes that take no limits, or with a board that does not."""
    conflicts: tuple[str, ...] = ()
    """Nodes with a board whose limit somebody else has written."""

    @property
    def silent(self) -> int:
        return self.nodes - self.fresh


def draw_of(nodes: Iterable[str], readings: Mapping[str, Reading], now_s: float, fresh_s: float) -> Draw:
    """The draw of a feed with these nodes; `now_s` is the clock of `Reading.at_s`."""
    count = fresh = unknown = simulated = capped = 0
    refusing, conflicts = [], []
    watts = assumed = floor = nameplate = 0.0
    age: float | None = None
    for node in nodes:
        count += 1
        reading = readings.get(node)
        if reading is None:
            unknown += 1
            continue
        old = now_s - reading.at_s
        age = old if age is None else max(age, old)
        simulated += reading.is_simulated
        floor += reading.floor_w
        nameplate += reading.nameplate_w
        capped += reading.is_capped
        if reading.refuses:
            refusing.append(node)
        if reading.limits is not None and reading.limits.conflicts:
            conflicts.append(node)
        if old <= fresh_s:
            fresh += 1
            watts += reading.watts
        else:
            assumed += reading.nameplate_w
    return Draw(
        count,
        fresh,
        unknown,
        simulated,
        watts,
        assumed,
        floor,
        nameplate,
        age,
        capped,
        tuple(refusing),
        tuple(conflicts),
    )


@dataclass(frozen=True, slots=True)
class Overrun:
    """A time in which the measured draw was above the budget."""

    start: datetime
    seconds: float
    worst_w: float
    """Most above the budget."""
    joules: float
    """Above the budget."""
    lasts: bool = True


def watched(last: Overrun | None, above_w: float, passed_s: float, now: datetime) -> Overrun | None:
    """The last overrun after `passed_s` more, with a draw of so many watts above the budget (or below: negative)."""
    if above_w <= 0:
        return replace(last, lasts=False) if last is not None and last.lasts else last
    if last is None or not last.lasts:
        last = Overrun(now, 0.0, 0.0, 0.0)
    return Overrun(
        last.start, last.seconds + passed_s, max(last.worst_w, above_w), last.joules + above_w * passed_s
    )
