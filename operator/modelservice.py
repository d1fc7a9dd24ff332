"""The reconcile of a ModelService: replicas as bare pods, wanted by the autoscaler or by ``spec.replicas``.

A replica is one pod ``<service>-<n>``. Its admission is its creation: the pod is born gated and pinned to the
node that the plan chose, under a name that cannot exist twice; the next look lifts its gate. It leaves in the
opposite order: marked as draining (so that routes stop naming it to new requests), told to drain, deleted with
grace when it is empty or its time is up. ``spec.replicas`` is never written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.contracts.workload import DRAIN_PATH, ServingStatus
from busbar.kube.informer import Key
from busbar.kube.resources import PODS
from busbar.kube.types import AcceleratorPool, ModelService, ServicePhase, TrainingJob, TrainingPhase
from busbar.kube.types.meta import LABEL_JOB, LABEL_KIND
from busbar.kube.types.model_service import ModelServiceStatus, PoolReplicas, ScalingDecision
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.operator import podspec
from busbar.operator.actions import Action, Ask, Create, Delete, LiftGate, Patch
from busbar.operator.orders import Admit, Order, Release, Wait
from busbar.operator.pods import ANNOTATION_DRAINING, Pod
from busbar.operator.scaling import desired_replicas
from busbar.operator.settings import Settings
from busbar.operator.status import Held, add_usage, clip, conditions
from busbar.operator.table import rates_of
from busbar.scheduler import Placement, Resources
from busbar.scheduler.autoscale import ScalingState

HISTORY = 5


@dataclass(frozen=True)
class ModelPlace:
    """Where a service's weights are, or why not yet."""

    uri: str = ""
    problem: str = ""


@dataclass(frozen=True)
class ServiceView:
    """Everything that one reconcile of one service may look at."""

    service: ModelService
    pods: tuple[Pod, ...]
    now: datetime
    settings: Settings
    rendering: podspec.Rendering
    model: ModelPlace
    pools: Mapping[str, AcceleratorPool] = field(default_factory=dict)
    demand: ServiceDemand | None = None  # None: the gateway is not known or not reachable
    readings: Mapping[str, ServingStatus] = field(default_factory=dict)  # by pod uid
    asked: Mapping[str, bool] = field(default_factory=dict)  # by pod uid: POST /drain
    scaling: ScalingState | None = None  # what the last decision remembered; None after a restart
    refused: str = ""  # why the API server did not take a replica's pod, the last time one was sent

    @property
    def status(self) -> ModelServiceStatus:
        return self.service.status or ModelServiceStatus()


@dataclass(frozen=True)
class Decision:
    """What to write, what to do after it, and when to look again at the latest."""

    status: ModelServiceStatus | None = None
    actions: tuple[Action, ...] = ()
    again_s: float | None = None
    scaling: ScalingState | None = None


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
    """The replicas that stay, at most as many as are desired: those that serve first, then the oldest."""
    desired = (service.status.desired_replicas if service.status is not None else None) or 0
    alive = [p for p in pods if not p.ended and not p.deleting and p.draining_since is None]
    alive.sort(key=lambda p: (not p.ready, p.gated, p.rank))
    return alive[:desired]


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


def place_of(pod: Pod) -> Placement | None:
    """The placement that a replica's pod was born with."""
    if not pod.placement:
        return None
    try:
        raw = json.loads(pod.placement)
        per_pod = Resources(**{k: int(v) for k, v in raw["perPod"].items()})
        pool, accelerator, mode, node = (str(raw[k]) for k in ("pool", "accelerator", "mode", "node"))
        return Placement(pool, accelerator, mode, (node,), per_pod)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # an annotation: outside tenants' namespaces anybody may have written it


def reconcile(view: ServiceView, orders: tuple[Order, ...] = ()) -> Decision:
    """See the module's head."""
    if view.service.metadata.deletion_timestamp is not None:
        return Decision()
    actions = [*_leave(view, orders), *_clean(view), *_lift(view), *_start(view, orders)]
    desired, why, scaling = desired_replicas(
        view.service, view.demand, view.scaling, view.now, has_model=bool(view.model.uri)
    )
    status = _status(view, orders, desired, why)
    return Decision(status, tuple(actions), _again(view, desired), scaling)


def _again(view: ServiceView, desired: int) -> float:
    """When time alone may change the answer: a drain's end, or idleness."""
    spec = view.service.spec
    if any(p.draining_since or p.deleting for p in view.pods):
        return min(1.0, view.settings.drain_settle_s)
    if any(p.unschedulable_since for p in view.pods):
        return min(view.settings.unschedulable_s, view.settings.usage_period_s)
    if desired > 0 and (spec.replicas is None or spec.min_replicas == 0):
        return min(5.0, float(spec.scaling.idle_seconds))
    return view.settings.usage_period_s


# -- replicas ------------------------------------------------------------------------------------------


def _start(view: ServiceView, orders: tuple[Order, ...]) -> list[Action]:
    """Creates the pods that the plan admitted."""
    if view.service.spec.suspend or not view.model.uri:
        return []
    wanted = set(wanted_indexes(view.service, view.pods)) - {p.rank for p in view.pods}
    actions: list[Action] = []
    for order in orders:
        if not isinstance(order, Admit) or order.index not in wanted:
            continue
        body = podspec.service_pod(
            view.service,
            index=order.index,
            model_uri=view.model.uri,
            placement=order.placement,
            pool=view.pools.get(order.placement.pool),
            rendering=view.rendering,
        )
        key = Key(view.service.metadata.namespace or "", body["metadata"]["name"])
        actions.append(Create(PODS, key, body))
    return actions


def _lift(view: ServiceView) -> list[Action]:
    kept = {p.uid for p in kept_pods(view.service, view.pods)}
    return [LiftGate(p.key, p.uid, p.gate_index) for p in view.pods if p.gated and p.uid in kept]


def _clean(view: ServiceView) -> list[Action]:
    """A replica that ended, or that its node cannot take (any more), is removed: it is planned again."""
    return [
        Delete(PODS, p.key, p.uid) for p in view.pods if (p.ended or _misplaced(view, p)) and not p.deleting
    ]


def _misplaced(view: ServiceView, pod: Pod) -> bool:
    """Whether kube-scheduler has not found room for it where the plan put it: a node that is full or gone."""
    since = pod.unschedulable_since
    stuck = timedelta(seconds=view.settings.unschedulable_s)
    return not pod.node and since is not None and view.now - since > stuck


def _leave(view: ServiceView, orders: tuple[Order, ...]) -> list[Action]:
    """Marks, drains and deletes the replicas that are too many, or whose place the plan takes back."""
    taken = {o.index for o in orders if isinstance(o, Release)}
    kept = {p.uid for p in kept_pods(view.service, view.pods) if p.rank not in taken}
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
            actions.append(Ask(pod.key, pod.uid, DRAIN_PATH, 5.0))
        elif _drained(view, pod):
            grace = view.service.spec.drain_seconds + podspec.DRAIN_MARGIN_S
            actions.append(Delete(PODS, pod.key, pod.uid, grace))
    return actions


def _drained(view: ServiceView, pod: Pod) -> bool:
    """Whether nothing runs there any more, or its time is up."""
    assert pod.draining_since is not None
    waited = view.now - pod.draining_since
    if waited >= timedelta(seconds=view.service.spec.drain_seconds):
        return True
    reading = view.readings.get(pod.uid)
    # So long at least that the gateway has heard that the replica leaves.
    settled = waited >= timedelta(seconds=view.settings.drain_settle_s)
    return (
        settled and reading is not None and reading.draining and reading.running == 0 and reading.waiting == 0
    )


# -- status --------------------------------------------------------------------------------------------


def _status(
    view: ServiceView, orders: tuple[Order, ...], desired: int, why: str
) -> ModelServiceStatus | None:
    service, old = view.service, view.status
    alive = [p for p in view.pods if not p.ended]
    serving = [p for p in alive if p.ready and p.draining_since is None and not p.deleting]
    phase, reason, message = _phase(view, desired, alive, serving, orders)
    pools: dict[str, int] = {}
    for pod in alive:
        pools[pod.pool] = pools.get(pod.pool, 0) + 1
    fields: dict[str, object] = {
        "observed_generation": service.metadata.generation,
        "replicas": len([p for p in alive if not p.deleting]),
        "ready_replicas": len(serving),
        "desired_replicas": desired,
        "restarts": sum(p.restarts for p in alive),
        "selector": f"{LABEL_KIND}={podspec.KIND_SERVICE},{LABEL_JOB}={service.metadata.name}",
        "model_id": service.spec.model_id or service.metadata.name,
        "url": view.settings.gateway_public_url,
        "pools": [PoolReplicas(pool=p, replicas=n) for p, n in sorted(pools.items())] or None,
        "phase": phase,
        "reason": str(reason),
        "message": clip(message),
    }
    if desired != old.desired_replicas and old.desired_replicas is not None:
        entry = ScalingDecision(
            time=view.now, previous=old.desired_replicas, desired=desired, reason=clip(why)
        )
        fields["scaling_history"] = [*(old.scaling_history or ()), entry][-HISTORY:]
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
    new = old.model_copy(update=fields)
    counted = old.last_usage_time
    due = counted is None or view.now - counted >= timedelta(seconds=view.settings.usage_period_s)
    holds = bool(alive) or bool(old.replicas)
    if transition or (due and holds):
        new = _count(view, new)
    return new if new != old else None


def _count(view: ServiceView, status: ModelServiceStatus) -> ModelServiceStatus:
    """Usage since the last write, by what was held then: the replicas that the old status names."""
    old = view.status
    since = old.last_usage_time or view.now
    seconds = (view.now - since) / timedelta(seconds=1)
    usage = status.usage
    per_pod = float(view.service.spec.shape.accelerators_per_pod)
    for entry in old.pools or ():
        pool = view.pools.get(entry.pool)
        rate = rates_of([pool])[pool.spec.accelerator] if pool is not None else 1.0
        usage = add_usage(usage, Held.of(entry.replicas * per_pod, pool, rate), seconds)
    return status.model_copy(update={"usage": usage, "last_usage_time": view.now})


def _last_request(view: ServiceView) -> datetime | None:
    """When the gateway last saw a request; what the status says where it does not know."""
    demand = view.demand
    if demand is None or demand.last_request_age_seconds is None:
        return view.status.last_request_time
    moment = (view.now - timedelta(seconds=demand.last_request_age_seconds)).replace(microsecond=0)
    known = view.status.last_request_time
    return moment if known is None or moment > known else known


def _phase(
    view: ServiceView, desired: int, alive: list[Pod], serving: list[Pod], orders: tuple[Order, ...]
) -> tuple[ServicePhase, str, str]:
    spec, old = view.service.spec, view.status
    if spec.suspend:
        if alive:
            return (
                ServicePhase.DRAINING,
                Reason.DRAINING,
                f"Suspended; {len(alive)} replicas finish their requests.",
            )
        return (
            ServicePhase.SUSPENDED,
            Reason.SUSPENDED,
            "The service is off; set spec.suspend to false to start it.",
        )
    if not view.model.uri:
        return ServicePhase.PENDING, Reason.MODEL_NOT_READY, view.model.problem
    if serving:
        text = f"{len(serving)} of {desired} replicas take requests."
        if len(serving) > desired:
            text = f"{len(serving)} replicas take requests; {len(serving) - desired} of them will leave."
        waits = _wait(orders)
        if len(serving) < desired and view.refused:
            text = f"{text} Others cannot be made, and are tried again: {view.refused}"
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
    waits = _wait(orders)
    starting = [p for p in alive if p.draining_since is None and not p.deleting]
    if starting:
        problem = next((p.problem for p in starting if p.problem), "")
        return (
            ServicePhase.STARTING,
            Reason.STARTING,
            problem or f"{len(starting)} of {desired} replicas are starting.",
        )
    if view.refused:
        text = f"Its pods cannot be made, and are tried again: {view.refused}"
        return ServicePhase.QUEUED, Reason.PODS_REFUSED, text
    if waits is not None:
        return ServicePhase.QUEUED, waits.reason, waits.message
    if old.phase is ServicePhase.QUEUED and old.reason and old.message:
        return ServicePhase.QUEUED, old.reason, old.message
    return ServicePhase.QUEUED, Reason.WAITING, "Waiting for the scheduler's next round."


def _wait(orders: tuple[Order, ...]) -> Wait | None:
    return next((o for o in orders if isinstance(o, Wait)), None)
