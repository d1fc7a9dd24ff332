"""How many replicas a service should have now, from its spec, its status and the demand.

``busbar.scheduler.autoscale`` decides: a service that is off has none; ``spec.replicas`` or ``spec.scaling.external``, where present, is an
external target, which a held request may exceed by one where the target and ``minReplicas`` are zero; without it,
demand decides. After a restart the autoscaler's state is rebuilt from the object's status: a wake-up shows as one
desired replica under a target of zero that was seen before, and external targets as changes in the history. Only the timing of
a scale-down starts again.

A service whose latency target can decide (``fleets.py``) has as many replicas as that says while it has any. From zero
to one and back is decided here alone.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.types import ModelService
from busbar.kube.types.service_status import ScalingCause
from busbar.operator.serving.external import external_words
from busbar.operator.serving.fleet_plan import Change, Plan
from busbar.scheduler.autoscale import Asked, Demand, Scaling, ScalingState, decide

DOWN_AFTER_S = 60.0


def desired_replicas(
    service: ModelService,
    demand: ServiceDemand | None,
    state: ScalingState | None,
    now: datetime,
    *,
    has_model: bool,
    off: str = "",
    plan: Plan | None = None,
) -> tuple[int, Change, ScalingState]:
    """The count, why (for the scaling history), and what to remember.

    Args:
        plan: what the latency target says; None: there is none.
        off: why there shall be no replicas whatever the demand; empty if there may be some.
    """
    spec = service.spec
    state = state if state is not None else remembered(service, now)
    if not has_model:
        return 0, Change(ScalingCause.OFF, "There are no weights to serve yet."), remembered(service, now)
    scaling = Scaling(
        min_replicas=spec.min_replicas,
        max_replicas=spec.replica_ceiling,
        replicas=spec.external_replicas,
        target_in_flight=float(spec.scaling.target_in_flight_per_replica),
        idle_s=float(spec.scaling.idle_seconds),
        down_after_s=float(
            spec.scaling.down_after_seconds or min(DOWN_AFTER_S, float(spec.scaling.idle_seconds))
        ),
        suspend=bool(off),
    )
    seen = Demand(known=False)
    if demand is not None:
        seen = Demand(demand.in_flight, demand.waiting, demand.last_request_age_seconds)
    if spec.external_replicas is None:
        # More than the ceiling, from an external target or an earlier ceiling: down to it, and on from there slowly.
        state = replace(state, replicas=min(state.replicas, max(spec.replica_ceiling, spec.min_replicas)))
    before = state.replicas
    count, state = decide(scaling, seen, state, now.timestamp())
    if off:
        return count, Change(ScalingCause.OFF, off), state
    if spec.external_replicas:
        state = replace(
            state, busy_at_s=now.timestamp()
        )  # given back, the service is idle only after its time
    if plan is not None and plan.target and spec.external_replicas is None and before > 0 and count > 0:
        least, most = spec.min_replicas, max(spec.replica_ceiling, spec.min_replicas)
        count = min(max(sum(plan.target.values()), least), most)  # a held target may be older than the bounds
        change = plan.change or Change(ScalingCause.FORECAST, "The latency target decides from now on.")
        return count, change, replace(state, replicas=count, enough=None)
    return count, _why(service, seen, state, count), state


def remembered(service: ModelService, now: datetime) -> ScalingState:
    """The autoscaler's state as the status implies it. A new service begins with one replica and counts as busy."""
    status = service.status
    busy = [m.timestamp() for m in (service.metadata.creation_timestamp,) if m is not None]
    if status is None or status.desired_replicas is None:
        return ScalingState(replicas=1, busy_at_s=max(busy, default=now.timestamp()))
    if status.last_request_time is not None:
        busy.append(status.last_request_time.timestamp())
    if status.scaling_history:
        busy.append(status.scaling_history[-1].time.timestamp())
    changes = [entry for entry in status.scaling_history or () if entry.cause is ScalingCause.EXTERNAL]
    asked = [Asked(entry.time.timestamp(), entry.desired) for entry in changes]
    if changes:
        asked.insert(0, Asked(asked[0].at_s, changes[0].previous))
    seen = status.observed_generation == service.metadata.generation
    return ScalingState(
        replicas=status.desired_replicas,
        busy_at_s=max(busy, default=now.timestamp()),
        asked=tuple(asked),
        woken=seen and service.spec.external_replicas == 0 and status.desired_replicas > 0,
    )


def _why(service: ModelService, demand: Demand, state: ScalingState, count: int) -> Change:
    spec = service.spec
    if state.woken:
        return Change(ScalingCause.WOKEN, "A request woke the service.")
    if spec.external_replicas is not None:
        return Change(ScalingCause.EXTERNAL, f"{external_words(spec)}.")
    if not demand.known:
        return Change(ScalingCause.BOUNDS, "The gateway says nothing; the count is kept within its bounds.")
    if count == 0:
        return Change(ScalingCause.IDLE, f"No request for {spec.scaling.idle_seconds} s.")
    each = spec.scaling.target_in_flight_per_replica
    return Change(
        ScalingCause.IN_FLIGHT, f"{demand.total} requests in flight or waiting, {each} per replica."
    )
