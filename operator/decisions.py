"""What a plan says about one object, as its reconcile reads it.

The scheduling round (``scheduling/rounds.py``) turns the plan's actions and waiting records into decisions and
passes each to the reconcile of its object, which applies it to the object as it is *now*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from busbar.kube.types.lost_work import GivesWayTo
from busbar.scheduler import DeadlineShare, Placement, Reservation


@dataclass(frozen=True)
class Admit:
    """Start at this placement. ``assumed_version`` is the resourceVersion that the plan was made on."""

    placement: Placement
    reason: str
    assumed_version: str
    index: int = 0  # of a ModelService's replica


@dataclass(frozen=True)
class Release:
    """Save, stop, and release the placement."""

    reason: str  # CamelCase
    message: str
    assumed_version: str
    index: int = 0
    taken: bool = False  # preempted for another job, so it counts as a preemption
    to: GivesWayTo | None = None  # the service whose replica gets the place


@dataclass(frozen=True)
class Lift:
    """Run on under this power cap, a part of the boards' highest limit; 1: under none. It holds as long as the job runs at
    this placement: reports of progress change the object all the time, and a plan may not come again soon."""

    power_cap: float
    message: str
    assumed: Placement


@dataclass(frozen=True)
class Wait:
    """The object waits; the reason."""

    reason: str  # the scheduler's code
    message: str  # the one sentence
    record: dict[str, Any] = field(default_factory=dict)
    index: int = 0


@dataclass(frozen=True)
class Forecast:
    """When a waiting job is expected to start; without ``start_s``: there is no forecast (any more)."""

    made_at: datetime
    start_s: tuple[float, float] | None = None  # p50 and p90, seconds from made_at
    raw_s: tuple[float, float] | None = None  # the same as simulated, before correction
    end_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class Reserved:
    """The place that is collected for a waiting job; None: there is none (any more)."""

    reservation: Reservation | None = None


@dataclass(frozen=True)
class Deadline:
    """What the plan says of a job's deadline; None: nothing (any more)."""

    share: DeadlineShare | None = None


Decision = Admit | Release | Lift | Wait | Forecast | Reserved | Deadline
