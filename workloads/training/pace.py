"""Which rank of a gang the others wait for.

All ranks take the same time for a step, because they exchange gradients. What tells them apart is the time that a rank does
not spend in exchanges: of the slowest it is the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from busbar.kube.contracts.workload import SLOW_WORKER, others_seconds

EVERY_STEPS = 10


class Pace:
    """Seconds of a step that each rank takes for itself, over the last `EVERY_STEPS`."""

    def __init__(
        self,
        gather: Callable[[float], list[float]],
        waited_s: Callable[[], float],
        note: Callable[[str], object],
    ) -> None:
        """
        Args:
            gather: what each rank brings; all of them call it.
            waited_s: the seconds in exchanges so far.
        """
        self._gather, self._waited_s, self._note = gather, waited_s, note
        self._steps, self._seconds, self._waited = 0, 0.0, waited_s()
        self._named: int | None = None  # the rank that was said to be slow

    def finished(self, seconds: float) -> list[dict[str, Any]] | None:
        """After each step, on all ranks: `workers` of the status when they are known anew, the slowest first."""
        self._steps += 1
        self._seconds += seconds
        if self._steps < EVERY_STEPS:
            return None
        waited = self._waited_s()
        own = max(0.0, self._seconds - (waited - self._waited)) / self._steps
        self._steps, self._seconds, self._waited = 0, 0.0, waited
        every = self._gather(own)
        order = sorted(range(len(every)), key=lambda rank: -every[rank])
        self._name_the_slowest(order[0], [every[rank] for rank in order])
        return [{"rank": rank, "ownSeconds": float(f"{every[rank]:.3g}")} for rank in order]

    def _name_the_slowest(self, slowest: int, every: Sequence[float]) -> None:
        """`every`: the slowest first."""
        others = others_seconds(every)
        if every[0] <= SLOW_WORKER * others:
            self._named = None
        elif self._named != slowest:
            self._named = slowest
            self._note(
                f"warning: the others wait for rank {slowest}: of each step it takes {every[0]:.3g} s for itself, and "
                f"they {others:.3g} s (median)"
            )
