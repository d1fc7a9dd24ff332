"""Means of watts over the last seconds and minutes."""

from __future__ import annotations

from busbar.operator.ring import Ring

SECONDS = 15 * 60
MINUTES = 24 * 60


class Series:
    """Means of one second over 15 minutes, and of one minute over a day, of one clock that never goes back."""

    def __init__(self) -> None:
        self.seconds, self.minutes = Ring(SECONDS), Ring(MINUTES)

    def add(self, at_s: float, watts: float) -> None:
        self.seconds.add(int(at_s), watts)
        self.minutes.add(int(at_s) // 60, watts)
