"""What limits cost jobs and replicas, from the limits of their boards and from what their engines count. Pure.

Once a second each run is looked at: the limit in force on its boards, as their nodes read it back, and the work and
the seconds of steps that its engine has counted. Both counters stand still between steps, so their ratio is the speed
of whole steps however long one takes. A stretch of half a minute under one limit teaches (`scheduler/power/curves.py`).

The work of training is its tokens. A replica's steps differ, so their work is the time that a step model without limits
has for them (`power/limited_replicas.py`), and each phase is a run of its own: prompts feel a limit more than decoding does.

Engines run in tenants' pods, so only runs of the platform's own engine come here, and of these only what can be: a step
takes no longer than the time that has passed. Simulated boards limit nothing and teach nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from busbar.scheduler.power import CapCurve, Phase
from busbar.scheduler.power.curves import (
    KNOWN_S,
    PUBLISHED,
    USED_S,
    Compared,
    Evidence,
    Pace,
    Pair,
    added,
    fitted,
    seconds_of,
    slowdown,
    trial_weight,
)

STRETCH_S = 30.0
"""Of steps; shorter ones are too noisy."""
STEADY = 0.05
"""Limits of a stretch, and of the boards of a job, that are further apart are several."""
LEAST_BUSY = 0.5
"""Of the time that passes, in steps: the rest is evaluation, or a checkpoint, and nobody knows under which limit."""
LEAST_STEPS_S = 5.0
"""Of steps, of a run that pauses: its stretch goes on until it has so many."""
LONGEST_STRETCH_S = 300.0
"""Then a run that pauses does next to nothing, and its stretch begins anew."""
CLOCK_SLACK_S = 10.0
"""A job's numbers may be so old, so its counters may seem to run ahead."""
MOST_WORKS = 1000
"""Of which evidence is kept; then what has not been learned from for longest is forgotten."""
LONGEST_S = 3.0
"""Between two looks, that count for what limits have cost: nobody knows what an operator missed that was stopped."""


class Work(NamedTuple):
    """What limits cost alike."""

    workload_class: str
    accelerator: str
    mode: str
    phase: Phase = Phase.TRAINING


class Told(NamedTuple):
    """What an engine has counted since its start."""

    done: float
    """Tokens, or the seconds that its steps would have taken without limits."""
    seconds: float


class Cost(NamedTuple):
    """What limits have cost a run."""

    seconds: float = 0.0
    """Of running that were seen."""
    slowdown: float = 1.0
    """Mean over them of the time for the same work, over that without limits, or at the run's own cap."""


UNSEEN = Cost()


@dataclass(frozen=True, slots=True)
class LimitedRun:
    """One running attempt of a job on boards that take limits."""

    name: str
    """Unique for each attempt."""
    work: Work
    part: float | None
    """The limit in force, of what the boards draw at most; None: not known now, or its boards differ."""
    told: Told | None
    """None: it tells nothing that is believed of other tenants' jobs."""
    nodes: tuple[str, ...] = ()
    binds: bool = True
    """Whether its boards draw as much as their limits let them."""
    cap: float = 1.0
    """The limit under which the job was admitted."""
    before: Cost = UNSEEN
    """What is written of it; counts for a run that is seen for the first time."""
    pauses: bool = False
    """It serves: it has pauses, and draws much only while it has much to do. So few seconds of steps make a stretch, and a
    limit that never held its boards shows nothing of what it would cost a busy one."""


@dataclass(slots=True)
class _Stretch:
    since: Told
    since_s: float
    low: float
    high: float
    looks: int = 0
    total: float = 0.0
    """Of the parts at all looks."""
    held: bool = False

    @classmethod
    def begun(cls, told: Told, now_s: float, part: float, *, held: bool) -> _Stretch:
        return cls(told, now_s, part, part, 1, part, held)

    def look(self, part: float, *, held: bool) -> None:
        self.low, self.high = min(self.low, part), max(self.high, part)
        self.looks, self.total, self.held = self.looks + 1, self.total + part, self.held or held

    @property
    def is_steady(self) -> bool:
        return self.high - self.low <= STEADY

    @property
    def part(self) -> float:
        """In the mean."""
        return self.total / self.looks


@dataclass(slots=True)
class _Run:
    cost: Cost
    part: float | None = None
    pace: Pace = field(default_factory=Pace)
    stretch: _Stretch | None = None
    told: Told | None = None


class LimitCurves:
    """What is known of all classes, and the runs that teach more."""

    def __init__(self, stored: Callable[[str], Mapping[Work, Evidence]] = lambda workload_class: {}) -> None:
        """
        Args:
            stored: what was written of a class before this start; asked when its first run is seen.
        """
        self.evidence: dict[Work, Evidence] = {}
        self._stored = stored
        self._asked: set[str] = set()
        self._runs: dict[str, _Run] = {}
        self._curves: dict[Work, CapCurve] = {}
        """Fitted when somebody asks."""
        self._looked_s: float | None = None

    def look(self, runs: Iterable[LimitedRun], now_s: float) -> None:
        """To be called once a second with all runs that there are."""
        passed_s = 0.0 if self._looked_s is None else min(max(now_s - self._looked_s, 0.0), LONGEST_S)
        self._looked_s = now_s
        seen = {}
        for run in runs:
            self._ask(run.work.workload_class)
            seen[run.name] = kept = self._runs.get(run.name) or _Run(run.before)
            kept.part = run.part
            kept.cost = self._cost(kept.cost, run, passed_s)
            more = self._looked(kept, run, now_s)
            if more:
                self._learned(run.work, added(self.evidence.get(run.work, {}), more))
        self._runs = seen

    def of_class(self, workload_class: str) -> dict[Work, Evidence]:
        """What is known of a class; empty also where none of its runs was seen since the start."""
        return {work: of for work, of in self.evidence.items() if work.workload_class == workload_class}

    def cost(self, run: str) -> tuple[Cost, float | None] | None:
        """What limits have cost a run, and its limit now; None: it is on no boards that are limited, or nothing is known of
        their limits."""
        kept = self._runs.get(run)
        if kept is None or (kept.part is None and not kept.cost.seconds):
            return None
        return kept.cost, kept.part

    def weight(self, run: LimitedRun, now_s: float) -> float:
        """A factor on the weight of its nodes: runs that can teach are tried under other limits now and then."""
        teaches = run.told is not None and run.part is not None
        return trial_weight(run.name, now_s) if teaches and not self.is_measured(run.work) else 1.0

    def curve(self, work: Work) -> CapCurve | None:
        """None: next to nothing is known."""
        return self._fitted(work) if self._worth_s(work) >= USED_S else None

    def is_measured(self, work: Work) -> bool:
        """Whether its runs need no more trials."""
        return self._worth_s(work) >= KNOWN_S

    def _worth_s(self, work: Work) -> float:
        return seconds_of(self.evidence.get(work, {}))

    def _ask(self, workload_class: str) -> None:
        if workload_class in self._asked:
            return
        self._asked.add(workload_class)
        for work, found in self._stored(workload_class).items():
            self._learned(work, found)

    def _learned(self, work: Work, evidence: Evidence) -> None:
        self.evidence.pop(work, None)
        self.evidence[work] = evidence
        self._curves.pop(work, None)
        if len(self.evidence) > MOST_WORKS:
            oldest = next(iter(self.evidence))
            del self.evidence[oldest]
            self._curves.pop(oldest, None)

    def _fitted(self, work: Work) -> CapCurve:
        """The best curve now: the published one where nothing is known."""
        evidence = self.evidence.get(work)
        if evidence is None:
            return PUBLISHED[work.phase]
        if work not in self._curves:
            self._curves[work] = fitted(work.phase, evidence)
        return self._curves[work]

    def _cost(self, before: Cost, run: LimitedRun, passed_s: float) -> Cost:
        if run.part is None or not passed_s:
            return before
        slower = 1.0
        if run.binds and run.part < run.cap:
            curve = self._fitted(run.work)
            slower = slowdown(curve, run.part) / slowdown(curve, run.cap)
        total_s = before.seconds + passed_s
        return Cost(total_s, (before.seconds * before.slowdown + passed_s * slower) / total_s)

    def _looked(self, kept: _Run, run: LimitedRun, now_s: float) -> Mapping[Pair, Compared]:
        """What the run teaches now."""
        told, stretch = run.told, kept.stretch
        if run.part is None or told is None:
            kept.stretch = None
            return {}
        is_news, kept.told = told != kept.told, told
        if stretch is not None:
            stretch.look(run.part, held=run.binds)
            if not stretch.is_steady:
                stretch = kept.stretch = None
        if not is_news:
            return {}
        if stretch is None:
            kept.stretch = _Stretch.begun(told, now_s, run.part, held=run.binds)
            return {}
        done, seconds = told.done - stretch.since.done, told.seconds - stretch.since.seconds
        passed_s = now_s - stretch.since_s
        if not (done >= 0 and 0 <= seconds <= passed_s + CLOCK_SLACK_S):
            kept.stretch = None
            return {}
        least_s = LEAST_STEPS_S if run.pauses else max(LEAST_BUSY * passed_s, STRETCH_S * LEAST_BUSY)
        waits = run.pauses and seconds < least_s and passed_s < LONGEST_STRETCH_S
        if passed_s < STRETCH_S or waits:
            return {}
        kept.stretch = _Stretch.begun(told, now_s, run.part, held=run.binds)
        loose = run.pauses and not stretch.held and stretch.part < 1.0 - STEADY
        if done == 0 or seconds < least_s or loose:
            return {}
        return kept.pace.heard(stretch.part, done / seconds, seconds, self._fitted(run.work))
