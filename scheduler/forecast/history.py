"""What is known of the past: finished jobs, and how earlier forecasts turned out.

Futures need two draws, and both come from here.

How much longer will a job run that has run for this long already? The hazard of the last jobs of the same
tenant and size is estimated by survival analysis (Kaplan and Meier's product, with entry and exit ages): a
job that still runs counts as "at least this long", and one that had begun before the window counts only from
the age it had then. Leaving the running ones out would make every job look short, as short ones finish first.
If a tenant and size have too few endings beyond that age, all jobs of the size are used, then all jobs;
beyond everything seen, a job runs about as long again as it has run.

Lengths of jobs that were submitted one after the other are correlated: a sweep is long or short as a whole.
The correlation is measured (`length_correlation`), and in each future the jobs of a tenant and size are drawn
with it; drawn independently, their sum would look far too certain.

What will be submitted next? A stretch of the past, as it was: submissions come in bursts of similar jobs, by
day and night, and a stretch has all of that in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NORMAL = NormalDist()

RECENT = 300
"""Endings per tenant and size that lengths are drawn from; older ones say less about today's jobs."""
ENOUGH = 5
"""Endings beyond a job's age below which a wider group is used."""
DEFAULT_S = 4 * 3600.0
"""Length of a job if there is no history at all."""
OUTCOMES = 1500
"""Forecasts that are remembered."""
SEQUENCE, LAGS = 200, 20
"""Jobs that the correlation is measured on, and how far apart in order of submission they may be."""
DEFAULT_CORRELATION = 0.1
"""The correlation if there are too few jobs to measure it."""
KEEP_S = 28 * 86400.0
"""Submissions older than this are forgotten."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A job of the past: what it was, and how long it ran in all."""

    tenant: str
    accelerators_m: int
    seconds: float
    submitted_at_s: float | None = None
    """None: not known; the job then counts for lengths, but not for arrivals."""
    ended_at_s: float | None = None
    pods: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an earlier forecast."""

    made_at_s: float
    tenant: str
    accelerators_m: int
    raw: tuple[float, float]
    """`Forecast.raw`: the simulated p50 and p90, before any correction."""
    waited_s: float | None = None
    """Until the job started; None: it still waits."""
    promised: tuple[float, float] | None = None
    """What was told: `Forecast.p50_s` and `p90_s`. None: not kept, so how often it was right is not
    corrected."""


class History:
    """Finished jobs and past outcomes, kept so that thousands of forecasts can be made from them."""

    def __init__(self, finished: Iterable[Finished] = ()) -> None:
        self._groups: dict[tuple[str, int], deque[tuple[float, float]]] = {}
        self._order: dict[tuple[str, int], deque[tuple[float, float]]] = {}
        """(submitted, seconds) of the last jobs, by tenant and size."""
        self.submissions: list[tuple[float, str, int, int, float]] = []
        """(submitted, tenant, accelerators_m, pods, seconds), by time."""
        self.outcomes: dict[str, Outcome] = {}
        """By job, in the order in which they were made."""
        for item in finished:
            self.add(item)

    @classmethod
    def of(cls, history: Sequence[Finished] | History) -> History:
        return history if isinstance(history, History) else cls(history)

    def add(self, item: Finished) -> None:
        """Add a finished job; add them in the order in which they end."""
        ended = 0.0 if item.ended_at_s is None else item.ended_at_s
        for key in _groups(item.tenant, item.accelerators_m):
            self._groups.setdefault(key, deque(maxlen=RECENT)).append((item.seconds, ended))
        if item.submitted_at_s is not None:
            last = self._order.setdefault((item.tenant, item.accelerators_m), deque(maxlen=SEQUENCE))
            last.append((item.submitted_at_s, item.seconds))
            row = (item.submitted_at_s, item.tenant, item.accelerators_m, item.pods, item.seconds)
            insort(self.submissions, row)
            if self.submissions[0][0] < item.submitted_at_s - 2 * KEEP_S:
                del self.submissions[: bisect_left(self.submissions, (item.submitted_at_s - KEEP_S,))]

    def promised(self, job: str, outcome: Outcome) -> None:
        """Record a forecast; only the latest per job counts."""
        self.outcomes.pop(job, None)
        self.outcomes[job] = outcome
        while len(self.outcomes) > OUTCOMES:
            del self.outcomes[next(iter(self.outcomes))]

    def started(self, job: str, now: float) -> None:
        """Record that a job has started; if there was a forecast for it, its outcome is now known."""
        known = self.outcomes.get(job)
        if known is not None and known.waited_s is None:
            self.outcomes[job] = replace(known, waited_s=now - known.made_at_s)

    def gone(self, job: str) -> None:
        """Record that a job was withdrawn before it started: its forecast is dropped."""
        known = self.outcomes.get(job)
        if known is not None and known.waited_s is None:
            del self.outcomes[job]

    def since(self, at_s: float) -> Iterator[tuple[float, str, int, int, float]]:
        """Submissions from a time on."""
        rows = self.submissions
        return (rows[i] for i in range(bisect_left(rows, (at_s,)), len(rows)))

    def length_correlation(self, tenant: str, accelerators_m: int) -> float:
        """Correlation (of normal scores) between lengths of jobs that were submitted close together."""
        rows = self._order.get((tenant, accelerators_m), ())
        if len(rows) < 2 * LAGS:
            return DEFAULT_CORRELATION
        lengths = np.array([seconds for _, seconds in sorted(rows)])
        ranks = np.argsort(np.argsort(lengths, kind="stable"))
        scores = np.array([_NORMAL.inv_cdf((rank + 0.5) / len(ranks)) for rank in ranks])
        found = np.mean([(scores[lag:] * scores[:-lag]).mean() for lag in range(1, LAGS + 1)])
        return float(np.clip(found, 0.0, 0.6))

    def endings(self, tenant: str, accelerators_m: int) -> Sequence[tuple[float, float]]:
        """(seconds, ended at) of the last jobs of a group."""
        return self._groups.get((tenant, accelerators_m), ())


def _groups(tenant: str, accelerators_m: int) -> tuple[tuple[str, int], ...]:
    return (tenant, accelerators_m), ("", accelerators_m), ("", 0)


@dataclass(frozen=True, slots=True)
class Survival:
    """How long jobs of a group last: ages at which some ended, and the log of the share that outlived each."""

    ages: Floats
    log_alive: Floats

    def beyond(self, age_s: float) -> int:
        """Endings seen at a greater age."""
        return len(self.ages) - int(np.searchsorted(self.ages, age_s, side="right"))

    def left_s(self, age_s: float, draws: Floats) -> Floats:
        """Time left at this age, for uniform draws from (0, 1]."""
        first = int(np.searchsorted(self.ages, age_s, side="right"))
        base = self.log_alive[first - 1] if first else 0.0
        wanted = base + np.log(draws)
        at = first + np.searchsorted(-self.log_alive[first:], -wanted, side="left")
        inside = at < len(self.ages)
        last = max(age_s, float(self.ages[-1]) if len(self.ages) else DEFAULT_S)
        final = self.log_alive[-1] if len(self.ages) else 0.0
        # Outlived everything seen: the chance to reach twice the age is one half (Pareto, exponent 1).
        tail = last * np.exp(np.clip(np.maximum(base, final) - wanted, 0.0, 6.0)) - age_s
        found = self.ages[np.minimum(at, len(self.ages) - 1)] - age_s if len(self.ages) else tail
        return np.maximum(np.where(inside, found, tail), 1.0)


def survival(endings: Sequence[tuple[float, float]], running: Sequence[tuple[float, float]]) -> Survival:
    """Estimated from (seconds, ended at) of finished and (age, now) of running jobs."""
    if not endings:
        return Survival(np.empty(0), np.empty(0))
    since = min(at for _, at in endings)
    ended = np.array([seconds for seconds, _ in endings])
    exits = np.concatenate([ended, np.array([age for age, _ in running])])
    stop = np.concatenate([np.array([at for _, at in endings]), np.array([at for _, at in running])])
    entry = np.maximum(0.0, exits - (stop - since))
    # The window opens with its first ending; that job is in it by its whole life.
    entry[: len(ended)][stop[: len(ended)] <= since] = 0.0
    ages, counts = np.unique(ended, return_counts=True)
    entered = np.searchsorted(np.sort(entry), ages, side="left")
    left = np.searchsorted(np.sort(exits), ages, side="left")
    at_risk = np.maximum(entered - left, counts)
    alive = np.maximum(1.0 - counts / at_risk, 1e-12)
    # A single job at risk that ends says little about the rest: half of it counts as chance.
    alive = np.maximum(alive, 0.5 / at_risk)
    return Survival(ages, np.cumsum(np.log(alive)))


class Lengths:
    """Draws of how long jobs will run, at one moment."""

    def __init__(self, history: History, running: Iterable[tuple[str, int, float]], now: float) -> None:
        """`running`: (tenant, accelerators_m, age in seconds)."""
        self._history = history
        self._now = now
        self._running: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for tenant, size, age in running:
            for key in _groups(tenant, size):
                self._running.setdefault(key, []).append((age, now))
        self._known: dict[tuple[str, int], Survival] = {}

    def left_s(self, tenant: str, accelerators_m: int, age_s: float, draws: Floats) -> Floats:
        """Time left of a job that has run this long."""
        for key in _groups(tenant, accelerators_m):
            found = self._survival(key)
            if found.beyond(age_s) >= ENOUGH:
                break
        return found.left_s(age_s, draws)

    def _survival(self, key: tuple[str, int]) -> Survival:
        if key not in self._known:
            self._known[key] = survival(self._history.endings(*key), self._running.get(key, ()))
        return self._known[key]
