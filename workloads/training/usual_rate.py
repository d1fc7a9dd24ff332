"""A rate beside what it was before: a disk or a link that became slow is said, not left to be guessed.

The usual rate is the median of the latest ones that were not slow; before there are three, what a probe of the machine
found, if one was made.
"""

from __future__ import annotations

import statistics
from collections import deque

ENOUGH = 3
"""Rates whose median is usual."""
KEPT = 16


class UsualRate:
    """Of one thing that moves bytes, in one process."""

    def __init__(self, least_bytes: int, slow: float, slow_enough: int) -> None:
        """
        Args:
            least_bytes: less says nothing of a rate.
            slow: part of the usual rate below which one is slow.
            slow_enough: so many slow ones in a row are more than bad luck.
        """
        self._least, self._part, self._enough = least_bytes, slow, slow_enough
        self.probed: float | None = None
        """Bytes per second, by a probe."""
        self._usual: deque[float] = deque(maxlen=KEPT)
        self.last: float | None = None
        self.slow_in_a_row = 0
        self._counted = False  # what was moved last

    @property
    def usual(self) -> float | None:
        return statistics.median(self._usual) if len(self._usual) >= ENOUGH else self.probed

    def moved(self, size: int, seconds: float) -> None:
        """So many bytes took so long."""
        self._counted = size >= self._least and seconds > 0
        if not self._counted:
            return
        usual, self.last = self.usual, size / seconds
        if usual is not None and self.last < self._part * usual:
            self.slow_in_a_row += 1
        else:
            self.slow_in_a_row = 0
            self._usual.append(self.last)

    @property
    def is_slow(self) -> bool:
        return self.slow_in_a_row >= self._enough

    @property
    def became_slow(self) -> bool:
        """By what was moved last."""
        return self._counted and self.slow_in_a_row == self._enough
