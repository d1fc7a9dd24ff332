"""Which of a service's replicas stay, and which numbers and types those that are missing get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types import ModelService
from busbar.kube.types.service_status import PoolReplicas
from busbar.operator.accounting.budgets import Hold
from busbar.operator.pods.replica_pods import FIRST_DECODE
from busbar.operator.watch.projections import Pod


def kept_pods(
    service: ModelService, pods: Iterable[Pod], readings: Mapping[str, ServingStatus] | None = None
) -> list[Pod]:
    """The replicas to keep, at most as many as are desired: those in the pools where they are wanted, of these the
    ones that serve first, then those with most to move, then the oldest. One that sleeps (it wakes then) is kept only after
    all that do not. Those that compute prompts for the others go before these. One whose node does not answer is not among
    them, so another starts beside it; if the node answers again before it is given up, the one that serves first is kept.

    Args:
        readings: what the replicas said last, by uid; None: which replicas leave does not matter, only how many and where.
    """
    status = service.status
    desired = (status.desired_replicas if status is not None else None) or 0
    alive = [p for p in pods if p.stays]
    divided = service.spec.prefill_replicas is not None
    work = {uid: to_move(reading) for uid, reading in (readings or {}).items()}
    alive.sort(
        key=lambda p: (
            divided and p.rank >= FIRST_DECODE,
            p.parked,
            not p.takes_requests,
            p.gated,
            -work.get(p.uid, 0),
            p.rank,
        )
    )
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
    if is_pinned(service):  # the others stay until those in the right pools serve
        return [*wanted, *others[: max(0, desired - sum(p.takes_requests for p in wanted))]]
    return [*wanted, *others][:desired]


def to_move(reading: ServingStatus) -> int:
    """Tokens of context that a replica must move to others, or end with, if it leaves: a token at least for each request."""
    report = reading.report
    block_tokens = max(report.kv_block_tokens, 1) if report is not None else 1
    used = max(0, reading.kv_blocks_total - reading.kv_blocks_free) * block_tokens
    return max(used, reading.running + reading.waiting)


def is_pinned(service: ModelService) -> bool:
    """Whether replicas in other pools than those wanted are replaced, and not only the missing ones made there."""
    scaling = service.spec.scaling
    return (bool(scaling.external) or scaling.min_zones is not None) and any(
        row.desired for row in (service.status.pools if service.status is not None else None) or ()
    )


def _in_wrong_pools(service: ModelService, kept: Iterable[Pod]) -> int:
    """How many of the kept replicas stay only until those in the right pools serve."""
    if not is_pinned(service):
        return 0
    held = Counter(pod.pool for pod in kept)
    rows = (service.status.pools if service.status is not None else None) or ()
    return held.total() - sum(min(held[row.pool], row.desired or 0) for row in rows)


def wanted_indexes(service: ModelService, pods: Iterable[Pod]) -> list[int]:
    """The replica numbers that should exist: those kept, and the lowest free ones for what is missing. Where some compute prompts for
    the others, each of both has numbers of its own."""
    pods = tuple(pods)
    desired = (service.status.desired_replicas if service.status is not None else None) or 0
    stay = kept_pods(service, pods)
    kept, extra = [p.rank for p in stay], _in_wrong_pools(service, stay)
    taken = {p.rank for p in pods}
    prefill = min(service.spec.prefill_replicas or 0, max(0, desired - 1))
    while len(kept) < desired + extra:
        lacks = prefill > sum(rank < FIRST_DECODE for rank in kept)
        index = 0 if lacks or not prefill else FIRST_DECODE
        while index in taken:
            index += 1
        kept.append(index)
        taken.add(index)
    return sorted(kept)


def wanted_places(service: ModelService, pods: Iterable[Pod]) -> list[PoolReplicas]:
    """The rows of the status for the replicas that are missing, in the order of their numbers, where the latency target or an
    external target chose their pools. There may be fewer of them than missing replicas: those others may have any type."""
    held: dict[str, int] = {}
    for pod in kept_pods(service, pods):
        held[pod.pool] = held.get(pod.pool, 0) + 1
    rows = (service.status.pools if service.status is not None else None) or ()
    return [
        row
        for row in rows
        if row.accelerator or is_pinned(service)
        for _ in range((row.desired or 0) - held.get(row.pool, 0))
    ]


def startable(service: ModelService, pods: Iterable[Pod], budget: Hold) -> int:
    """How many replicas may be started although the tenant's budget is spent: those that `minReplicas` lacks, unless the
    budget stops what runs."""
    if budget.stops:
        return 0
    return max(0, service.spec.min_replicas - len(kept_pods(service, pods)))
