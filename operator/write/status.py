"""Parts of every kind's status: conditions, usage, durations and back-offs, as pure functions.

Rules that hold for every kind:

* ``phase``, ``reason`` and ``message`` describe the object's state; the conditions are derived from them in one place.
* A condition's ``lastTransitionTime`` moves only when its status does.
* Usage is counted from ``lastUsageTime`` to now, and both are written together, so a crash between two
  writes neither doubles nor loses anything that was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from busbar.kube.types import AcceleratorPool, Condition, ConditionStatus
from busbar.kube.types.reasons import ConditionType
from busbar.kube.types.training_status import Usage

MESSAGE_LIMIT = 1000


def conditions(
    old: list[Condition] | None,
    wanted: Mapping[str, bool],
    reason: str,
    message: str,
    generation: int,
    now: datetime,
) -> list[Condition]:
    """The conditions wanted, each with its old transition time where its status did not change."""
    before = {c.type: c for c in old or ()}
    result: list[Condition] = []
    for kind, holds in wanted.items():
        status = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
        was = before.get(kind)
        same = was is not None and was.status is status
        result.append(
            Condition(
                type=kind,
                status=status,
                reason=reason,
                message=message,
                last_transition_time=(
                    was.last_transition_time if same and was is not None else now.replace(microsecond=0)
                ),
                observed_generation=generation,
            )
        )
    return result


def job_conditions(phase: str) -> dict[str, bool]:
    """What each phase of a TrainingJob means as conditions."""
    return {
        ConditionType.READY: phase == "Succeeded",
        ConditionType.ADMITTED: phase in ("Admitted", "Starting", "Running", "Preempting", "Succeeded"),
        ConditionType.RUNNING: phase == "Running",
        ConditionType.COMPLETE: phase == "Succeeded",
        ConditionType.FAILED: phase == "Failed",
        ConditionType.SUSPENDED: phase == "Suspended",
    }


def condition_since(conditions_now: list[Condition] | None, kind: str) -> datetime | None:
    """When a condition took its present status."""
    return next((c.last_transition_time for c in conditions_now or () if c.type == kind), None)


@dataclass(frozen=True)
class Held:
    """What an object holds, as usage counts it."""

    accelerators: float
    rate: float = 1.0  # exchange-rate units per accelerator
    price_per_hour: float = 0.0

    @classmethod
    def of(cls, accelerators: float, pool: AcceleratorPool | None, rate: float = 1.0) -> Held:
        return cls(accelerators, rate, pool.spec.price_per_hour if pool is not None else 0.0)


def add_usage(usage: Usage | None, held: Held, seconds: float, energy_joules: float | None = None) -> Usage:
    """The totals after ``seconds`` more of ``held``; the energy is the new total, None: as before."""
    old = usage or Usage()
    seconds = max(0.0, seconds)
    devices = held.accelerators * seconds
    return Usage(
        accelerator_seconds=round(old.accelerator_seconds + devices, 3),
        work_units=round(old.work_units + devices * held.rate, 6),
        energy_joules=old.energy_joules if energy_joules is None else energy_joules,
        cost=round(old.cost + devices / 3600.0 * held.price_per_hour, 6),
    )


def human_duration(seconds: float) -> str:
    """``4m10s``: two units at most, as kubectl prints ages."""
    total = max(0, round(seconds))
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{secs}s" if minutes else f"{secs}s"


def backoff_s(restarts: int, base_s: float, limit_s: float) -> float:
    """How long attempt number ``restarts + 1`` waits: base, 2 base, 4 base, …"""
    return min(limit_s, base_s * 2.0 ** max(0, min(restarts - 1, 30)))


def seconds_until(moment: datetime, now: datetime) -> float:
    return max(0.0, (moment - now) / timedelta(seconds=1))


def clip(message: str) -> str:
    """A message that fits its field."""
    text = " ".join(message.split())
    return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 1] + "…"
