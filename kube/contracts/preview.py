"""`POST /preview` and `GET /nodes` on the operator's internal port.

Only the operator has the snapshot, the planner, its policy and the job history, so only the operator previews; the API
passes its answer on. It tells the operator whether the caller is an admin: only an admin's answer names
other tenants and nodes. A forecast consists of times and counts; it does not reveal from whose jobs it was learned.
"""

import math
from datetime import timedelta
from typing import Any

from pydantic import Field

from busbar.kube.contracts.wire import WireModel

PATH = "/preview"
NODES_PATH = "/nodes"


class PreviewRequest(WireModel):
    """POST body."""

    object: dict[str, Any]
    """The draft as the API server would store it (the answer of a dry run)."""
    admin: bool = False


class Change(WireModel):
    """The smallest change of one kind that would let it start now."""

    kind: str
    current: str
    needed: str


class PreviewAnswer(WireModel):
    """The decision that the next scheduling round would make. Empty strings and None mean "not known" or "does not
    apply"."""

    starts_now: bool
    possible: bool
    """False: waiting does not help, the draft must be changed."""
    reason: str
    """One sentence: why here, or exactly why not."""
    when: str
    """In words: now, after which preemptions, or that it waits."""
    code: str = ""
    """The scheduler's machine-readable reason when it waits."""
    pool: str = ""
    accelerator: str = ""
    mode: str = ""
    replicas: int = 0
    """That a service begins with; 0 for a job. Where some start and others wait, `starts_now` is False, and what
    follows is of those that start."""
    replicas_starting: int = 0
    pods: int = 0
    accelerators: float = 0.0
    """All pods together."""
    nodes: tuple[str, ...] = ()
    """For admins."""
    cost_per_hour: float | None = None
    finishes_in_seconds: float | None = None
    finishes_in_low_seconds: float | None = None
    finishes_in_high_seconds: float | None = None
    estimated_cost: float | None = None
    accelerator_hours: float | None = None
    """Until it has finished."""
    watts: float | None = None
    """What its accelerators draw together, by the performance table or else their nameplates; without the hosts."""
    kilowatt_hours: float | None = None
    """What its accelerators use until it has finished, likely and with the high and low speeds."""
    kilowatt_hours_low: float | None = None
    kilowatt_hours_high: float | None = None
    power_cap_percent: int | None = None
    """It would start with its boards limited to this part of their highest limit, as its power domains carry no more."""
    power_cap_speed: float | None = None
    """Its speed then, as a part of that without the cap."""
    changes: tuple[Change, ...] = ()
    deadline: str = ""
    """Whether its deadline would be promised, and if not what that would break; empty without one."""
    start_p50_seconds: float | None = None
    """Median time until the start, if it waits."""
    start_p90_seconds: float | None = None
    """Ninth decile of the time until the start."""
    end_p50_seconds: float | None = None
    """Median time until the end, where its speed is known."""
    end_p90_seconds: float | None = None
    past_forecasts: int = 0
    """Number of earlier forecasts on this cluster whose time has passed."""
    past_before_p50: float | None = None
    """Share of them that started before the forecast median (0.5 is perfect)."""
    past_before_p90: float | None = None

    @property
    def waits(self) -> bool:
        """Whether nothing of it starts, and it would wait for something that can happen."""
        return not self.starts_now and not self.pool and self.possible and bool(self.code)


class NodeLoad(WireModel):
    """One node's capacity and allocation, in accelerators."""

    name: str
    pool: str
    accelerator: str
    ready: bool
    capacity: float
    allocated: float

    @property
    def share(self) -> float:
        return min(1.0, self.allocated / self.capacity) if self.capacity > 0 else 0.0


class NodeLoads(WireModel):
    """Answer of `GET /nodes`: all nodes of all pools, by pool and name."""

    nodes: list[NodeLoad] = Field(default_factory=list)


def span(seconds: float | None) -> str:
    """A duration for people."""
    if seconds is None or not math.isfinite(seconds):
        return "not known"
    if seconds < 90:
        return f"{round(seconds)} s"
    left = timedelta(seconds=round(seconds))
    hours, minutes = divmod(left.seconds // 60, 60)
    if left.days:
        return f"{left.days} d {hours} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
