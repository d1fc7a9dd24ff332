"""The reconcile of a ModelService: replicas as bare pods, wanted by the autoscaler or by ``spec.replicas``.

A replica is one pod ``<service>-<n>``. Its admission is its creation: the pod is created gated and pinned to the
node that the plan chose, under a name that cannot exist twice; the next reconcile removes its gate. It is removed in
the opposite order: marked as draining (so that routes no longer offer it for new requests), asked to drain, deleted
with a grace period when it is empty or its time is up. A drain cannot be undone, so a replica that reports that it
drains although the operator did not mark it is removed in the same way and replaced. ``spec.replicas`` is never
written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from busbar.kube.contracts import bearers
from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.contracts.workload import DRAIN_PATH, ServingStatus
from busbar.kube.informer import Key
from busbar.kube.resources import PODS, SECRETS
from busbar.kube.types import AcceleratorPool, ModelService, ServicePhase, TrainingJob, TrainingPhase
from busbar.kube.types.meta import LABEL_JOB, LABEL_KIND
from busbar.kube.types.model_service import (
    MOST_DECISIONS,
    MeasuredReplica,
    ModelServiceStatus,
    ScalingDecision,
    ServiceLevelStatus,
)
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.operator.decisions import Admit, Decision, Release, Wait
from busbar.operator.pods import manifests
from busbar.operator.profiles.serving_speeds import measured, remembered
from busbar.operator.profiles.table import rates_of
from busbar.operator.serving.fleets import Change, Plan
from busbar.operator.serving.names import taken
from busbar.operator.serving.scaling import desired_replicas
from busbar.operator.serving.scaling_status import forecast_status, level_status, pool_rows
from busbar.operator.settings import Settings
from busbar.operator.watch.projections import ANNOTATION_DRAINING, Pod
from busbar.operator.write.actions import Action, Apply, Create, Delete, LiftGate, Patch, PostToPod
from busbar.operator.write.status import Held, add_usage, clip, conditions
from busbar.scheduler import Placement, Resources
from busbar.scheduler.autoscale import ScalingState


@dataclass(frozen=True)
class ModelPlace:
    """Where a service's weights are, or why not yet."""

    uri: str = ""
    problem: str = ""


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
    asked: Mapping[str, bool] = field(default_factory=dict)  # by pod uid: POST /drain
    scaling: ScalingState | None = None  # the autoscaler's state; None after a restart
    plan: Plan | None = None  # what the latency target says; None: there is none
    refused: str = ""  # why the API server refused a replica's pod, the last time one was sent
    has_tenant: bool = True  # whether a Tenant has the namespace
    energy_joules: float | None = None  # its new total; None: nothing is measured
    budget_spent: str = ""  # why nothing more of its tenant is started; empty where it is
    holders: Mapping[int, Pod] = field(
        default_factory=dict
    )  # pods of others with the names of missing replicas

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
        return ModelPlace(problem=f"TrainingJob {name} names no output that could be served.")
    if job.status is None or job.status.phase is not TrainingPhase.SUCCEEDED:
        return ModelPlace(problem=f"TrainingJob {name} has not succeeded yet.")
    return ModelPlace(uri=job.spec.output.uri)


def kept_pods(service: ModelService, pods: Iterable[Pod]) -> list[Pod]:
    """The replicas to keep, at most as many as are desired: those in the pools where they are wanted, of these the
    ones that serve first, then the oldest."""
    status = service.status
    desired = (status.desired_replicas if status is not None else None) or 0
    alive = [p for p in pods if not p.ended and not p.deleting and p.draining_since is None]
    alive.sort(key=lambda p: (not p.ready, p.gated, p.rank))
    room = {
        row.pool: row.desired for row in (status.pools if status is not None else None) or () if row.desired
    }
    wanted: list[Pod] = []
    for pod in alive:
        if room.get(pod.pool, 0) > 0:
            room[pod.pool] -= 1
            wanted.append(pod)
    first = {pod.uid for pod in wanted}
    return [*wanted, *(p for p in alive if p.uid not in first)][:desired]


def wanted_indexes(service: ModelService, pods: Iterable[Pod]) -> list[int]:
    """The replica numbers that should exist: those kept, and the lowest free ones for what is missing."""
    pods = tuple(pods)
    desired = (service.status.desired_replicas if service.status is not None else None) or 0
    kept = [p.rank for p in kept_pods(service, pods)]
    taken = {p.rank for p in pods}
    index = 0
    while len(kept) < desired:
        if index not in taken:
            kept.append(index)
            taken.add(index)
        index += 1
    return sorted(kept)


def wanted_types(service: ModelService, pods: Iterable[Pod]) -> list[str]:
    """Accelerator types for the replicas that are missing, in the order of their numbers, where the latency target
    chose them. There may be fewer of them than missing replicas: those others may have any type."""
    held: dict[str, int] = {}
    for pod in kept_pods(service, pods):
        held[pod.pool] = held.get(pod.pool, 0) + 1
    rows = (service.status.pools if service.status is not None else None) or ()
    return [
        row.accelerator
        for row in rows
        if row.accelerator
        for _ in range((row.desired or 0) - held.get(row.pool, 0))
    ]


def startable(service: ModelService, pods: Iterable[Pod]) -> int:
    """How many replicas may be started although the tenant's budget is spent: those that `minReplicas` lacks."""
    return max(0, service.spec.min_replicas - len(kept_pods(service, pods)))


def place_of(pod: Pod) -> Placement | None:
    """The placement that a replica's pod was created with."""
    if not pod.placement:
        return None
    try:
        raw = json.loads(pod.placement)
        per_pod = Resources(**{k: int(v) for k, v in raw["perPod"].items()})
        pool, accelerator, mode, node = (str(raw[k]) for k in ("pool", "accelerator", "mode", "node"))
        return Placement(pool, accelerator, mode, (node,), per_pod)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # an annotation; outside tenants' namespaces anybody may have written it


def reconcile(view: ServiceView, decisions: tuple[Decision, ...] = ()) -> ServiceUpdate:
    """See the module's head."""
    if view.service.metadata.deletion_timestamp is not None:
        return ServiceUpdate()
    lost = _lost(view)
    notices = tuple((Reason.REPLICA_REPLACED, why) for why in lost.values())
    actions = [*_leave(view, decisions, lost), *_clean(view), *_lift(view), *_start(view, decisions)]
    desired, why, scaling = desired_replicas(
        view.service,
        view.demand,
        view.scaling,
        view.now,
        has_model=bool(view.model.uri),
        off=view.off[1] if view.off is not None else "",
        plan=view.plan,
    )
    status = _status(view, decisions, desired, why)
    scaled = why if _is_scaling(view.status, desired) else None
    return ServiceUpdate(status, tuple(actions), _again(view, desired), scaling, scaled, notices)


def _is_scaling(old: ModelServiceStatus, desired: int) -> bool:
    return old.desired_replicas is not None and desired != old.desired_replicas


def _again(view: ServiceView, desired: int) -> float:
    """After how many seconds the result may change without an event: a drain ends, or the service becomes idle."""
    spec = view.service.spec
    if any(p.draining_since or p.deleting for p in view.pods):
        return min(1.0, view.settings.drain_settle_s)
    if any(p.unschedulable_since for p in view.pods):
        return min(view.settings.unschedulable_s, view.settings.usage_period_s)
    if desired > 0 and (spec.replicas is None or spec.min_replicas == 0):
        return min(5.0, float(spec.scaling.idle_seconds))
    return view.settings.usage_period_s


# -- replicas ------------------------------------------------------------------------------------------


def _start(view: ServiceView, decisions: tuple[Decision, ...]) -> list[Action]:
    """Creates the pods that the plan admitted."""
    if view.off is not None or not view.model.uri:
        return []
    wanted = set(wanted_indexes(view.service, view.pods)) - {p.rank for p in view.pods} - view.holders.keys()
    if view.budget_spent:
        wanted = set(sorted(wanted)[: startable(view.service, view.pods)])
    actions: list[Action] = []
    for decision in decisions:
        if not isinstance(decision, Admit) or decision.index not in wanted:
            continue
        body = manifests.service_pod(
            view.service,
            index=decision.index,
            model_uri=view.model.uri,
            placement=decision.placement,
            pool=view.pools.get(decision.placement.pool),
            rendering=view.rendering,
        )
        key = Key(view.service.metadata.namespace or "", body["metadata"]["name"])
        actions.append(Create(PODS, key, body))
    secret = manifests.bearers_secret(view.service, view.rendering)
    if actions and secret is not None:
        actions.insert(0, Apply(SECRETS, secret))
    return actions


def _lift(view: ServiceView) -> list[Action]:
    kept = {p.uid for p in kept_pods(view.service, view.pods)}
    return [LiftGate(p.key, p.uid, p.gate_index) for p in view.pods if p.gated and p.uid in kept]


def _clean(view: ServiceView) -> list[Action]:
    """Removes replicas that ended or that their node cannot run; the next round plans them again."""
    return [
        Delete(PODS, p.key, p.uid) for p in view.pods if (p.ended or _misplaced(view, p)) and not p.deleting
    ]


def _misplaced(view: ServiceView, pod: Pod) -> bool:
    """Whether kube-scheduler has not found room for it on the planned node for too long: the node is full or gone."""
    since = pod.unschedulable_since
    stuck = timedelta(seconds=view.settings.unschedulable_s)
    return not pod.node and since is not None and view.now - since > stuck


def _lost(view: ServiceView) -> dict[str, str]:
    """Replicas that can serve no requests any more although they should, by pod uid: why they are replaced."""
    own = bearers.secret_name(view.rendering.workload_key, view.service.metadata.uid)
    lost: dict[str, str] = {}
    for pod in view.pods:
        if pod.draining_since is not None or pod.deleting or pod.ended:
            continue
        reading = view.readings.get(pod.uid)
        if reading is not None and reading.draining:
            why = "drains although the operator did not ask it to"
        elif pod.bearers not in ("", own):
            why = "was made under another workload key, so nobody can call it"
        else:
            continue
        lost[pod.uid] = f"Replica {pod.key.name} {why}; it is replaced."
    return lost


def _leave(view: ServiceView, decisions: tuple[Decision, ...], lost: Mapping[str, str]) -> list[Action]:
    """Marks, drains and deletes the replicas that are surplus, lost, or released by the plan."""
    taken = {d.index for d in decisions if isinstance(d, Release)}
    kept = {p.uid for p in kept_pods(view.service, view.pods) if p.rank not in taken} - lost.keys()
    actions: list[Action] = []
    for pod in view.pods:
        if pod.ended or pod.deleting or pod.uid in kept:
            continue
        if pod.gated or pod.phase != "Running" or not pod.port:
            actions.append(Delete(PODS, pod.key, pod.uid))
        elif pod.draining_since is None:
            mark = {"metadata": {"annotations": {ANNOTATION_DRAINING: view.now.isoformat()}}}
            actions.append(Patch(PODS, pod.key, mark, pod.uid))
        elif pod.uid not in view.asked and not _drained(view, pod):
            actions.append(PostToPod(pod.key, pod.uid, DRAIN_PATH, 5.0))
        elif _drained(view, pod):
            grace = view.service.spec.drain_seconds + manifests.DRAIN_MARGIN_S
            actions.append(Delete(PODS, pod.key, pod.uid, grace))
    return actions


def _drained(view: ServiceView, pod: Pod) -> bool:
    """Whether no request runs there any more, or its time is up."""
    assert pod.draining_since is not None
    waited = view.now - pod.draining_since
    if waited >= timedelta(seconds=view.service.spec.drain_seconds):
        return True
    reading = view.readings.get(pod.uid)
    # Long enough for the gateway to receive routes without the replica.
    settled = waited >= timedelta(seconds=view.settings.drain_settle_s)
    return (
        settled and reading is not None and reading.draining and reading.running == 0 and reading.waiting == 0
    )


# -- status --------------------------------------------------------------------------------------------


def _status(
    view: ServiceView, decisions: tuple[Decision, ...], desired: int, why: Change
) -> ModelServiceStatus | None:
    service, old = view.service, view.status
    alive = [p for p in view.pods if not p.ended]
    serving = [p for p in alive if p.ready and p.draining_since is None and not p.deleting]
    phase, reason, message = _phase(view, desired, alive, serving, decisions)
    fields: dict[str, object] = {
        "observed_generation": service.metadata.generation,
        "replicas": len([p for p in alive if not p.deleting]),
        "ready_replicas": len(serving),
        "desired_replicas": desired,
        "restarts": sum(p.restarts for p in alive),
        "selector": f"{LABEL_KIND}={manifests.KIND_SERVICE},{LABEL_JOB}={service.metadata.name}",
        "model_id": service.spec.model_id or service.metadata.name,
        "url": view.settings.gateway_public_url,
        "pools": pool_rows(service, alive, view.pools, view.plan, desired) or None,
        "phase": phase,
        "reason": str(reason),
        "message": clip(message),
    }
    if old.desired_replicas is not None and _is_scaling(old, desired):
        entry = ScalingDecision(
            time=view.now,
            previous=old.desired_replicas,
            desired=desired,
            cause=why.cause,
            requests_per_second=why.load_rps,
            capacity_per_second=why.capacity_rps,
            reason=clip(why.reason),
        )
        fields["scaling_history"] = [*(old.scaling_history or ()), entry][-MOST_DECISIONS:]
        fields["last_scale_time"] = view.now
    if (phase, reason) != (old.phase, old.reason) or old.observed_generation != service.metadata.generation:
        wanted: dict[str, bool] = {
            ConditionType.READY: phase in (ServicePhase.READY, ServicePhase.IDLE, ServicePhase.SUSPENDED)
        }
        wanted[ConditionType.RUNNING] = bool(serving)
        fields["conditions"] = conditions(
            old.conditions, wanted, reason, clip(message), service.metadata.generation, view.now
        )
    seen = _last_request(view)
    transition = any(
        fields[k] != getattr(old, k) for k in ("phase", "reason", "replicas", "desired_replicas")
    )
    if seen is not None and (
        transition or old.last_request_time is None or seen - old.last_request_time >= timedelta(seconds=15)
    ):
        fields["last_request_time"] = seen
    counted = old.last_usage_time
    due = counted is None or view.now - counted >= timedelta(seconds=view.settings.usage_period_s)
    holds = bool(alive) or bool(old.replicas)
    level = level_status(service, view.plan)
    if "last_request_time" in fields or transition or due or _rule(level) != _rule(old.slo):
        fields["slo"], fields["forecast"] = level, forecast_status(view.plan)
    new = old.model_copy(update=fields)
    if transition or (due and holds):
        new = _count(view, new.model_copy(update={"measured": _measured(view, alive)}))
    return new if new != old else None


def _measured(view: ServiceView, alive: list[Pod]) -> list[MeasuredReplica] | None:
    """What replicas measured. Forgotten while the service is suspended, when its model may change."""
    if view.service.spec.suspend and not alive:
        return None
    lines = measured(((pod, place_of(pod)) for pod in alive), view.readings)
    return remembered(view.status.measured, lines) or None


def _rule(level: ServiceLevelStatus | None) -> str | None:
    return level.scaled_by if level is not None else None


def _count(view: ServiceView, status: ModelServiceStatus) -> ModelServiceStatus:
    """Adds usage since the last write, for the replicas that the old status names."""
    old = view.status
    since = old.last_usage_time or view.now
    seconds = (view.now - since) / timedelta(seconds=1)
    usage = status.usage
    per_pod = float(view.service.spec.shape.accelerators_per_pod)
    for entry in old.pools or ():
        pool = view.pools.get(entry.pool)
        rate = rates_of([pool])[pool.spec.accelerator] if pool is not None else 1.0
        usage = add_usage(usage, Held.of(entry.replicas * per_pod, pool, rate), seconds, view.energy_joules)
    return status.model_copy(update={"usage": usage, "last_usage_time": view.now})


def _last_request(view: ServiceView) -> datetime | None:
    """When the gateway last saw a request; from the status where the gateway does not know."""
    demand = view.demand
    if demand is None or demand.last_request_age_seconds is None:
        return view.status.last_request_time
    moment = (view.now - timedelta(seconds=demand.last_request_age_seconds)).replace(microsecond=0)
    known = view.status.last_request_time
    return moment if known is None or moment > known else known


def _phase(
    view: ServiceView, desired: int, alive: list[Pod], serving: list[Pod], decisions: tuple[Decision, ...]
) -> tuple[ServicePhase, str, str]:
    old = view.status
    if view.off is not None:
        if alive:
            text = f"{view.off[1]} {len(alive)} replicas finish their requests."
            return ServicePhase.DRAINING, Reason.DRAINING, text
        return ServicePhase.SUSPENDED, *view.off
    if not view.model.uri:
        return ServicePhase.PENDING, Reason.MODEL_NOT_READY, view.model.problem
    if serving:
        text = f"{len(serving)} of {desired} replicas take requests."
        if len(serving) > desired:
            text = f"{len(serving)} replicas take requests; {len(serving) - desired} of them will leave."
        waits = _wait(decisions)
        if len(serving) < desired and view.hindered:
            text = f"{text} Others cannot be made, and are tried again: {view.hindered}"
        elif _held(view, desired):
            text = f"{text} {view.budget_spent}"
        elif len(serving) < desired and waits is not None:
            text = f"{text} {waits.message}"
        elif len(serving) < desired and old.reason == Reason.SERVING and old.message is not None:
            text = old.message if old.message.startswith(text) else text
        return ServicePhase.READY, Reason.SERVING, text
    if desired == 0:
        if alive:
            return (
                ServicePhase.DRAINING,
                Reason.DRAINING,
                f"{len(alive)} replicas finish their requests and leave.",
            )
        return ServicePhase.IDLE, Reason.IDLE, "No replica runs; a request wakes the service."
    waits = _wait(decisions)
    starting = [p for p in alive if p.draining_since is None and not p.deleting]
    if starting:
        problem = next((p.problem for p in starting if p.problem), "")
        return (
            ServicePhase.STARTING,
            Reason.STARTING,
            problem or f"{len(starting)} of {desired} replicas are starting.",
        )
    if view.hindered:
        text = f"Its pods cannot be made, and are tried again: {view.hindered}"
        return ServicePhase.QUEUED, Reason.PODS_REFUSED, text
    if _held(view, desired):
        return ServicePhase.QUEUED, Reason.BUDGET_SPENT, view.budget_spent
    if waits is not None:
        return ServicePhase.QUEUED, waits.reason, waits.message
    told_before = old.phase is ServicePhase.QUEUED and old.reason != Reason.BUDGET_SPENT
    if told_before and old.reason and old.message:
        return ServicePhase.QUEUED, old.reason, old.message
    return ServicePhase.QUEUED, Reason.WAITING, "Waiting for the scheduler's next round."


def _held(view: ServiceView, desired: int) -> bool:
    """Whether replicas are wanted that are not started because the tenant's budget is spent."""
    kept = len(kept_pods(view.service, view.pods))
    return bool(view.budget_spent) and desired > kept and not startable(view.service, view.pods)


def _wait(decisions: tuple[Decision, ...]) -> Wait | None:
    return next((d for d in decisions if isinstance(d, Wait)), None)
