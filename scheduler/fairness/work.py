"""Work in exchange-rate units, so that jobs with different speeds on the same types can be compared.

A job's speed is worth so many units that, over all accelerators that it may use, it brings as much as these are worth at
the exchange rates. So a job that is as fast on each type as the rates say works as many units as it holds. A job to
which the dear type brings more than the rates say works more than it holds there, and less elsewhere: it is the one to
have that type.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..candidates.candidate import Candidate, SharedCandidates


class WorkRates:
    """Units per speed, by request.

    Args:
        rate: exchange-rate units per thousandth of an accelerator, by type.
        capacity_m: thousandths of accelerators, by type.
    """

    def __init__(self, rate: Mapping[str, float], capacity_m: Mapping[str, int]) -> None:
        self._rate, self._capacity_m = rate, capacity_m
        self._known: dict[int, tuple[SharedCandidates, float]] = {}

    def work(self, shared: SharedCandidates, candidate: Candidate) -> float:
        """What a job of this request does with the candidate, in units."""
        return self.per_speed(shared) * candidate.speed

    def per_speed(self, shared: SharedCandidates) -> float:
        """What a speed of one is worth to a job of this request, in units."""
        known = self._known.get(id(shared))
        if known is None:
            known = self._known[id(shared)] = (shared, self._per_speed(shared))
        return known[1]

    def _per_speed(self, shared: SharedCandidates) -> float:
        best: dict[str, float] = {}
        for one in shared.candidates:
            speed = one.speed / max(one.accelerators_m, 1)
            best[one.accelerator] = max(speed, best.get(one.accelerator, 0.0))
        worth = brought = 0.0
        for kind, speed in best.items():
            capacity_m = self._capacity_m.get(kind, 0)
            worth += capacity_m * self._rate.get(kind, 0.001)
            brought += capacity_m * speed
        return worth / brought if brought > 0 else 0.0
