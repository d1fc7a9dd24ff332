"""What a plan says about one object, as its reconcile reads it.

The scheduling round (``rounds.py``) turns the plan's actions and waiting records into orders and hands each
to the reconcile of its object; the reconcile decides what it means for the object as it is *now*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from busbar.scheduler import Placement


@dataclass(frozen=True)
class Admit:
    """Start here. ``assumed_version`` is the resourceVersion that the plan was made on."""

    placement: Placement
    reason: str
    assumed_version: str
    index: int = 0  # of a ModelService's replica
    exchange_rate: float = 1.0


@dataclass(frozen=True)
class Release:
    """Save, stop, give the place back."""

    reason: str  # CamelCase
    message: str
    assumed_version: str
    index: int = 0
    taken: bool = False  # for another job: it counts as a preemption


@dataclass(frozen=True)
class Wait:
    """It waits, and why."""

    reason: str  # the scheduler's code
    message: str  # the one sentence
    record: dict[str, Any] = field(default_factory=dict)
    index: int = 0


@dataclass(frozen=True)
class Foretold:
    """When a waiting job is expected to start; without ``start_s``: nothing can be said (any more)."""

    made_at: datetime
    start_s: tuple[float, float] | None = None  # p50 and p90, seconds from made_at
    raw_s: tuple[float, float] | None = None  # the same as simulated, before correction
    end_s: tuple[float, float] | None = None


Order = Admit | Release | Wait | Foretold
