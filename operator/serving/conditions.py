"""The conditions of a ModelService.

``Ready`` and ``Running`` follow the phase. ``Ready`` is false as well where no accelerator type keeps the latency
target, because the object then does not reach what its spec asks for, although replicas answer.

``ExternallyScaled`` is true while ``spec.replicas`` or ``spec.scaling.external`` is there. Who wrote it is not known here: the cache leaves
``managedFields`` out. Two writers that disagree show in the number: it goes up and down within minutes, which
no single autoscaler with a window for going down does.

``NodeShortage`` is there once nodes were missing (``shortage.py``), and ``KvSharesKept`` while a replica cannot keep the shares
of the spec.
"""

from __future__ import annotations

from busbar.kube.types import Condition, ServicePhase
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.operator.serving.external import external_words, unusable
from busbar.operator.serving.kv_shares import refused_shares
from busbar.operator.serving.view import ServiceView
from busbar.operator.write.status import clip, conditions
from busbar.scheduler.autoscale import ALTERNATES_S

READY_PHASES = (ServicePhase.READY, ServicePhase.IDLE, ServicePhase.SUSPENDED)
NOTICED = (
    Reason.TARGET_UNREACHABLE,
    Reason.EXTERNAL_TARGET_ALTERNATES,
    Reason.EXTERNAL_TARGET_UNUSABLE,
    Reason.NODE_SHORTAGE,
    Reason.KV_SHARES_REFUSED,
    Reason.ACCELERATOR_WITHOUT_POOL,
)
"""Reasons that are also told by an event."""


def conditions_of(
    view: ServiceView,
    phase: ServicePhase,
    reason: str,
    message: str,
    *,
    running: bool,
    lacks: tuple[bool, Reason, str] | None = None,
) -> list[Condition]:
    """All conditions of the service as it is now; `lacks` see `shortage.py`."""

    def made(kind: str, holds: bool, why: str, text: str) -> Condition:
        return conditions(
            view.status.conditions, {kind: holds}, why, clip(text), view.service.metadata.generation, view.now
        )[0]

    unreachable = _unreachable(view) if phase in (ServicePhase.READY, ServicePhase.IDLE) else ""
    ready = (False, Reason.TARGET_UNREACHABLE, unreachable)
    refused = refused_shares(view)
    return [
        made(ConditionType.READY, *(ready if unreachable else (phase in READY_PHASES, reason, message))),
        made(ConditionType.RUNNING, running, reason, message),
        made(ConditionType.EXTERNALLY_SCALED, *_external(view)),
        *([made(ConditionType.NODE_SHORTAGE, *lacks)] if lacks is not None else []),
        *([made(ConditionType.KV_SHARES_KEPT, False, Reason.KV_SHARES_REFUSED, refused)] if refused else []),
    ]


def outlines(found: list[Condition] | None) -> list[tuple[str, str, str, int | None]]:
    """What a condition is written for; its sentence alone may contain a number that changes all the time."""
    return [(c.type, c.status, c.reason, c.observed_generation) for c in found or ()]


def new_problems(old: list[Condition] | None, new: list[Condition] | None) -> tuple[tuple[str, str], ...]:
    """(reason, sentence) of the conditions that an event tells, where they have just begun."""
    before = {c.reason for c in old or ()}
    return tuple((c.reason, c.message) for c in new or () if c.reason in NOTICED and c.reason not in before)


def _unreachable(view: ServiceView) -> str:
    """Why no type keeps the latency target; what was said last where that is not known yet."""
    if view.plan is None:
        return ""
    if view.plan.unreachable is not None:
        return view.plan.unreachable
    if view.status.observed_generation != view.service.metadata.generation:
        return ""
    told = (c.message for c in view.status.conditions or () if c.reason == Reason.TARGET_UNREACHABLE)
    return next(told, "")


def _external(view: ServiceView) -> tuple[bool, Reason, str]:
    """Whether an external target decides, whether its pools can be used, and whether it looks as if several wrote it."""
    spec, now = view.service.spec, view.now
    if spec.external_replicas is None:
        return False, Reason.NO_EXTERNAL_TARGET, "spec.replicas is not set; Busbar decides."
    text = f"{external_words(spec)}: it decides, and Busbar does not."
    if spec.external_replicas == spec.min_replicas == 0:
        text = f"{external_words(spec)}: it decides, except that a request wakes the service until it is idle again."
    wrong = unusable(spec, view.pools, view.tenant)
    if wrong:
        return True, Reason.EXTERNAL_TARGET_UNUSABLE, f"{text} {' '.join(wrong)}"
    scaling = view.scaling
    if scaling is None or not scaling.alternates(now.timestamp()):
        return True, Reason.EXTERNAL_TARGET, text
    doubt = (
        f"It changed its direction {scaling.turns(now.timestamp())} times in {ALTERNATES_S / 60:.0f} minutes: more than one may"
        f" write it, such as an HPA and a person; leave it to one of them. Until it rests, a lower number takes no"
        " replica away that one of these minutes asked for."
    )
    return True, Reason.EXTERNAL_TARGET_ALTERNATES, f"{text} {doubt}"
