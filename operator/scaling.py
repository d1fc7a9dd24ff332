"""How many replicas a service should have now: where the autoscaler's answer meets the object.

``spec.suspend`` is the real off. ``spec.replicas`` present is an external target; with ``minReplicas: 0`` and a
target of 0, a request that the gateway holds wakes one replica, and only ``status.desiredReplicas`` rises; after
``idleSeconds`` without a request it falls again. ``spec.replicas`` absent: ``busbar.scheduler.autoscale`` decides
between min and max. Without word from the gateway nothing is scaled down.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.types import ModelService
from busbar.kube.types.model_service import ModelServiceStatus


def desired_replicas(
    service: ModelService,
    old: ModelServiceStatus,
    demand: ServiceDemand | None,
    now: datetime,
    *,
    has_model: bool,
) -> tuple[int, str]:
    """The count, and a sentence why (for the scaling history)."""
    spec = service.spec
    if spec.suspend:
        return 0, "The service is suspended."
    if not has_model:
        return 0, "There are no weights to serve yet."
    if spec.replicas is not None and spec.replicas > 0:
        return spec.replicas, f"spec.replicas is {spec.replicas}."
    waiting = demand.waiting if demand is not None else 0
    if spec.replicas == 0:
        return _target_zero(service, old, demand, now, waiting)
    return _automatic(service, old, demand, now, waiting)


def _target_zero(
    service: ModelService, old: ModelServiceStatus, demand: ServiceDemand | None, now: datetime, waiting: int
) -> tuple[int, str]:
    """Zero was asked for from outside; a held request may wake one replica where that is allowed."""
    fresh = old.observed_generation == service.metadata.generation
    awake = fresh and (old.desired_replicas or 0) == 1
    if service.spec.min_replicas > 0:
        return 0, "spec.replicas is 0."
    if awake and (demand is None or waiting or not _idle(service, old, demand, now)):
        return 1, "A request woke the service."
    if fresh and waiting:
        return 1, f"{waiting} requests wait at the gateway."
    return 0, "spec.replicas is 0."


def _automatic(
    service: ModelService, old: ModelServiceStatus, demand: ServiceDemand | None, now: datetime, waiting: int
) -> tuple[int, str]:
    spec = service.spec
    floor, ceiling = spec.min_replicas, spec.replica_ceiling
    current = old.desired_replicas
    if demand is None:
        # Blind: keep what is, within the bounds.
        start = current if current is not None else max(floor, 1)
        return min(ceiling, max(floor, start)), "The gateway says nothing; the count is kept."
    load = waiting + demand.in_flight
    target = spec.scaling.target_in_flight_per_replica
    wanted = -(-load // target)
    if current is None:
        return min(ceiling, max(floor, wanted, 1)), "The service is new."
    if wanted > current:
        count = min(ceiling, max(floor, wanted))
        return count, f"{load} requests in flight or waiting, {target} per replica."
    if floor == 0 and _idle(service, old, demand, now) and not load:
        return 0, f"No request for {spec.scaling.idle_seconds} s."
    if current > max(floor, wanted, 1) and _settled(old, now, spec.scaling.idle_seconds):
        return max(
            floor, wanted, 1, current - 1
        ), f"{load} requests in flight or waiting, {target} per replica."
    return min(ceiling, max(floor, current)), "Demand fits the present count."


def _idle(service: ModelService, old: ModelServiceStatus, demand: ServiceDemand, now: datetime) -> bool:
    """Whether no request has come for ``idleSeconds``; counted from the last scaling where none ever came."""
    limit = timedelta(seconds=service.spec.scaling.idle_seconds)
    age = demand.last_request_age_seconds
    moments = [now - timedelta(seconds=age)] if age is not None else []
    if old.last_request_time is not None:
        moments.append(old.last_request_time)
    if old.scaling_history:
        moments.append(old.scaling_history[-1].time)
    if not moments and service.metadata.creation_timestamp is not None:
        moments.append(service.metadata.creation_timestamp)
    return bool(moments) and now - max(moments) >= limit and demand.in_flight == 0 and demand.waiting == 0


def _settled(old: ModelServiceStatus, now: datetime, idle_s: int) -> bool:
    """Slow down: one replica at a time, and not sooner than this after the last change."""
    last = old.scaling_history[-1].time if old.scaling_history else None
    return last is None or now - last >= timedelta(seconds=min(60, idle_s))
