"""From objects, pods and nodes to the scheduler's Snapshot: the only builder there is (the API asks for it).

A job of the snapshot is a TrainingJob, one replica of a ModelService, or one opted-in pod of another controller.
What such a job holds is counted once, through its ``run``; every other pod that is bound to a node, whoever
made it, is taken off that node's capacity.

Units are the scheduler's (``busbar.scheduler.types``): thousandths of an accelerator, millicores, MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from busbar.kube.types import (
    AcceleratorPool,
    ModelService,
    PerformanceProfile,
    Tenant,
    TrainingJob,
    quantity,
)
from busbar.kube.types.meta import ANNOTATION_REQUESTER
from busbar.kube.types.shape import Domain, PodShape
from busbar.kube.types.training_job import TERMINAL_PHASES
from busbar.operator.job_view import is_managed, leftovers, placement_of
from busbar.operator.modelservice import model_uri, place_of, wanted_indexes
from busbar.operator.optin import is_claim
from busbar.operator.pods import HOSTNAME, Node, Pod, Requests
from busbar.operator.podspec import memory_mib
from busbar.operator.table import performance_table, workload
from busbar.operator.usage import HALF_LIFE_S, scheduler_tenant
from busbar.operator.world import World, tenant_of_namespace
from busbar.scheduler import (
    Job,
    JobId,
    JobKind,
    Placement,
    Pool,
    Resources,
    Run,
    Snapshot,
    Taint,
    Toleration,
)
from busbar.scheduler import Node as SNode

TOPOLOGY: Mapping[Domain, tuple[str, ...]] = {
    Domain.ZONE: ("topology.kubernetes.io/zone",),
    Domain.NETWORK: ("busbar.dev/network",),
    Domain.RACK: ("topology.kubernetes.io/rack", "network.topology.nvidia.com/leaf"),
    Domain.NVLINK: ("network.topology.nvidia.com/accelerator", "nvidia.com/gpu.clique"),
}
"""The tree of domains, outermost first, and the node labels that name each; the first label found counts. The node
itself is the innermost. Of a level without a label the node stands in no domain."""
DRAFT = JobId("draft")


@dataclass(frozen=True)
class Seen:
    """The part of the world that a snapshot is made from; plain mappings, so that tests need no server."""

    jobs: tuple[TrainingJob, ...] = ()
    services: tuple[ModelService, ...] = ()
    pools: tuple[AcceleratorPool, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    nodes: tuple[Node, ...] = ()
    pods: tuple[Pod, ...] = ()
    profiles: tuple[PerformanceProfile, ...] = ()

    @classmethod
    def of(cls, world: World) -> Seen:
        return cls(
            tuple(world.jobs.items.values()),
            tuple(world.services.items.values()),
            tuple(world.pools.items.values()),
            tuple(world.tenants.items.values()),
            tuple(world.nodes.items.values()),
            tuple(world.pods.items.values()),
            tuple(world.profiles.items.values()),
        )


@dataclass
class _Building:
    """What is shared while one snapshot is built."""

    seen: Seen
    now: datetime
    tenant_of: Mapping[str, str]
    pods_of: Mapping[str, list[Pod]]  # by owner uid
    counted: set[str] = field(default_factory=set)  # uids of pods that a job's run stands for


def build(
    seen: Seen,
    now: datetime,
    draft: TrainingJob | ModelService | None = None,
    half_life_s: float = HALF_LIFE_S,
) -> Snapshot:
    """The snapshot at ``now``; a draft is added as a waiting job with the id ``draft``."""
    pods_of: dict[str, list[Pod]] = {}
    for pod in seen.pods:
        if pod.owner_uid:
            pods_of.setdefault(pod.owner_uid, []).append(pod)
    b = _Building(seen, now, tenant_of_namespace(seen.tenants), pods_of)
    jobs = [job for obj in seen.jobs if (job := _training(b, obj)) is not None]
    for service in seen.services:
        jobs += _replicas(b, service)
    theirs = (_opted_in(b, pod) for pod in seen.pods if is_claim(pod) and not pod.ended)
    jobs += [job for job in theirs if job is not None]
    if isinstance(draft, TrainingJob):
        jobs.append(replace(_training_shape(b, draft), id=DRAFT))
    elif isinstance(draft, ModelService):
        jobs.append(replace(_replica_shape(b, draft, 0), id=DRAFT))
    nodes = _nodes(b)
    return Snapshot(
        pools=tuple(_pool(p) for p in sorted(seen.pools, key=lambda p: p.metadata.name)),
        nodes=tuple(sorted(nodes, key=lambda n: n.name)),
        tenants=tuple(
            scheduler_tenant(t, now, half_life_s) for t in sorted(seen.tenants, key=lambda t: t.metadata.name)
        ),
        jobs=tuple(sorted(jobs, key=lambda j: j.id)),
        table=performance_table(
            (*seen.jobs, draft) if isinstance(draft, TrainingJob) else seen.jobs,
            seen.pools,
            b.tenant_of,
            seen.profiles,
            seen.tenants,
        ),
    )


def unit_m(pool: AcceleratorPool) -> int:
    """Millicores of one accelerator of a CPU pool."""
    return max(1, quantity.to_millis(pool.spec.unit)) if pool.spec.resource_name == "cpu" else 1000


# -- pools, nodes, tenants -----------------------------------------------------------------------------


def pool_of_node(node: Node, pools: Iterable[AcceleratorPool]) -> AcceleratorPool | None:
    """The pool a node belongs to: of those that select it, the most specific, then the first by name."""
    labels = set(node.labels)
    matching = [p for p in pools if set(p.spec.node_selector.items()) <= labels]
    return min(matching, key=lambda p: (-len(p.spec.node_selector), p.metadata.name), default=None)


def _pool(pool: AcceleratorPool) -> Pool:
    spec = pool.spec
    reserved = spec.reserved or {}
    cpu_m = quantity.to_millis(reserved.get("cpu", 0))
    is_cpu = spec.resource_name == "cpu"
    kept = Resources(
        accelerators_m=0 if is_cpu else quantity.to_millis(reserved.get(spec.resource_name, 0)),
        cpu_m=cpu_m,
        memory_mib=memory_mib(reserved.get("memory")),
        ephemeral_mib=memory_mib(reserved.get("ephemeral-storage")),
    )
    return Pool(
        name=pool.metadata.name,
        accelerator=spec.accelerator,
        resource_name=spec.resource_name,
        tenants=tuple(spec.tenants) if spec.tenants is not None else None,
        tolerations=tuple(
            Toleration(t.key, str(t.operator), t.value or "", str(t.effect or ""))
            for t in spec.tolerations or ()
        ),
        memory_mib=0 if is_cpu else round((spec.memory_gib or 0.0) * 1024),
        price_per_hour=spec.price_per_hour,
        reserved=kept,
        unit_m=unit_m(pool),
    )


def _nodes(b: _Building) -> list[SNode]:
    used: dict[str, list[Requests]] = {}
    for pod in b.seen.pods:
        if pod.place and not pod.ended and pod.uid not in b.counted:
            used.setdefault(pod.place, []).append(pod.requests)
    result: list[SNode] = []
    for node in b.seen.nodes:
        pool = pool_of_node(node, b.seen.pools)
        if pool is None:
            continue
        others = used.get(node.name, [])
        name = pool.spec.resource_name
        devices = node.device(name) - sum(r.device(name) for r in others)
        capacity = Resources(
            accelerators_m=0 if name == "cpu" else max(0, devices) * 1000,
            cpu_m=max(0, node.cpu_m - sum(r.cpu_m for r in others)),
            memory_mib=max(0, node.memory_mib - sum(r.memory_mib for r in others)),
            ephemeral_mib=max(0, node.ephemeral_mib - sum(r.ephemeral_mib for r in others)),
        )
        labels = dict(node.labels)
        result.append(
            SNode(
                name=node.name,
                pool=pool.metadata.name,
                capacity=capacity,
                labels=node.labels,
                taints=tuple(Taint(*t) for t in node.taints),
                topology=tuple(
                    next((labels[k] for k in keys if k in labels), "") for keys in TOPOLOGY.values()
                ),
                ready=node.ready,
            )
        )
    return result


# -- jobs ----------------------------------------------------------------------------------------------


def _training(b: _Building, obj: TrainingJob) -> Job | None:
    status = obj.status
    pods = tuple(b.pods_of.get(obj.metadata.uid, ()))
    if status is not None and status.phase in TERMINAL_PHASES:
        return None
    if status is None or status.admission is None:
        waits = is_managed(obj) and not obj.spec.suspend
        retry_at = status.retry_at if status is not None else None
        if not waits or (retry_at is not None and retry_at > b.now):
            return None
        if status is not None and leftovers(status, pods):
            return None
        return _training_shape(b, obj)
    for pod in pods:
        if pod.attempt == (status.attempt or 0):
            b.counted.add(pod.uid)
    admission = status.admission
    placement = placement_of(admission)
    started = admission.admitted_at or b.now
    saved = status.checkpoint.saved_at if status.checkpoint is not None else None
    run = Run(
        placement=placement,
        started_at_s=started.timestamp(),
        saved_at_s=saved.timestamp() if saved is not None and saved >= started else None,
        releasing=status.release is not None or obj.metadata.deletion_timestamp is not None,
    )
    return replace(_training_shape(b, obj), run=run)


def _training_shape(b: _Building, obj: TrainingJob) -> Job:
    spec, meta, status = obj.spec, obj.metadata, obj.status
    load = workload(obj)
    progress = status.progress if status is not None else None
    return Job(
        id=JobId(meta.uid or "draft"),
        name=meta.name,
        namespace=meta.namespace or "",
        tenant=b.tenant_of.get(meta.namespace or "", ""),
        kind=JobKind.TRAINING if spec.engine is not None else JobKind.OPAQUE,
        user=meta.annotations.get(ANNOTATION_REQUESTER, ""),
        workload_class=load.workload_class,
        min_pods=spec.shape.min_pods,
        # Rigid for now: a gang starts at the size it can get, and keeps it.
        max_pods=spec.shape.max_pods,
        required_domain=None if spec.shape.within is None else list(Domain).index(spec.shape.within) + 1,
        per_pod=_per_pod(spec.shape),
        accelerators=tuple(spec.accelerators or ()),
        modes=load.modes,
        priority=spec.priority,
        preemptible=spec.preemptible,
        submitted_at_s=(meta.creation_timestamp or b.now).timestamp(),
        remaining_work=load.remaining(progress.step if progress is not None else 0),
        attained_s=status.usage.work_units if status is not None and status.usage is not None else 0.0,
        preemptions=(status.preemptions or 0) if status is not None else 0,
        last_move_at_s=status.last_move_time.timestamp()
        if status is not None and status.last_move_time
        else None,
    )


def _replicas(b: _Building, service: ModelService) -> list[Job]:
    """One job per replica that exists or is wanted."""
    pods = tuple(b.pods_of.get(service.metadata.uid, ()))
    jobs: list[Job] = []
    for pod in pods:
        place = place_of(pod)
        if pod.ended or place is None:
            continue
        b.counted.add(pod.uid)
        run = Run(
            placement=place,
            started_at_s=(pod.created_at or b.now).timestamp(),
            releasing=pod.deleting or pod.draining_since is not None,
        )
        jobs.append(replace(_replica_shape(b, service, pod.rank), run=run))
    if service.metadata.deletion_timestamp is None and model_uri(service, b.seen.jobs).uri:
        held = {p.rank for p in pods}
        jobs += [_replica_shape(b, service, i) for i in wanted_indexes(service, pods) if i not in held]
    return jobs


def _replica_shape(b: _Building, service: ModelService, index: int) -> Job:
    spec, meta = service.spec, service.metadata
    return Job(
        id=replica_id(service, index),
        name=f"{meta.name}-{index}",
        namespace=meta.namespace or "",
        tenant=b.tenant_of.get(meta.namespace or "", ""),
        kind=JobKind.SERVING,
        user=meta.annotations.get(ANNOTATION_REQUESTER, ""),
        per_pod=_per_pod(spec.shape),
        accelerators=tuple(spec.accelerators or ()),
        priority=spec.priority,
        preemptible=False,
        submitted_at_s=(meta.creation_timestamp or b.now).timestamp(),
        reclaim_deadline_s=float(spec.drain_seconds),
        service=f"{meta.namespace}/{meta.name}",
    )


def replica_id(service: ModelService, index: int) -> JobId:
    return JobId(f"{service.metadata.uid}/{index}")


def _per_pod(shape: PodShape) -> Resources:
    return Resources(
        accelerators_m=shape.accelerators_per_pod * 1000,
        cpu_m=quantity.to_millis(shape.cpu) if shape.cpu is not None else 0,
        memory_mib=memory_mib(shape.memory),
        ephemeral_mib=memory_mib(shape.ephemeral_storage),
    )


def _opted_in(b: _Building, pod: Pod) -> Job | None:
    """A pod of another controller that asked to be queued: waiting while gated, running once it is not.

    One that was let go, and whose node or pool is gone since, is no job: it waits for nothing that a plan gives.
    """
    devices = [(name, count) for name, count in pod.requests.devices if count]
    pools = sorted((p for p in b.seen.pools if _serves(p, devices)), key=lambda p: p.metadata.name)
    count_m = devices[0][1] * 1000 if devices else 0
    if not devices and pools:
        count_m = pod.requests.cpu_m * 1000 // unit_m(pools[0])
    per_pod = Resources(count_m, pod.requests.cpu_m, pod.requests.memory_mib, pod.requests.ephemeral_mib)
    job = Job(
        id=JobId(pod.uid),
        name=pod.key.name,
        namespace=pod.key.namespace,
        tenant=b.tenant_of.get(pod.key.namespace, ""),
        kind=JobKind.OPAQUE,
        per_pod=per_pod,
        # "-": a device that no pool offers, so the waiting record can say so.
        pools=tuple(p.metadata.name for p in pools) or ("-",),
        node_selector=pod.node_selector,
        tolerations=tuple(Toleration(*t) for t in pod.tolerations),
        preemptible=False,
        submitted_at_s=(pod.created_at or b.now).timestamp(),
    )
    node = next((n for n in b.seen.nodes if pod.place in (n.name, dict(n.labels).get(HOSTNAME))), None)
    pool = pool_of_node(node, b.seen.pools) if node is not None else None
    if pod.gated:
        return job if not pod.deleting else None
    if pool is None:
        return None
    b.counted.add(pod.uid)
    assert node is not None
    placement = Placement(pool.metadata.name, pool.spec.accelerator, "resident", (node.name,), per_pod)
    started = (pod.created_at or b.now).timestamp()
    return replace(job, run=Run(placement=placement, started_at_s=started, releasing=pod.deleting))


def _serves(pool: AcceleratorPool, devices: list[tuple[str, int]]) -> bool:
    name = pool.spec.resource_name
    return name == "cpu" if not devices else len(devices) == 1 and devices[0][0] == name
