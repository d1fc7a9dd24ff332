"""The replica decision.

The signal is the number of requests that want service at this moment (in flight and waiting), as the gateway
sees it: it leads every averaged metric, and it does not fall when a replica is slow. Each replica is given
`target_in_flight` of them.

An external target (`spec.replicas`, written by `kubectl scale`, an HPA or KEDA) replaces the computed number
and is obeyed, with two exceptions: a service that may be at zero, was scaled to zero and receives a request
wakes with one replica until it has been idle again; and a target that keeps going up and down, because several write it,
takes no replica away that one of the last minutes asked for: none drains for one writer and starts again for the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

ALTERNATES_S = 300.0
"""For so long an external target is remembered."""
ALTERNATES_TURNS = 2
"""Up, down and up again, or the reverse, within that time: several write it. One turn may be a correction by hand."""
MOST_ASKED = 100
"""The newest of these targets."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the service's owner wants, from ModelService.spec."""

    min_replicas: int = 1
    max_replicas: int = 1
    replicas: int | None = None
    """External target; None: decide by demand."""
    target_in_flight: float = 8.0
    """Requests that one replica should have in flight."""
    idle_s: float = 300.0
    """After this time without a request, a service with `min_replicas` 0 goes to zero."""
    down_after_s: float = 60.0
    """A lower number must have been enough for this long."""
    suspend: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """What the gateway reports of one service now."""

    in_flight: int = 0
    waiting: int = 0
    """Held at the gateway because no replica is ready."""
    last_request_age_s: float | None = None
    """Seconds since the last request arrived; None: none since the gateway started."""
    known: bool = True
    """False: the gateway did not answer. Nothing is scaled down on missing information."""

    @property
    def total(self) -> int:
        return self.in_flight + self.waiting


@dataclass(frozen=True, slots=True)
class Asked:
    """An external target, since when."""

    at_s: float
    replicas: int


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What must be remembered between decisions; keep it in the service's status."""

    replicas: int = 0
    """The last decision."""
    enough: int | None = None
    """A lower number that has been enough since `enough_since_s`."""
    enough_since_s: float = 0.0
    busy_at_s: float | None = None
    """Last time that anything was in flight or waiting, or that the service was created."""
    woken: bool = False
    """One replica runs although the external target is zero, because a request came."""
    asked: tuple[Asked, ...] = ()
    """The external targets of the last `ALTERNATES_S`, the oldest first: that at its beginning, and each new one."""

    def turns(self, now: float) -> int:
        """How often the external target went the other way of late."""
        return _turns(self.asked, now)

    def alternates(self, now: float) -> bool:
        """Whether it looks as if several wrote the external target."""
        return self.turns(now) >= ALTERNATES_TURNS

    def holds(self, now: float) -> bool:
        """Whether it did so before the newest target, which is not obeyed then where it is lower."""
        return _turns(self.asked[:-1], now) >= ALTERNATES_TURNS


def decide(scaling: Scaling, demand: Demand, state: ScalingState, now: float) -> tuple[int, ScalingState]:
    """Replicas wanted now, and what to remember.

    Args:
        now: seconds since the epoch.
    """
    if scaling.suspend:
        return 0, ScalingState(0, None, 0.0, now)
    state = replace(_noted(demand, state, now), woken=state.woken and scaling.replicas == 0)
    if scaling.replicas is not None:
        state = replace(state, asked=_asked(state.asked, scaling.replicas, now))
        wanted, woken = _external(scaling, demand, state, now)
        return wanted, replace(state, replicas=wanted, enough=None, woken=woken)
    state = replace(state, asked=())
    wanted = _by_demand(scaling, demand, state, now)
    if wanted >= state.replicas or not demand.known:
        wanted = max(wanted, state.replicas) if not demand.known else wanted
        wanted = min(wanted, scaling.max_replicas) if scaling.max_replicas else wanted
        return wanted, replace(state, replicas=wanted, enough=None)
    if wanted == 0 or state.replicas > max(scaling.max_replicas, scaling.min_replicas):
        return wanted, replace(state, replicas=wanted, enough=None)
    return _down(scaling, wanted, state, now)


def _noted(demand: Demand, state: ScalingState, now: float) -> ScalingState:
    """Remember when the service was last busy. Unknown demand counts as busy."""
    if state.busy_at_s is None or not demand.known or demand.total > 0:
        return replace(state, busy_at_s=now)
    if demand.last_request_age_s is not None:
        return replace(state, busy_at_s=max(state.busy_at_s, now - demand.last_request_age_s))
    return state


def _idle(scaling: Scaling, state: ScalingState, now: float) -> bool:
    return state.busy_at_s is not None and now - state.busy_at_s >= scaling.idle_s


def _external(scaling: Scaling, demand: Demand, state: ScalingState, now: float) -> tuple[int, bool]:
    """Replicas by the external target, and whether one of them is there only because it was woken."""
    wanted = scaling.replicas or 0
    if state.holds(now):
        wanted = max(wanted, min(state.replicas, max(each.replicas for each in state.asked)))
    if wanted > 0 or scaling.min_replicas > 0:
        return wanted, False
    if demand.waiting > 0 or (state.woken and not _idle(scaling, state, now)):
        return 1, True
    return 0, False


def _turns(asked: Sequence[Asked], now: float) -> int:
    ups = [new.replicas > old.replicas for old, new in pairwise(asked) if now - new.at_s <= ALTERNATES_S]
    return sum(before is not after for before, after in pairwise(ups))


def _asked(before: Sequence[Asked], replicas: int, now: float) -> tuple[Asked, ...]:
    """With the target of now, and without those that were replaced too long ago."""
    found = list(before)
    if not found or found[-1].replicas != replicas:
        found.append(Asked(now, replicas))
    ended = sum(now - after.at_s > ALTERNATES_S for after in found[1:])
    return tuple(found[ended:][-MOST_ASKED:])


def _by_demand(scaling: Scaling, demand: Demand, state: ScalingState, now: float) -> int:
    most = max(scaling.max_replicas, scaling.min_replicas, 1)
    wanted = math.ceil(demand.total / max(scaling.target_in_flight, 1e-9))
    if demand.total > 0:
        wanted = max(wanted, 1)
    elif scaling.min_replicas == 0 and wanted == 0 and not _idle(scaling, state, now):
        wanted = min(1, state.replicas)
    return min(max(wanted, scaling.min_replicas), most)


def _down(scaling: Scaling, wanted: int, state: ScalingState, now: float) -> tuple[int, ScalingState]:
    """One step down once a lower number has been enough for long enough."""
    if state.enough is None:
        return state.replicas, replace(state, enough=wanted, enough_since_s=now)
    enough = max(state.enough, wanted)
    if now - state.enough_since_s < scaling.down_after_s:
        return state.replicas, replace(state, enough=enough)
    lower = state.replicas - 1
    return max(lower, enough), replace(state, replicas=max(lower, enough), enough=None)
