"""The input and the result of one reconcile of a TrainingJob, and the pods of its attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from busbar.kube.contracts.workload import TrainingStatus
from busbar.kube.informer import Key
from busbar.kube.types import AcceleratorPool, TrainingJob
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_status import TERMINAL_PHASES, Admission, PerPod, PowerUse, TrainingJobStatus
from busbar.operator.accounting.budgets import FREE, Hold
from busbar.operator.pods import manifests, training_pods
from busbar.operator.pods.room import PodRoom
from busbar.operator.settings import Settings
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Action
from busbar.scheduler import Placement, Resources

MANAGER = "busbar.dev/operator"
MOVES = ("Moved", "Resized")
"""Reasons for which the scheduler stops a job to start it elsewhere or in another size."""

ENDING = "The namespace is being deleted, so no pod can be made in it."


@dataclass(frozen=True)
class JobView:
    """The whole input of one reconcile of one job."""

    job: TrainingJob
    pods: tuple[Pod, ...]  # all that this object owns
    now: datetime
    settings: Settings
    rendering: manifests.Rendering
    pool: AcceleratorPool | None = None  # of the admission, or of the decision
    readings: Mapping[str, TrainingStatus] = field(default_factory=dict)  # by pod uid
    refusals: Mapping[str, str] = field(default_factory=dict)  # by pod uid: why its port is not read
    asked: Mapping[str, bool] = field(default_factory=dict)  # by pod uid: POST /checkpoint, answered or not
    counted: bool = True  # of an ended job: whether its profile has its speed, so that the job may be deleted
    slack: float | None = None  # see progress.merge_reading
    counts_due: bool = True  # whether a start that is under way is told now: its last status is some time ago
    refused: str = ""  # why the API server refused its pods, the last time they were sent
    has_tenant: bool = True  # whether a Tenant has the namespace
    holders: tuple[Pod, ...] = ()  # pods of others that have the names of its pods
    gone_pods: frozenset[str] = frozenset()  # names of pods of its newest attempt that were seen and are gone
    absent_nodes: frozenset[str] = (
        frozenset()
    )  # of its admission, those that take no pod now; asked where one may be replaced
    silent: Mapping[str, datetime] = field(
        default_factory=dict
    )  # nodes of its pods that do not answer: since when
    energy_joules: float | None = None  # its new total; None: nothing is measured
    budget: Hold = FREE  # what its tenant's budgets do to it
    missing_claims: str = ""  # which of the claims that its pods mount do not exist; empty: all do
    is_ending: bool = False  # whether its namespace is being deleted: it may hang in that for long
    held_back: str = ""  # why no plan counts with it, as it is not preemptible; empty: one does
    power: PowerUse | None = (
        None  # what limits have cost its attempt; None: it is on no boards that are limited
    )
    pod_room: PodRoom | None = None  # what its tenant's limit of pods leaves; None: not limited, or not asked

    @property
    def status(self) -> TrainingJobStatus:
        return self.job.status or TrainingJobStatus()

    @property
    def is_stopped(self) -> bool:
        """Whether the job is stopped because its tenant's budget is spent; never one that may not be stopped."""
        return self.budget.stops and self.job.spec.preemptible

    @property
    def suspended(self) -> tuple[Reason, str] | None:
        """Why the job must not run, and what lets it; None if it may wait for its turn.

        A job that never ran and has no Tenant waits like any other: the scheduler says why.
        """
        if self.job.spec.suspend:
            return Reason.SUSPENDED, "The job is suspended; set spec.suspend to false to queue it."
        if not self.has_tenant and self.status.attempt:
            return (
                Reason.TENANT_GONE,
                "The job is suspended: no Tenant has its namespace any more; it is queued when one names it.",
            )
        return None


@dataclass(frozen=True)
class JobUpdate:
    """The status to write, the actions after it, and after how long to reconcile again at the latest."""

    status: TrainingJobStatus | None = None
    actions: tuple[Action, ...] = ()
    again_s: float | None = None
    offer: bool = False  # a scheduling round should run now


def is_managed(job: TrainingJob) -> bool:
    """Whether this operator manages the object."""
    return job.spec.managed_by in (None, MANAGER) and job.metadata.deletion_timestamp is None


def waits_for_its_turn(job: TrainingJob) -> bool:
    """Whether the job is queued: not admitted, not suspended, not ended; a job that nobody looked at yet is."""
    status = job.status or TrainingJobStatus()
    ended = status.phase in TERMINAL_PHASES
    return is_managed(job) and not job.spec.suspend and not ended and status.admission is None


def goes_on(job: TrainingJob) -> bool:
    """Whether it waits only because the scheduler moves it: it is no new start."""
    return job.status is not None and job.status.reason in MOVES


def is_held(job: TrainingJob, budget: Hold) -> bool:
    """Whether a spent budget keeps a waiting job from starting."""
    return bool(budget.why) and (budget.stops or not goes_on(job))


def placement_of(admission: Admission) -> Placement:
    """The placement of an admission in a status."""
    per_pod = admission.per_pod or PerPod(accelerators_m=admission.accelerators_per_pod * 1000)
    return Placement(
        pool=admission.pool,
        accelerator=admission.accelerator,
        mode=admission.mode or "resident",
        nodes=tuple(admission.nodes),
        per_pod=resources_of(per_pod),
        link=admission.link_class or "",
        power_cap=1.0 if admission.power_cap_percent is None else admission.power_cap_percent / 100,
    )


def resources_of(per_pod: PerPod) -> Resources:
    """What each pod requests, from a status."""
    return Resources(
        accelerators_m=per_pod.accelerators_m,
        cpu_m=per_pod.cpu_m,
        memory_mib=per_pod.memory_mib,
        ephemeral_mib=per_pod.ephemeral_mib,
    )


def per_pod_of(placement: Placement) -> PerPod:
    """The inverse of `resources_of`, for a placement."""
    asked = placement.per_pod
    return PerPod(
        accelerators_m=asked.accelerators_m,
        cpu_m=asked.cpu_m,
        memory_mib=asked.memory_mib,
        ephemeral_mib=asked.ephemeral_mib,
    )


def attempt_pods(view: JobView) -> dict[int, Pod]:
    """The pods of the present attempt by rank; of a rank that was replaced, the newest."""
    attempt, times = view.status.attempt or 0, replaced_times(view.status.admission)
    return {p.rank: p for p in view.pods if p.attempt == attempt and p.replacement == times.get(p.rank, 0)}


def replaced_times(admission: Admission | None) -> dict[int, int]:
    """How often the pod of a rank was replaced; only those that were."""
    return {each.rank: each.times for each in (admission and admission.replaced) or ()}


def without_node(admission: Admission) -> list[int]:
    """The ranks whose pods wait for another node."""
    return [each.rank for each in admission.replaced or () if each.needs_node]


def pod_name(view: JobView, rank: int) -> str:
    """That of the newest pod of a rank in the present attempt."""
    times = replaced_times(view.status.admission).get(rank, 0)
    return training_pods.training_pod_name(view.job.metadata.name, view.status.attempt or 0, rank, times)


def holders(job: TrainingJob, own: tuple[Pod, ...], pods: Mapping[Key, Pod]) -> tuple[Pod, ...]:
    """Pods that have the names of an admitted attempt's pods and that this object did not make.

    Args:
        own: pods that it made, of any attempt.
        pods: all pods of the cluster.
    """
    status = job.status
    if status is None or status.admission is None:
        return ()
    if sum(p.attempt == status.attempt for p in own) >= status.admission.pods:
        return ()  # so it is nearly always, and a large gang costs nothing here
    names = (
        training_pods.training_pod_name(job.metadata.name, status.attempt or 1, rank)
        for rank in range(status.admission.pods)
    )
    found = (pods.get(Key(job.metadata.namespace or "", name)) for name in names)
    return tuple(p for p in found if p is not None and p.owner_uid != job.metadata.uid)


def leftovers(status: TrainingJobStatus, pods: tuple[Pod, ...]) -> list[Pod]:
    """Pods that still hold resources but belong to no admission: the job may not start before they are gone."""
    admitted = status.admission is not None
    return [p for p in pods if not p.ended and not (admitted and p.attempt == (status.attempt or 0))]


def key_of_body(body: dict[str, object]) -> Key:
    meta = body["metadata"]
    assert isinstance(meta, dict)
    return Key(str(meta["namespace"]), str(meta["name"]))
