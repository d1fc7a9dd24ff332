"""Builds the scheduler's Snapshot from objects, pods and nodes. It is the only builder: the API asks the operator.

A job of the snapshot is a TrainingJob, one replica of a ModelService, or one opted-in pod of another controller.
What such a job uses is counted once, through its ``run``. A pod of ours whose owner is gone is a job too, of
the tenant of its namespace, until it is deleted (pods/orphans.py). The requests of every other pod that is bound
to a node are subtracted from that node's capacity.

Each kind translates itself: training/claim.py, serving/claims.py, pods/foreign_pods.py, pods/orphans.py and
pools/nodes.py. This module only composes their results.

Units are the scheduler's (``busbar.scheduler.model.snapshot``): thousandths of an accelerator, millicores, MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile, Tenant, TrainingJob
from busbar.operator.accounting.usage import HALF_LIFE_S, scheduler_tenant
from busbar.operator.pods import foreign_pods, orphans
from busbar.operator.pods.claims import Claim
from busbar.operator.pools.nodes import scheduler_nodes, scheduler_pool
from busbar.operator.profiles.table import knows, performance_table
from busbar.operator.serving import claims as serving
from busbar.operator.training import claim as training
from busbar.operator.watch.caches import Caches, tenant_of_namespace
from busbar.operator.watch.projections import Node, Pod
from busbar.scheduler import Job, JobId, Reservation, Snapshot

DRAFT = JobId("draft")
Draft = TrainingJob | ModelService
"""An object that has not been created yet."""


@dataclass(frozen=True)
class ClusterObjects:
    """The objects that a snapshot is made from; plain mappings, so that tests need no server."""

    jobs: tuple[TrainingJob, ...] = ()
    services: tuple[ModelService, ...] = ()
    pools: tuple[AcceleratorPool, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    nodes: tuple[Node, ...] = ()
    pods: tuple[Pod, ...] = ()
    profiles: tuple[PerformanceProfile, ...] = ()

    @classmethod
    def of(cls, caches: Caches) -> ClusterObjects:
        return cls(
            tuple(caches.jobs.items.values()),
            tuple(caches.services.items.values()),
            tuple(caches.pools.items.values()),
            tuple(caches.tenants.items.values()),
            tuple(caches.nodes.items.values()),
            tuple(caches.pods.items.values()),
            tuple(caches.profiles.items.values()),
        )


def build(
    seen: ClusterObjects,
    now: datetime,
    draft: Draft | None = None,
    half_life_s: float = HALF_LIFE_S,
) -> Snapshot:
    """The snapshot at ``now``; a draft is added as a waiting job with the id ``draft``."""
    tenant_of = tenant_of_namespace(seen.tenants)
    claims = list(_claims(seen, now, tenant_of))
    counted = frozenset[str]().union(*(claim.pods for claim in claims))
    jobs = [claim.job for claim in claims]
    if draft is not None:
        jobs.append(_draft_job(draft, tenant_of, now))
    nodes = scheduler_nodes(seen.nodes, seen.pools, (pod for pod in seen.pods if pod.uid not in counted))
    return Snapshot(
        pools=tuple(scheduler_pool(p) for p in sorted(seen.pools, key=lambda p: p.metadata.name)),
        nodes=tuple(sorted(nodes, key=lambda n: n.name)),
        tenants=tuple(
            scheduler_tenant(t, now, half_life_s) for t in sorted(seen.tenants, key=lambda t: t.metadata.name)
        ),
        jobs=tuple(sorted(jobs, key=lambda j: j.id)),
        reservations=_reservations(claims),
        table=performance_table(
            (*seen.jobs, draft) if isinstance(draft, TrainingJob) else seen.jobs,
            seen.pools,
            tenant_of,
            seen.profiles,
            seen.tenants,
        ),
    )


def with_draft(base: Snapshot, seen: ClusterObjects, draft: Draft, now: datetime) -> tuple[Snapshot, Job]:
    """A snapshot without the draft, whose table covers the draft's class, and the draft's job.

    The base is returned as it is if its table covers the class; otherwise the table is made anew.
    """
    if isinstance(draft, TrainingJob) and not knows(base.table, draft, seen.pools):
        whole = build(seen, now, draft)
        job = next(job for job in whole.jobs if job.id == DRAFT)
        return replace(base, table=whole.table), job
    return base, _draft_job(draft, tenant_of_namespace(seen.tenants), now)


def _draft_job(draft: Draft, tenant_of: Mapping[str, str], now: datetime) -> Job:
    tenant = tenant_of.get(draft.metadata.namespace or "", "")
    waits = (
        training.waiting(draft, tenant, now)
        if isinstance(draft, TrainingJob)
        else serving.replica(draft, 0, tenant, now)
    )
    return replace(waits, id=DRAFT)


def _reservations(claims: Iterable[Claim]) -> tuple[Reservation, ...]:
    """The places that statuses say are collected, in order of precedence: earlier ones first, then priorities.

    The scheduler drops those that do not fit any more (a pool is gone, the job has another size).
    """
    found = [(claim.job, claim.reservation) for claim in claims if claim.reservation is not None]
    found.sort(key=lambda each: (min(each[1].since_s), -each[0].priority, each[0].submitted_at_s, each[0].id))
    return tuple(reservation for _, reservation in found)


def _claims(seen: ClusterObjects, now: datetime, tenant_of: Mapping[str, str]) -> Iterator[Claim]:
    """All jobs of the snapshot, kind by kind."""
    pods_of: dict[str, list[Pod]] = {}
    for pod in seen.pods:
        if pod.owner_uid:
            pods_of.setdefault(pod.owner_uid, []).append(pod)
    for job in seen.jobs:
        owned, tenant = (
            tuple(pods_of.get(job.metadata.uid, ())),
            tenant_of.get(job.metadata.namespace or "", ""),
        )
        if (found := training.claim(job, owned, tenant, now)) is not None:
            yield found
    for service in seen.services:
        owned = tuple(pods_of.get(service.metadata.uid, ()))
        tenant = tenant_of.get(service.metadata.namespace or "", "")
        yield from serving.claims(service, owned, seen.jobs, tenant, now)
    owners = {obj.metadata.uid for obj in (*seen.jobs, *seen.services)}
    for pod in seen.pods:
        tenant = tenant_of.get(pod.key.namespace, "")
        if foreign_pods.is_claim(pod) and not pod.ended:
            single = foreign_pods.claim(pod, tenant, seen.nodes, seen.pools, now)
        elif pod.owner_uid not in owners:
            single = orphans.claim(pod, tenant, seen.nodes, seen.pools, now)
        else:
            continue
        if single is not None:
            yield single
