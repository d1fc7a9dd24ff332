"""How soon a round follows an event, and how often a full plan is made, by the CPU time of those before.

A round begins after three times the CPU time of the last answer to events, so these take a quarter of one core at most,
however large the cluster is. Full plans take a twentieth where they are made once a minute or more often: a full plan does
not hold up the next answers. Time on the clock is not counted: on a busy machine it says how long others had the processor.
"""

from __future__ import annotations

FULL_SHARE = 0.05
"""Of one core, for full plans that are made more often than once in ``FULL_LONGEST_S``."""
FULL_LONGEST_S = 60.0
"""Full plans are at most so far apart while something waits, or a longer period."""


class Pace:
    """Of one scheduling loop."""

    def __init__(self, least_s: float, period_s: float) -> None:
        """``least_s``: how long a round waits for further events at least; ``period_s``: between full plans, at least."""
        self._least_s, self._period_s = least_s, period_s
        self._answer_cpu_s = self._full_cpu_s = 0.0

    def took(self, cpu_s: float, *, full: bool) -> None:
        """The last full plan, or the last answer to events, took so long, from the snapshot to the decisions."""
        if full:
            self._full_cpu_s = cpu_s
        else:
            self._answer_cpu_s = cpu_s

    @property
    def debounce_s(self) -> float:
        """How long a round waits for further events after the first; never longer than the period."""
        return min(max(self._least_s, 3 * self._answer_cpu_s), self._period_s)

    @property
    def full_period_s(self) -> float:
        """How long after a full plan the next is due while something waits."""
        return max(self._period_s, min(self._full_cpu_s / FULL_SHARE, FULL_LONGEST_S))
