"""Whether a replica that is not needed any more sleeps or leaves: a claim that is paid, against a start that is not.

    choice = history.choose(wanted, most, terms)        how many surplus replicas may sleep now, and why

A sleeping replica costs what it costs awake. If it is wanted again, it wakes in `wake_s` instead of another one starting in
`start_s`. That saves the price of the seconds between, and, where the rise was not foreseen, requests that come late in them.
The price of these is the one that the fleet pays already: whoever keeps capacity for the quantile q of the forecast's errors
pays for a spare second of a replica up to the point at which a missing one costs q / (1 - q) times as much (the newsvendor's
critical ratio). So a wake is worth

    S = (start - wake) · (1 + missed · q / (1 - q))        seconds of a replica's price

where `missed` is how often a wake comes when requests would be late. Two things bound it from above, and the smaller one counts: the part
of the time in which the load was above its forecast, and the part of the added replicas that were added when their load was there
already. A load that comes in bursts is above its forecast for half of the time, and yet hardly late, because what the last burst
needed is still there. The price of an hour is on both sides and cancels.

How likely it is to be wanted again is seen in the last day: from each moment with as many replicas wanted as now (from each
moment, where that has been so in few times apart), the time τ until there were so many more. The replica sleeps if for some time T the expected gain is above zero:

    P(τ <= T) · S  >  E[min(τ, T)]

No T above S can win, so nothing sleeps for long without returning. Until enough moments are known, a surplus replica sleeps for S
after it was last wanted and then leaves: that costs at most twice what a choice that knows the future would (the break-even rule
of the ski-rental problem, Karlin et al., Algorithmica 1988).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

BIN_S = 30.0
"""Wanted replicas are kept as the most in so many seconds, the time between two plans of a fleet."""
DAY_BINS = round(86_400 / BIN_S)
FEWEST = 30
"""Moments from which a probability is taken (a quarter of an hour)."""
LEAST_S = 60.0
"""Before that many are known, a surplus replica sleeps at least so long if a wake is worth anything: no choice turns within it."""
FEWEST_TIMES = 5
"""Times apart with as many replicas as now, from which those alone count: what came after one of them may have been chance."""


@dataclass(frozen=True, slots=True)
class SleepTerms:
    """What a wake saves."""

    start_s: float
    """From a decision to a replica that serves."""
    wake_s: float
    missed: float = 1.0
    """How often requests would be late without a wake, at most; 1 where nothing foresees."""
    quantile: float = 0.9
    """Of the forecast's errors that capacity is kept for."""

    @property
    def worth_s(self) -> float:
        """Seconds of a replica's price."""
        saved_s = max(0.0, self.start_s - self.wake_s)
        return saved_s * (1 + self.missed * self.quantile / (1 - self.quantile))


def missed(inside: float | None, late: float, quantile: float) -> float:
    """How often requests would be late without a wake, at most.

    Args:
        inside: the part of the time in which the load was inside its forecast; None: not known, so what was promised counts.
        late: `Fleet.late_share`.
        quantile: what was promised.
    """
    return round(min(1 - (inside if inside is not None else quantile), late), 2)


@dataclass(frozen=True, slots=True)
class SleepChoice:
    """How many surplus replicas may sleep."""

    count: int
    reason: str
    """A sentence."""


@dataclass(slots=True)
class WantedHistory:
    """How many replicas of a service were wanted in the last day, by bin; the last one is not over yet."""

    counts: deque[int] = field(default_factory=lambda: deque(maxlen=DAY_BINS))
    _bin: int | None = None
    _made: tuple[object, SleepChoice] | None = None
    """The last choice, and what for."""

    def observe(self, now_s: float, wanted: int) -> None:
        """So many are wanted now. Call it at least when that changes; a time that went back counts as now."""
        bin_ = math.floor(now_s / BIN_S)
        if self._bin is None or bin_ > self._bin:
            for _ in range(min(bin_ - self._bin - 1, DAY_BINS) if self._bin is not None else 0):
                self.counts.append(self.counts[-1])
            self.counts.append(wanted)
            self._bin = bin_
        else:
            self.counts[-1] = max(self.counts[-1], wanted)

    def choose(self, wanted: int, most: int, terms: SleepTerms) -> SleepChoice:
        """How many of the replicas above `wanted` may sleep, at most `most`."""
        asked = (self._bin, wanted, most, terms)
        if self._made is None or self._made[0] != asked:
            self._made = asked, self._choice(wanted, most, terms)
        return self._made[1]

    def _choice(self, wanted: int, most: int, terms: SleepTerms) -> SleepChoice:
        worth = f"a wake saves {terms.worth_s:.0f} s of a replica's price"
        if len(self.counts) < FEWEST:
            paid_s = max(terms.worth_s, LEAST_S) if terms.worth_s > 0 else 0.0
            count = next((k for k in range(most) if self._since_s(wanted + k + 1) >= paid_s), most)
            return SleepChoice(
                count, f"Surplus replicas sleep until that has cost what it may save: {worth}."
            )
        count, best = 0, _Outlook(0.0, 0.0, 0.0)
        for more in range(1, most + 1):
            found = self._outlook(wanted, more, terms.worth_s)
            if more == 1 or found.gain_s > 0:
                best = found
            if found.gain_s <= 0:
                break
            count = more
        few = "One more replica was" if count <= 1 else f"{count} more replicas were"
        said = f"{few} wanted within {best.within_s:.0f} s in {100 * best.chance:.0f} % of like moments of the last day"
        return SleepChoice(
            count, f"{said}, and {worth}: {count or 'no'} surplus replica{'s' * (count > 1)} may sleep."
        )

    def _since_s(self, count: int) -> float:
        """Seconds since so many were wanted; since the history begins if they never were."""
        for bins, seen in enumerate(reversed(self.counts)):
            if seen >= count:
                return bins * BIN_S
        return len(self.counts) * BIN_S

    def _outlook(self, wanted: int, more: int, worth_s: float) -> _Outlook:
        """The time within which waiting for so many more pays most, or costs least."""
        reach = max(1, math.floor(worth_s / BIN_S))
        after = self._returns(wanted, more, reach, alike=self._times(wanted) >= FEWEST_TIMES)
        total = sum(after)
        if not total:
            return _Outlook(-math.inf, 0.0, worth_s)
        best, returned, waited_s = _Outlook(-math.inf, 0.0, worth_s), 0, 0.0
        for bins in range(1, reach + 1):
            here = after[bins]
            waited_s += (total - returned - here / 2) * BIN_S / total
            returned += here
            gain_s = returned / total * worth_s - waited_s
            if gain_s > best.gain_s:
                best = _Outlook(gain_s, returned / total, bins * BIN_S)
        return best

    def _times(self, wanted: int) -> int:
        """How often the number became this one."""
        return sum(after == wanted != before for before, after in pairwise(self.counts))

    def _returns(self, wanted: int, more: int, reach: int, alike: bool) -> list[int]:
        """How many moments had so many more after 1, 2, … `reach` bins; first those that had not."""
        counts, found = list(self.counts), [0] * (reach + 1)
        for start in {wanted} if alike else set(counts):
            after: int | None = None
            for place in range(len(counts) - 1, -1, -1):
                if counts[place] == start and place < len(counts) - reach:
                    bins = after - place if after is not None else 0
                    found[bins if bins <= reach else 0] += 1
                if counts[place] >= start + more:
                    after = place
        return found


@dataclass(frozen=True, slots=True)
class Warmth:
    """What decides on the surplus replicas of one service."""

    history: WantedHistory
    most: int
    terms: SleepTerms

    def choose(self, wanted: int) -> SleepChoice:
        """How many replicas above `wanted` may sleep."""
        return self.history.choose(wanted, self.most, self.terms)


@dataclass(frozen=True, slots=True)
class _Outlook:
    gain_s: float
    chance: float
    within_s: float
