"""What pages show alike of jobs and services: the phase, and conditions. Pure: an object and a time in, plain values out."""

from dataclasses import dataclass
from datetime import datetime

from busbar.api.portal.formatting import ago
from busbar.kube.types import ModelService, TrainingJob
from busbar.kube.types.meta import ConditionStatus
from busbar.kube.types.service_status import ModelServiceStatus, ServicePhase
from busbar.kube.types.training_status import (
    TrainingJobStatus,
    TrainingPhase,
)

TONES = {
    "Running": "go",
    "Ready": "go",
    "Succeeded": "done",
    "Admitted": "go",
    "Starting": "go",
    "Pending": "wait",
    "Queued": "wait",
    "Preempting": "wait",
    "Draining": "wait",
    "Idle": "rest",
    "Suspended": "rest",
    "Failed": "bad",
}


@dataclass(frozen=True)
class Badge:
    """A phase as a coloured word."""

    text: str
    tone: str


@dataclass(frozen=True)
class ConditionRows:
    """Conditions of an object: those that are true, and the others, which the page folds."""

    holding: list[dict[str, str]]
    other: list[dict[str, str]]


def badge(obj: TrainingJob | ModelService, phase: TrainingPhase | ServicePhase) -> Badge:
    """Its phase, or that it is being deleted."""
    deleting = obj.metadata.deletion_timestamp is not None
    return Badge("Deleting" if deleting else phase.value, TONES.get(phase.value, "wait"))


def conditions(status: TrainingJobStatus | ModelServiceStatus, now: datetime) -> ConditionRows:
    """Conditions in the standard form. A message that equals the status message, which stands at the top of
    the page, is left out: the operator writes one sentence into all conditions."""
    rows: dict[bool, list[dict[str, str]]] = {True: [], False: []}
    for condition in status.conditions or ():
        rows[condition.status is ConditionStatus.TRUE].append(
            {
                "type": condition.type,
                "status": condition.status.value,
                "reason": condition.reason,
                "message": "" if condition.message == status.message else condition.message,
                "since": ago(condition.last_transition_time, now),
            }
        )
    return ConditionRows(holding=rows[True], other=rows[False])
