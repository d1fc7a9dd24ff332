"""How many replicas a service should have now: where the autoscaler's pure decision meets the object.

The decision is ``busbar.scheduler.autoscale``: ``spec.suspend`` is the real off; ``spec.replicas`` present is an
external target, which a held request may exceed by one where the target and ``minReplicas`` are zero; absent,
demand decides. What it must remember is rebuilt from the object's status after a restart: a wake-up shows as
one desired replica under a target of zero that was seen before; only the timing of a scale-down begins again.
"""

from __future__ import annotations

from datetime import datetime

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.types import ModelService
from busbar.scheduler.autoscale import Demand, Scaling, ScalingState, decide

DOWN_AFTER_S = 60.0


def desired_replicas(
    service: ModelService,
    demand: ServiceDemand | None,
    state: ScalingState | None,
    now: datetime,
    *,
    has_model: bool,
) -> tuple[int, str, ScalingState]:
    """The count, a sentence why (for the scaling history), and what to remember."""
    spec = service.spec
    state = state if state is not None else remembered(service, now)
    if not has_model:
        return 0, "There are no weights to serve yet.", remembered(service, now)
    scaling = Scaling(
        min_replicas=spec.min_replicas,
        max_replicas=spec.replica_ceiling,
        replicas=spec.replicas,
        target_in_flight=float(spec.scaling.target_in_flight_per_replica),
        idle_s=float(spec.scaling.idle_seconds),
        down_after_s=min(DOWN_AFTER_S, float(spec.scaling.idle_seconds)),
        suspend=spec.suspend,
    )
    seen = Demand(known=False)
    if demand is not None:
        seen = Demand(demand.in_flight, demand.waiting, demand.last_request_age_seconds)
    count, state = decide(scaling, seen, state, now.timestamp())
    return count, _why(service, seen, state, count), state


def remembered(service: ModelService, now: datetime) -> ScalingState:
    """What the status tells of earlier decisions. A new service begins with one replica, busy from its birth."""
    status = service.status
    busy = [m.timestamp() for m in (service.metadata.creation_timestamp,) if m is not None]
    if status is None or status.desired_replicas is None:
        return ScalingState(replicas=1, busy_at_s=max(busy, default=now.timestamp()))
    if status.last_request_time is not None:
        busy.append(status.last_request_time.timestamp())
    if status.scaling_history:
        busy.append(status.scaling_history[-1].time.timestamp())
    seen = status.observed_generation == service.metadata.generation
    return ScalingState(
        replicas=status.desired_replicas,
        busy_at_s=max(busy, default=now.timestamp()),
        woken=seen and service.spec.replicas == 0 and status.desired_replicas > 0,
    )


def _why(service: ModelService, demand: Demand, state: ScalingState, count: int) -> str:
    spec = service.spec
    if spec.suspend:
        return "The service is suspended."
    if state.woken:
        return "A request woke the service."
    if spec.replicas is not None:
        return f"spec.replicas is {spec.replicas}."
    if not demand.known:
        return "The gateway says nothing; the count is kept within its bounds."
    if count == 0:
        return f"No request for {spec.scaling.idle_seconds} s."
    return f"{demand.total} requests in flight or waiting, {spec.scaling.target_in_flight_per_replica} per replica."
