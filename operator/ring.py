"""Numbers of the last periods, in memory of a fixed size."""

from __future__ import annotations

import math
from array import array


class Ring:
    """The last `size` numbers by index of their period; periods without a value are gaps."""

    def __init__(self, size: int) -> None:
        self._slots = array("f", [math.nan]) * size
        self._newest = -1
        self._count = 0

    def add(self, index: int, value: float) -> None:
        """Counts a value in a period: several values of one period are its mean. A period that has passed, and a
        value that is no number, are left out."""
        if not self._reaches(index, value):
            return
        self._count += 1
        slot = index % len(self._slots)
        old = self._slots[slot]
        self._slots[slot] = value if self._count == 1 else old + (value - old) / self._count

    def put(self, index: int, value: float) -> None:
        """The value of a period, in place of what was there; left out as by `add`."""
        if self._reaches(index, value):
            self._slots[index % len(self._slots)] = value

    def _reaches(self, index: int, value: float) -> bool:
        """Whether the value counts; goes on to its period, if that is a newer one."""
        if index < self._newest or not math.isfinite(value):
            return False
        size = len(self._slots)
        if index > self._newest:
            for gap in range(max(self._newest + 1, index - size + 1), index + 1):
                self._slots[gap % size] = math.nan
            self._newest, self._count = index, 0
        return True

    def last(self, index: int, count: int) -> list[float | None]:
        """The values of `count` periods that end with this one, oldest first; None for gaps."""
        return [self._at(i) for i in range(index - count + 1, index + 1)]

    @property
    def newest(self) -> int:
        """The newest period with a value; -1: there is none."""
        return self._newest

    def copied(self) -> Ring:
        """For another thread to read."""
        found = Ring(0)
        found._slots, found._newest, found._count = self._slots[:], self._newest, self._count
        return found

    def _at(self, index: int) -> float | None:
        size = len(self._slots)
        if index > self._newest or index <= self._newest - size or index < 0:
            return None
        value = self._slots[index % size]
        return None if math.isnan(value) else value
