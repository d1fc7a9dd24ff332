"""How fast the disk takes checkpoints beside what it did before (see `usual_rate`).

A rate is that of one checkpoint's bytes over the seconds in which the disk had some of them to write, so it does not
depend on how fast training hands them over.
"""

from __future__ import annotations

from typing import Any

from busbar.workloads.training.usual_rate import UsualRate

LEAST_BYTES = 32 * 2**20
"""Of a checkpoint: the time of smaller ones is that of a few calls."""
SLOW = 0.5
"""Of the usual rate."""
SLOW_ENOUGH = 2
"""Checkpoints in a row."""


class DiskPace(UsualRate):
    """Of one folder of checkpoints, in one process."""

    def __init__(self) -> None:
        super().__init__(LEAST_BYTES, SLOW, SLOW_ENOUGH)

    def warning(self) -> str:
        """A sentence when the disk has just become slow; a single checkpoint may have had bad luck."""
        if not self.became_slow or self.last is None or self.usual is None:
            return ""
        return (
            f"warning: the disk took the last {self.slow_in_a_row} checkpoints at less than half of the usual "
            f"{self.usual / 2**20:.0f} MiB/s, the newest at {self.last / 2**20:.0f} MiB/s: does something else use it?"
        )

    def said(self) -> dict[str, Any]:
        """For the job's status."""
        usual = self.usual
        return {
            "bytesPerSecond": None if self.last is None else round(self.last),
            "usualBytesPerSecond": None if usual is None else round(usual),
            "slowInARow": self.slow_in_a_row,
        }
