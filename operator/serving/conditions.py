"""The conditions of a ModelService.

``Ready`` and ``Running`` follow the phase. Only ``Ready`` says more: it is false as well where no accelerator type
keeps the latency target, because the object then does not reach what its spec asks for, although replicas answer.
"""

from __future__ import annotations

from busbar.kube.types import Condition, ServicePhase
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.operator.serving.view import ServiceView
from busbar.operator.write.status import clip, conditions

READY_PHASES = (ServicePhase.READY, ServicePhase.IDLE, ServicePhase.SUSPENDED)


def conditions_of(
    view: ServiceView, phase: ServicePhase, reason: str, message: str, *, running: bool
) -> list[Condition]:
    """All conditions of the service as it is now."""
    old, generation = view.status.conditions, view.service.metadata.generation
    wanted: dict[str, bool] = {ConditionType.READY: phase in READY_PHASES, ConditionType.RUNNING: running}
    found = conditions(old, wanted, reason, message, generation, view.now)
    why = _unreachable(view) if phase in (ServicePhase.READY, ServicePhase.IDLE) else ""
    if why:
        not_ready: dict[str, bool] = {ConditionType.READY: False}
        text = clip(why)
        found[:1] = conditions(old, not_ready, Reason.TARGET_UNREACHABLE, text, generation, view.now)
    return found


def outlines(found: list[Condition] | None) -> list[tuple[str, str, str, int | None]]:
    """What a condition is written for; its sentence alone may contain a number that changes all the time."""
    return [(c.type, c.status, c.reason, c.observed_generation) for c in found or ()]


def unreachable_since(old: list[Condition] | None, new: list[Condition] | None) -> str:
    """Why no type keeps the target, if that was not so before; else empty."""
    return _told(new) if not _told(old) else ""


def _unreachable(view: ServiceView) -> str:
    """Why no type keeps the latency target; what was said last where that is not known yet."""
    if view.plan is None:
        return ""
    if view.plan.unreachable is not None:
        return view.plan.unreachable
    same = view.status.observed_generation == view.service.metadata.generation
    return _told(view.status.conditions) if same else ""


def _told(found: list[Condition] | None) -> str:
    return next((c.message for c in found or () if c.reason == Reason.TARGET_UNREACHABLE), "")
