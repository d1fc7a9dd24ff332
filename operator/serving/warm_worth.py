"""How many surplus replicas of a service may sleep now, by what a wake saves and how likely it is: `scheduler.autoscale.warmth`
on live data.

    desired replicas ──► WantedHistory ─┐
    start and wake, as measured ────────┼──► Warmth
    the forecast's misses ──────────────┘

State is in memory, by service: after a restart of the operator a surplus replica sleeps for the time that a wake is worth, until
a quarter of an hour was seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from busbar.kube.types import ModelService
from busbar.kube.types.model_service import WarmLevel
from busbar.operator.serving.fleet_input import START_S, start_seconds
from busbar.operator.serving.fleet_plan import Plan
from busbar.operator.watch.projections import Pod, Sleep
from busbar.scheduler.autoscale.fleet import FleetSettings
from busbar.scheduler.autoscale.warmth import SleepTerms, WantedHistory, Warmth, missed

WAKE_S = {WarmLevel.SLEEPING: 5.0, WarmLevel.LOADED: 1.0}
"""A wake takes so long until one was seen, or a tenth of a start, if that is less."""
WAKE_PART = 0.1
LEAST_START_S = 1.0
"""Starts are measured by times of pods, which are whole seconds."""


@dataclass
class _State:
    wanted: WantedHistory = field(default_factory=WantedHistory)
    waking: dict[str, float] = field(default_factory=dict)
    """By pod uid, since when; in seconds since 1970."""
    wake_s: float | None = None
    """Of the last wake."""


class WarmWorth:
    """Of all services with `scaling.warm`."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def keep(self, uids: Iterable[str]) -> None:
        """Forgets all other services."""
        known = set(uids)
        self._states = {uid: state for uid, state in self._states.items() if uid in known}

    def wake_s(self, service: ModelService, pods: Iterable[Pod]) -> float | None:
        """Seconds of a wake; None: nothing of the service sleeps."""
        warm = service.spec.scaling.warm
        if warm is None:
            return None
        state = self._states.get(service.metadata.uid)
        measured = state.wake_s if state is not None else None
        guessed = min(WAKE_S[warm.level], WAKE_PART * _start_s(service, pods))
        return measured if measured is not None else guessed

    def of(
        self, service: ModelService, pods: Iterable[Pod], plan: Plan | None, now_s: float
    ) -> Warmth | None:
        """What decides how many of the replicas that are not wanted sleep; None: the service has no `scaling.warm`.

        Args:
            plan: what its latency target says; None: it has none.
            now_s: on a clock that never goes back.
        """
        warm, pods = service.spec.scaling.warm, tuple(pods)
        if warm is None:
            self._states.pop(service.metadata.uid, None)
            return None
        state = self._states.setdefault(service.metadata.uid, _State())
        _see_wakes(state, pods)
        wanted = (service.status.desired_replicas if service.status is not None else None) or 0
        state.wanted.observe(now_s, wanted)
        start_s, wake_s = _start_s(service, pods), self.wake_s(service, pods) or 0.0
        terms = SleepTerms(round(start_s, 1), round(wake_s, 1), _missed(plan, wanted))
        return Warmth(state.wanted, warm.replicas, terms)


def _start_s(service: ModelService, pods: Iterable[Pod]) -> float:
    return max(LEAST_START_S, max(start_seconds(service, pods).values(), default=START_S))


def _missed(plan: Plan | None, wanted: int) -> float:
    """How often requests would be late without a wake: always where nothing foresees, and at zero, where one waits for the start."""
    if plan is None or plan.target is None or plan.ahead is None or not wanted:
        return 1.0
    return missed(plan.ahead.inside, plan.ahead.late, FleetSettings().quantile)


def _see_wakes(state: _State, pods: Iterable[Pod]) -> None:
    """Measures wakes by the times that the pods' marks have."""
    waking: dict[str, float] = {}
    for pod in pods:
        if pod.sleep_since is None:
            continue
        since_s = pod.sleep_since.timestamp()
        if pod.sleep is Sleep.WAKING:
            waking[pod.uid] = since_s
        elif pod.sleep is Sleep.AWAKE and pod.uid in state.waking:
            state.wake_s = max(0.0, since_s - state.waking[pod.uid])
    state.waking = waking
