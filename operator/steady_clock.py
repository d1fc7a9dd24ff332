"""The time of day as decisions see it: it follows the machine's wall clock, and never jumps.

Statuses keep moments of the day, and much is counted from them: usage, minimum runtimes, deadlines, time limits of gangs. A
wall clock that is set an hour ahead would charge every running job an hour, end those with a deadline and tear down
gangs that start; one that is set back would stop all of these. So a step of the wall clock is followed slowly, by
`SLEW` of the time that passes: a clock that was an hour wrong for ten minutes moves this one by a minute. It never goes
back. An operator that begins to lead takes the wall clock over as it is, so where a step put the clock right, a restart is
enough.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

SLEW = 0.1
"""Part of the time that passes by which a difference is made up."""


def elapsed_s() -> float:
    """Seconds that nobody can set; where the system says so, also while it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SteadyClock:
    """It may be read from any thread."""

    def __init__(
        self, wall_s: Callable[[], float] = time.time, elapsed_s: Callable[[], float] = elapsed_s
    ) -> None:
        self._wall_s, self._elapsed_s = wall_s, elapsed_s
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Takes the wall clock over as it is."""
        with self._lock:
            self._now_s, self._at_s = self._wall_s(), self._elapsed_s()

    def now_s(self) -> float:
        """Seconds since 1970."""
        with self._lock:
            at_s = self._elapsed_s()
            passed_s = max(0.0, at_s - self._at_s)
            wrong_s = self._wall_s() - (self._now_s + passed_s)
            most_s = SLEW * passed_s
            self._now_s += passed_s + min(max(wrong_s, -most_s), most_s)
            self._at_s = max(at_s, self._at_s)
            return self._now_s

    def behind_s(self) -> float:
        """How far the wall clock is ahead of this one."""
        return self._wall_s() - self.now_s()


CLOCK = SteadyClock()
"""Of this process."""


def begin() -> None:
    """To be called when this process begins to lead."""
    CLOCK.begin()


def behind_s() -> float:
    """How far the machine's clock is ahead of `utc_now`."""
    return CLOCK.behind_s()


def utc_now() -> datetime:
    """The time of day; whole milliseconds, which is what statuses keep."""
    now = datetime.fromtimestamp(CLOCK.now_s(), UTC)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)
