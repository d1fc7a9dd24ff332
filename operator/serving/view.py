"""The input and the result of one reconcile of a ModelService."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types import AcceleratorPool, ModelService, TrainingJob, TrainingPhase
from busbar.kube.types.lost_work import Loss
from busbar.kube.types.reasons import Reason
from busbar.kube.types.service_status import ModelServiceStatus
from busbar.operator.accounting.budgets import FREE, Hold
from busbar.operator.pods import manifests
from busbar.operator.profiles.table import Workload, workload
from busbar.operator.serving.fleet_plan import Change, Plan
from busbar.operator.serving.history import Counts
from busbar.operator.serving.names import taken
from busbar.operator.settings import Settings
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Action
from busbar.scheduler.autoscale import ScalingState
from busbar.scheduler.autoscale.warmth import Warmth


@dataclass(frozen=True)
class ModelPlace:
    """Where a service's weights are, or why not yet."""

    uri: str = ""
    problem: str = ""
    made_by: Workload | None = None
    """What is known of the model from the TrainingJob that made it."""
    final: bool = False
    """Waiting does not end the problem."""


@dataclass(frozen=True)
class ServiceView:
    """The whole input of one reconcile of one service."""

    service: ModelService
    pods: tuple[Pod, ...]
    now: datetime
    settings: Settings
    rendering: manifests.Rendering
    model: ModelPlace
    pools: Mapping[str, AcceleratorPool] = field(default_factory=dict)
    demand: ServiceDemand | None = None  # None: there is no gateway, or it does not answer
    readings: Mapping[str, ServingStatus] = field(default_factory=dict)  # by pod uid
    held_pods: frozenset[str] = frozenset()  # uids; power limits have held their boards lately
    asked: Mapping[str, bool] = field(default_factory=dict)  # by pod uid: POST /drain
    changing: frozenset[str] = frozenset()  # uids of pods that are answering POST /sleep or /wake_up now
    scaling: ScalingState | None = None  # the autoscaler's state; None after a restart
    plan: Plan | None = None  # what the latency target says; None: there is none
    warmth: Warmth | None = None  # decides how many surplus replicas sleep; None: as many as the spec allows
    day: Counts | None = None  # what came and was spent in the last 24 hours; None: nothing is counted
    watts: Mapping[str, float] = field(default_factory=dict)  # that its replicas draw, by pool
    silent: Mapping[str, datetime] = field(
        default_factory=dict
    )  # nodes of its pods that do not answer: since when
    reach: Mapping[str, bool] = field(
        default_factory=dict
    )  # by pod uid: True: it answers nobody any more; False: it does again
    refused: str = ""  # why the API server refused a replica's pod, the last time one was sent
    missing_claims: str = ""  # which of the claims that its replicas mount do not exist; empty: all do
    held_back: str = ""  # why no plan counts with some of its replicas; empty: one does
    has_tenant: bool = True  # whether a Tenant has the namespace
    tenant: str = ""  # its name
    energy_joules: float | None = None  # its new total; None: nothing is measured
    budget: Hold = FREE  # what its tenant's budgets do to it
    holders: Mapping[int, Pod] = field(
        default_factory=dict
    )  # pods of others with the names of missing replicas

    lost: Mapping[str, tuple[str, Loss]] = field(
        default_factory=dict
    )  # by job: its tenant and what it lost to this service

    @property
    def status(self) -> ModelServiceStatus:
        return self.service.status or ModelServiceStatus()

    @property
    def hindered(self) -> str:
        """Why a replica that is wanted cannot be made; empty while nothing is known against it."""
        return taken(self.service, self.holders) or self.refused

    @property
    def off(self) -> tuple[Reason, str] | None:
        """Why the service has no replicas whatever the demand, and how to turn it on; None if it may have some."""
        if self.service.spec.suspend:
            return Reason.SUSPENDED, "The service is off; set spec.suspend to false to start it."
        if not self.has_tenant:
            return (
                Reason.TENANT_GONE,
                "The service is off: no Tenant has its namespace any more; it starts when one names it.",
            )
        if self.budget.stops:
            return Reason.BUDGET_SPENT, self.budget.why
        return None


@dataclass(frozen=True)
class ServiceUpdate:
    """The status to write, the actions after it, and after how long to reconcile again at the latest."""

    status: ModelServiceStatus | None = None
    actions: tuple[Action, ...] = ()
    again_s: float | None = None
    scaling: ScalingState | None = None
    scaled: Change | None = None  # why the desired replicas change; None: they do not
    notices: tuple[tuple[str, str], ...] = ()  # events that are no change of phase: reason, message


def model_uri(service: ModelService, jobs: Iterable[TrainingJob]) -> ModelPlace:
    """Where the weights are: given, or the output of a TrainingJob that has succeeded."""
    model = service.spec.model
    if model.uri is not None:
        return ModelPlace(uri=model.uri)
    name, namespace = model.training_job, service.metadata.namespace
    job = next((j for j in jobs if j.metadata.name == name and j.metadata.namespace == namespace), None)
    if job is None:
        return ModelPlace(problem=f"TrainingJob {name} does not exist in this namespace.")
    if job.spec.output is None:
        return ModelPlace(problem=f"TrainingJob {name} names no output that could be served.", final=True)
    if job.spec.engine is not None and (adapters := job.spec.engine.unmerged):
        return ModelPlace(
            problem=f"The output of TrainingJob {name} is no model, but adapters ({', '.join(adapters)}): serve their base with "
            "spec.adapters, or a merged one by spec.model.uri.",
            final=True,
        )
    if job.status is None or job.status.phase is not TrainingPhase.SUCCEEDED:
        return ModelPlace(problem=f"TrainingJob {name} has not succeeded yet.")
    return ModelPlace(uri=job.spec.output.uri, made_by=workload(job))
