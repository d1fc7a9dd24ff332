"""Which of a service's replicas stay, and which numbers and types those that are missing get."""

from __future__ import annotations

import json
from collections.abc import Iterable

from busbar.kube.types import ModelService
from busbar.operator.accounting.budgets import Hold
from busbar.operator.watch.projections import Pod
from busbar.scheduler import Placement, Resources


def kept_pods(service: ModelService, pods: Iterable[Pod]) -> list[Pod]:
    """The replicas to keep, at most as many as are desired: those in the pools where they are wanted, of these the
    ones that serve first, then the oldest. One that sleeps (it wakes then) is kept only after all that do not."""
    status = service.status
    desired = (status.desired_replicas if status is not None else None) or 0
    alive = [p for p in pods if not p.leaving]
    alive.sort(key=lambda p: (p.parked, not p.takes_requests, p.gated, p.rank))
    room = {
        row.pool: row.desired for row in (status.pools if status is not None else None) or () if row.desired
    }
    wanted: list[Pod] = []
    for pod in alive:
        if room.get(pod.pool, 0) > 0 and not pod.parked:
            room[pod.pool] -= 1
            wanted.append(pod)
    first = {pod.uid for pod in wanted}
    others = [p for p in alive if p.uid not in first]
    others.sort(key=lambda p: (p.parked, p.parked and room.get(p.pool, 0) <= 0))
    return [*wanted, *others][:desired]


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


def startable(service: ModelService, pods: Iterable[Pod], budget: Hold) -> int:
    """How many replicas may be started although the tenant's budget is spent: those that `minReplicas` lacks, unless the
    budget stops what runs."""
    if budget.stops:
        return 0
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
