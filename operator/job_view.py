"""What one reconcile of a TrainingJob looks at, what it answers, and how its pods are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from busbar.kube.informer import Key
from busbar.kube.resources import PODS
from busbar.kube.types import AcceleratorPool, TrainingJob
from busbar.kube.types.training_job import (
    Admission,
    PerPod,
    TrainingJobStatus,
)
from busbar.operator import podspec
from busbar.operator.actions import Action, Delete
from busbar.operator.pods import Pod
from busbar.operator.progress import Reading
from busbar.operator.settings import Settings
from busbar.scheduler import Placement, Resources

MANAGER = "busbar.dev/operator"


@dataclass(frozen=True)
class JobView:
    """Everything that one reconcile of one job may look at."""

    job: TrainingJob
    pods: tuple[Pod, ...]  # all that this object owns
    now: datetime
    settings: Settings
    rendering: podspec.Rendering
    pool: AcceleratorPool | None = None  # the admission's, or the order's
    readings: Mapping[str, Reading] = field(default_factory=dict)  # by pod uid
    refusals: Mapping[str, str] = field(default_factory=dict)  # by pod uid: why its port is not read
    asked: Mapping[str, bool] = field(default_factory=dict)  # by pod uid: POST /checkpoint, answered or not
    counted: bool = True  # what it said of its speed, once it has ended, is kept where it outlives the job
    slack: float | None = None  # see progress.merge_reading
    refused: str = ""  # why the API server did not take its pods, the last time they were sent

    @property
    def status(self) -> TrainingJobStatus:
        return self.job.status or TrainingJobStatus()


@dataclass(frozen=True)
class Decision:
    """What to write, what to do after it, and when to look again at the latest."""

    status: TrainingJobStatus | None = None
    actions: tuple[Action, ...] = ()
    again_s: float | None = None
    offer: bool = False  # the scheduler should look at it now


def is_managed(job: TrainingJob) -> bool:
    """Whether the object is ours to act on."""
    return job.spec.managed_by in (None, MANAGER) and job.metadata.deletion_timestamp is None


def placement_of(admission: Admission) -> Placement:
    """The scheduler's form of an admission that stands in a status."""
    per_pod = admission.per_pod or PerPod(accelerators_m=admission.accelerators_per_pod * 1000)
    return Placement(
        pool=admission.pool,
        accelerator=admission.accelerator,
        mode=admission.mode or "resident",
        nodes=tuple(admission.nodes),
        per_pod=Resources(
            accelerators_m=per_pod.accelerators_m,
            cpu_m=per_pod.cpu_m,
            memory_mib=per_pod.memory_mib,
            ephemeral_mib=per_pod.ephemeral_mib,
        ),
    )


def attempt_pods(view: JobView) -> dict[int, Pod]:
    """The pods of the present attempt by rank."""
    attempt = view.status.attempt or 0
    return {p.rank: p for p in view.pods if p.attempt == attempt}


def leftovers(status: TrainingJobStatus, pods: tuple[Pod, ...]) -> list[Pod]:
    """Pods that still hold resources but belong to no admission: the job may not start before they are gone."""
    admitted = status.admission is not None
    return [p for p in pods if not p.ended and not (admitted and p.attempt == (status.attempt or 0))]


def delete_pod(pod: Pod, view: JobView) -> Delete:
    started = pod.phase == "Running"
    grace = view.job.spec.preemption.grace_period_seconds if started else None
    return Delete(PODS, pod.key, pod.uid, grace)


def key_of_body(body: dict[str, object]) -> Key:
    meta = body["metadata"]
    assert isinstance(meta, dict)
    return Key(str(meta["namespace"]), str(meta["name"]))
