"""Means of the last seconds and minutes, in memory of a fixed size."""

from __future__ import annotations

import math
from array import array

SECONDS = 15 * 60
MINUTES = 24 * 60


class Ring:
    """The last `size` means by index of their period; periods without a value are gaps."""

    def __init__(self, size: int) -> None:
        self._slots = array("f", [math.nan]) * size
        self._newest = -1
        self._count = 0

    def add(self, index: int, value: float) -> None:
        """Counts a value in a period: several values of one period are its mean. A period that has passed, and a
        value that is no number, are left out."""
        if index < self._newest or not math.isfinite(value):
            return
        size = len(self._slots)
        if index > self._newest:
            for gap in range(max(self._newest + 1, index - size + 1), index + 1):
                self._slots[gap % size] = math.nan
            self._newest, self._count = index, 0
        old = self._slots[index % size]
        self._count += 1
        self._slots[index % size] = value if self._count == 1 else old + (value - old) / self._count

    def last(self, index: int, count: int) -> list[float | None]:
        """The values of `count` periods that end with this one, oldest first; None for gaps."""
        return [self._at(i) for i in range(index - count + 1, index + 1)]

    def _at(self, index: int) -> float | None:
        size = len(self._slots)
        if index > self._newest or index <= self._newest - size or index < 0:
            return None
        value = self._slots[index % size]
        return None if math.isnan(value) else value


class Series:
    """Means of one second over 15 minutes, and of one minute over a day, of one clock that never goes back."""

    def __init__(self) -> None:
        self.seconds, self.minutes = Ring(SECONDS), Ring(MINUTES)

    def add(self, at_s: float, watts: float) -> None:
        self.seconds.add(int(at_s), watts)
        self.minutes.add(int(at_s) // 60, watts)
