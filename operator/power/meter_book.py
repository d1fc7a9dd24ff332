"""The energy ledger beside a feed's own meter, hour by hour. Pure.

Both are read at the same moments, and only their growth between two moments counts: in the hours in which it was, in
proportion to the time. A meter that goes back, or forward by more than the feed could ever draw, proves nothing: that
time counts for neither, and the next reading begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from busbar.kube.types.power_meter import MOST_HOURS

HOUR_S = 3600
LONGEST_POWER_S = 120.0
"""Between two looks at a meter that says watts: what was drawn in a longer time is not known."""
LONGEST_ENERGY_S = 6 * 3600.0
"""The same of a meter that counts energy, whose growth is spread evenly over the time."""
IMPLAUSIBLE = 3.0
"""Times the feed's budget: no feed bears it."""
WHOLE = 0.9
"""Part of an hour that must have been seen before its error is told as that of an hour."""


@dataclass(frozen=True, slots=True)
class Value:
    """What a meter says: energy since some moment, or the draw now; exactly one of the two."""

    joules: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class Hour:
    """What both have seen of one hour."""

    start_s: int
    """Seconds since the epoch."""
    seconds: float = 0.0
    ledger_j: float = 0.0
    meter_j: float = 0.0

    @property
    def error(self) -> float | None:
        """By how much the ledger is above the meter, as a part of the meter; None: the meter has seen nothing."""
        return (self.ledger_j - self.meter_j) / self.meter_j if self.meter_j > 0 else None


@dataclass(frozen=True, slots=True)
class Look:
    """One moment."""

    wall_s: float
    """Seconds since the epoch: says the hour."""
    steady_s: float
    """A clock that is never set: says how long it was."""
    value: Value
    ledger_j: float


class MeterBook:
    """The hours of one meter, oldest first."""

    def __init__(self, hours: Iterable[Hour] = ()) -> None:
        self.hours: tuple[Hour, ...] = tuple(hours)[-MOST_HOURS:]
        self._last: Look | None = None

    def take(self, look: Look, budget_w: float) -> str:
        """Books what both have grown by since the last look; a sentence where that proves nothing, else ""."""
        last, self._last = self._last, look
        if last is None:
            return ""
        passed_s, ledger_j = look.steady_s - last.steady_s, look.ledger_j - last.ledger_j
        energy = look.value.joules is not None and last.value.joules is not None
        if passed_s <= 0 or ledger_j < 0 or passed_s > (LONGEST_ENERGY_S if energy else LONGEST_POWER_S):
            return ""
        if look.value.joules is not None and last.value.joules is not None:
            meter_j = look.value.joules - last.value.joules
        elif look.value.watts is not None and last.value.watts is not None:
            meter_j = passed_s * (look.value.watts + last.value.watts) / 2
        else:
            return ""
        if meter_j < 0:
            return f"went back from {_kwh(last.value.joules)} to {_kwh(look.value.joules)}"
        most_j = IMPLAUSIBLE * budget_w * passed_s
        if meter_j > max(
            most_j, HOUR_S * budget_w / 100
        ):  # meters count in steps; a small budget has large ones
            return f"grew by {_kwh(meter_j)} in {passed_s:.0f} s, more than three times the feed's budget"
        self._book(look.wall_s - passed_s, look.wall_s, meter_j, ledger_j)
        return ""

    def last_whole(self) -> Hour | None:
        """The last hour that is over and was seen nearly whole."""
        over = [hour for hour in self.hours[:-1] if hour.seconds >= WHOLE * HOUR_S]
        return over[-1] if over else None

    def _book(self, begin_s: float, end_s: float, meter_j: float, ledger_j: float) -> None:
        known = {hour.start_s: hour for hour in self.hours}
        at_s = begin_s
        while at_s < end_s:
            start_s = math.floor(at_s / HOUR_S) * HOUR_S
            until_s = min(end_s, float(start_s + HOUR_S))
            part = (until_s - at_s) / (end_s - begin_s)
            old = known.get(start_s, Hour(start_s))
            known[start_s] = replace(
                old,
                seconds=old.seconds + until_s - at_s,
                ledger_j=old.ledger_j + part * ledger_j,
                meter_j=old.meter_j + part * meter_j,
            )
            at_s = until_s
        self.hours = tuple(known[start_s] for start_s in sorted(known))[-MOST_HOURS:]


def _kwh(joules: float | None) -> str:
    return f"{(joules or 0.0) / 3.6e6:,.3f} kWh"
