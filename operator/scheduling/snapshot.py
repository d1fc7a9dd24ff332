"""The scheduler's Snapshot from objects, pods and nodes; ``builder.py`` makes it and keeps it in step.

The operator is the only one who builds it: the API asks the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from busbar.kube.informer import Key
from busbar.kube.types import (
    AcceleratorPool,
    ModelService,
    PerformanceProfile,
    PowerDomain,
    Tenant,
    TrainingJob,
)
from busbar.operator.accounting.usage import HALF_LIFE_S
from busbar.operator.profiles.table import knows
from busbar.operator.queue.controller import Item
from busbar.operator.scheduling.builder import (
    DOMAIN,
    JOB,
    NODE,
    POD,
    POOL,
    PROFILE,
    SERVICE,
    TENANT,
    SnapshotBuilder,
)
from busbar.operator.scheduling.orders import NOTHING, Ordered
from busbar.operator.serving import claims as serving
from busbar.operator.training import claim as training
from busbar.operator.watch.caches import Caches, tenant_of_namespace
from busbar.operator.watch.projections import Node, Pod
from busbar.scheduler import Job, JobId, Snapshot

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
    domains: tuple[PowerDomain, ...] = ()
    volume_claims: frozenset[Key] | None = None
    """PersistentVolumeClaims that exist; None: not known."""
    telling: frozenset[str] = frozenset()
    """Nodes of which it is known which pods hold which board."""

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
            tuple(caches.power_domains.items.values()),
            frozenset(caches.volume_claims.items),
            caches.telling,
        )

    def all(self) -> Iterator[tuple[str, Key, Any]]:
        """Each with its kind and key."""
        for pod in self.pods:
            yield POD, pod.key, pod
        for node in self.nodes:
            yield NODE, Key("", node.name), node
        of_kind = {
            JOB: self.jobs, SERVICE: self.services, POOL: self.pools, TENANT: self.tenants, PROFILE: self.profiles,
            DOMAIN: self.domains,
        }  # fmt: skip
        for kind, objects in of_kind.items():
            for obj in objects:
                yield kind, Key(obj.metadata.namespace or "", obj.metadata.name), obj


def builder_of(seen: ClusterObjects, half_life_s: float = HALF_LIFE_S) -> SnapshotBuilder:
    """A builder that knows these objects."""
    builder = SnapshotBuilder(half_life_s)
    for kind, key, obj in seen.all():
        builder.put(kind, key, obj)
    builder.tell_boards(seen.telling)
    return builder


def build(
    seen: ClusterObjects,
    now: datetime,
    draft: Draft | None = None,
    half_life_s: float = HALF_LIFE_S,
    orders: Mapping[Item, Ordered] = NOTHING,
) -> Snapshot:
    """The snapshot at ``now``, with the orders in flight carried out; a draft is added as waiting jobs (`is_draft`)."""
    builder = builder_of(seen, half_life_s)
    builder.follow_orders(orders)
    made = builder.snapshot(now)
    if draft is None:
        return made
    added = _draft_jobs(draft, seen, builder.tenant_of, now)
    table = builder.table_with((draft,)) if isinstance(draft, TrainingJob) else made.table
    return replace(made, jobs=tuple(sorted((*made.jobs, *added), key=lambda j: j.id)), table=table)


def with_draft(
    base: Snapshot, seen: ClusterObjects, draft: Draft, now: datetime
) -> tuple[Snapshot, tuple[Job, ...]]:
    """A snapshot without the draft, whose table covers the draft's class, and the draft's jobs: one, or the replicas that a
    service would begin with.

    The base is returned as it is if its table covers the class; otherwise the table is made anew.
    """
    if isinstance(draft, TrainingJob) and not knows(base.table, draft, seen.pools):
        whole = build(seen, now, draft)
        return replace(base, table=whole.table), tuple(job for job in whole.jobs if is_draft(job.id))
    owners = tenant_of_namespace(seen.tenants)
    return base, _draft_jobs(draft, seen, lambda namespace: owners.get(namespace, ""), now)


def is_draft(job: JobId) -> bool:
    """Whether it is a draft's job: that of a TrainingJob, or a replica of a service."""
    return job == DRAFT or job.startswith(f"{DRAFT}/")


def _draft_jobs(
    draft: Draft, seen: ClusterObjects, tenant_of: Callable[[str], str], now: datetime
) -> tuple[Job, ...]:
    tenant = tenant_of(draft.metadata.namespace or "")
    if isinstance(draft, TrainingJob):
        return (replace(training.waiting(draft, tenant, now), id=DRAFT),)
    replicas = serving.first_replicas(draft, seen.jobs, tenant, now, seen.pools)
    return tuple(replace(job, id=JobId(f"{DRAFT}/{i}") if i else DRAFT) for i, job in enumerate(replicas))
