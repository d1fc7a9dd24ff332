"""The joules that a node's meters have counted between two looks at it. Pure.

* A counter that goes on says how many. A counter that cannot be compared with its last value (driver loaded again,
  agent restarted, clock jumped) says nothing: then the last mean counts for that time, and is marked estimated.
* A node that stops reporting draws its last mean, estimated, for at most `FILL_S`. When its counters come back and
  have gone on, they decide: what was estimated too little is added, and what was estimated too much is left out of
  the following joules, which so are never negative.
* A meter that is new begins with its first reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from busbar.operator.power.readings import CLOCK_SLACK_S, Metered, Reading

FILL_S = 900.0
"""A node that is silent for longer may be off: no more is estimated, and nobody is charged for what comes to light."""
ABOVE_NAMEPLATE = 1.5
"""A counter that says more than so many nameplates is not believed."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one meter has counted."""

    meter: str
    joules: float
    measured: bool
    """Not estimated."""


@dataclass(frozen=True, slots=True)
class Metering:
    """How far one node is counted."""

    reading: Reading
    until_s: float
    """Of the operator's clock."""
    ahead_j: Mapping[str, float] = field(default_factory=dict)
    """By meter: joules estimated beyond the reading, which its counter has not confirmed."""


@dataclass(frozen=True, slots=True)
class Step:
    """The metering after one look, and what was drawn since the last."""

    metering: Metering
    drawn: tuple[Drawn, ...] = ()
    late: tuple[Drawn, ...] = ()
    """Of a silence that was too long: who held the meters is not known."""


def rebased(last: Metering, reading: Reading) -> Metering:
    """What another process has counted, by this reading's clock.

    Where the agent's clock has run on since, it says how long ago that was; a time of day may have been set.
    """
    before = last.reading
    if before.epoch != reading.epoch or reading.clock_s <= before.clock_s:
        return last
    later_s = reading.at_s - (reading.clock_s - before.clock_s) - before.at_s
    return replace(last, reading=replace(before, at_s=before.at_s + later_s), until_s=last.until_s + later_s)


def step(last: Metering | None, reading: Reading, now_s: float, fresh_s: float) -> Step:
    """One look at a node.

    Args:
        reading: its last one that is believed.
        now_s: the clock of `Reading.at_s`.
        fresh_s: an older reading means that the node is silent.
    """
    if last is None:
        return Step(Metering(reading, reading.at_s))
    if reading is not last.reading:
        return _read(last, reading)
    if now_s - reading.at_s <= fresh_s:
        return Step(last)
    return _filled(last, now_s)


def _filled(last: Metering, now_s: float) -> Step:
    """A silent node: its means go on."""
    until_s = min(now_s, last.reading.at_s + FILL_S)
    passed_s = until_s - last.until_s
    if passed_s <= 0:
        return Step(last)
    drawn = tuple(
        Drawn(name, meter.watts * passed_s, measured=False) for name, meter in last.reading.meters.items()
    )
    ahead = {each.meter: last.ahead_j.get(each.meter, 0.0) + each.joules for each in drawn}
    return Step(Metering(last.reading, until_s, ahead), drawn)


def _read(last: Metering, reading: Reading) -> Step:
    """A new reading: counters that go on, or means up to it."""
    before = last.reading
    goes_on = before.epoch == reading.epoch and reading.clock_s > before.clock_s
    silent_s = reading.at_s - before.at_s
    drawn: list[Drawn] = []
    ahead: dict[str, float] = {}
    for name, meter in reading.meters.items():
        old = before.meters.get(name)
        if old is None:
            continue
        counted = _counted(old, meter, silent_s) if goes_on else None
        if counted is None:
            until_s = min(reading.at_s, before.at_s + FILL_S)
            drawn.append(Drawn(name, old.watts * max(0.0, until_s - last.until_s), measured=False))
            continue
        counted -= last.ahead_j.get(name, 0.0)
        if counted < 0:
            ahead[name] = -counted
        drawn.append(Drawn(name, max(0.0, counted), measured=True))
    found = tuple(drawn)
    after = Metering(reading, reading.at_s, ahead)
    return Step(after, late=found) if silent_s > FILL_S else Step(after, found)


def _counted(old: Metered, new: Metered, passed_s: float) -> float | None:
    """What the counter says; None where it began anew or cannot be believed."""
    joules = new.joules - old.joules
    most_j = ABOVE_NAMEPLATE * new.nameplate_w * (passed_s + CLOCK_SLACK_S)
    return joules if 0 <= joules <= most_j else None
