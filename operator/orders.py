"""What a plan says about one object, as its reconcile reads it.

The scheduling round (``rounds.py``) turns the plan's actions and waiting records into orders and hands each
to the reconcile of its object; the reconcile decides what it means for the object as it is *now*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


Order = Admit | Release | Wait
