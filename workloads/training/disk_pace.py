"""How fast the disk takes checkpoints beside what it did before: a disk that became slow is said, not left to be guessed.

A rate is that of one checkpoint's bytes over the seconds in which the disk had some of them to write, so it does not
depend on how fast training hands them over. The usual one is the median of the latest that were not slow; before there
are three, what a probe of the machine found, if one was made.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

LEAST_BYTES = 32 * 2**20
"""Of a checkpoint: the time of smaller ones is that of a few calls."""
ENOUGH = 3
"""Checkpoints whose median is usual."""
KEPT = 16
SLOW = 0.5
"""Of the usual rate."""
SLOW_ENOUGH = 2
"""Checkpoints in a row."""


class DiskPace:
    """Of one folder of checkpoints, in one process."""

    def __init__(self) -> None:
        self.probed: float | None = None
        """Bytes per second, by a probe."""
        self._usual: deque[float] = deque(maxlen=KEPT)
        self._last: float | None = None
        self._slow = 0

    @property
    def usual(self) -> float | None:
        return statistics.median(self._usual) if len(self._usual) >= ENOUGH else self.probed

    def wrote(self, size: int, seconds: float) -> None:
        """A checkpoint of so many bytes kept the disk busy for so long."""
        if size < LEAST_BYTES or seconds <= 0:
            return
        usual, self._last = self.usual, size / seconds
        if usual is not None and self._last < SLOW * usual:
            self._slow += 1
        else:
            self._slow = 0
            self._usual.append(self._last)

    def warning(self) -> str:
        """A sentence when the disk has just become slow; a single checkpoint may have had bad luck."""
        if self._slow != SLOW_ENOUGH or self._last is None or self.usual is None:
            return ""
        return (
            f"warning: the disk took the last {self._slow} checkpoints at less than half of the usual "
            f"{self.usual / 2**20:.0f} MiB/s, the newest at {self._last / 2**20:.0f} MiB/s: does something else use it?"
        )

    def said(self) -> dict[str, Any]:
        """For the job's status."""
        usual = self.usual
        return {
            "bytesPerSecond": None if self._last is None else round(self._last),
            "usualBytesPerSecond": None if usual is None else round(usual),
            "slowInARow": self._slow,
        }
