"""A TrainingJob as a job of the scheduler's snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType

from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob, quantity
from busbar.kube.types.meta import ANNOTATION_REQUESTER
from busbar.kube.types.shape import Domain
from busbar.kube.types.training_job import TrainingJobSpec
from busbar.kube.types.training_status import TERMINAL_PHASES
from busbar.operator.accounting.budgets import FREE, Hold
from busbar.operator.pods.claims import Claim, per_pod
from busbar.operator.pods.volume_claims import lacks_claims
from busbar.operator.profiles.table import Workload, workload
from busbar.operator.training.deadline import promised
from busbar.operator.training.reservation import reservation_of
from busbar.operator.training.substitute import lost_part
from busbar.operator.training.view import is_held, is_managed, leftovers, placement_of, without_node
from busbar.operator.watch.projections import Node, Pod
from busbar.scheduler import Job, JobId, JobKind, Resources, Run
from busbar.scheduler.fit.memory import copies_mib

OTHER_FILES_MIB = 1024
"""Temporary files and logs of a pod that says nothing of them, beside the state that its engine puts on disk."""


def claims(
    obj: TrainingJob,
    pods: tuple[Pod, ...],
    tenant: str,
    now: datetime,
    budget: Hold = FREE,
    nodes: Mapping[Key, Node] = MappingProxyType({}),
    load: Workload | None = None,
) -> tuple[Claim, ...]:
    """The job in the snapshot; nothing if it holds nothing and may not start. Lost pods of a gang that goes on without them
    are a job of their own there, which waits.

    Args:
        pods: those that the object owns.
        budget: what its tenant's budgets do to it.
        nodes: all of the cluster.
        load: what the spec asks for, if that is known already.
    """
    whole = _claim(obj, pods, tenant, now, budget, load)
    if whole is None:
        return ()
    admission = obj.status.admission if obj.status is not None else None
    lost = frozenset(without_node(admission)) if admission is not None else frozenset()
    if admission is None or whole.job.run is None or not lost:
        return (whole,)
    staying = tuple(node for rank, node in enumerate(admission.nodes) if rank not in lost)
    run = replace(whole.job.run, placement=replace(whole.job.run.placement, nodes=staying))
    others = replace(whole.job, min_pods=len(staying), max_pods=len(staying), run=run)
    part = None if run.releasing else lost_part(obj, whole.job, admission, nodes)
    return (replace(whole, job=others), *(() if part is None else (Claim(part),)))


def _claim(
    obj: TrainingJob,
    pods: tuple[Pod, ...],
    tenant: str,
    now: datetime,
    budget: Hold,
    load: Workload | None,
) -> Claim | None:
    status = obj.status
    if status is not None and status.phase in TERMINAL_PHASES:
        return None
    if status is None or status.admission is None:
        waits = is_managed(obj) and not obj.spec.suspend
        retry_at = status.retry_at if status is not None else None
        if not waits or (retry_at is not None and retry_at > now) or is_held(obj, budget):
            return None
        if lacks_claims(status):
            return None
        if status is not None and leftovers(status, pods):
            return None
        return Claim(waiting(obj, tenant, now, load), reservation=reservation_of(obj))
    admission = status.admission
    placement = placement_of(admission)
    started = admission.admitted_at or now
    saved = status.checkpoint.saved_at if status.checkpoint is not None else None
    run = Run(
        placement=placement,
        started_at_s=started.timestamp(),
        saved_at_s=saved.timestamp() if saved is not None and saved >= started else None,
        releasing=status.release is not None or obj.metadata.deletion_timestamp is not None,
    )
    counted = frozenset(pod.uid for pod in pods if pod.attempt == (status.attempt or 0))
    return Claim(waiting(obj, tenant, now, load, run), counted)


def until(obj: TrainingJob, now: datetime) -> float | None:
    """From when on the claim may differ although the object does not; None: never.

    Seconds since the epoch. An object without the times that a claim names is one that the API server never stored.
    """
    status = obj.status
    if obj.metadata.creation_timestamp is None:
        return now.timestamp()
    if status is None:
        return None
    if status.admission is not None and status.admission.admitted_at is None:
        return now.timestamp()
    return status.retry_at.timestamp() if status.retry_at is not None and status.retry_at > now else None


def asked(spec: TrainingJobSpec) -> Resources:
    """What each pod asks for: with the disk that its engine may put state on, and that of its other temporary files."""
    own = per_pod(spec.shape)
    if spec.engine is None or spec.engine.scratch_disk is None:
        return own
    others_mib = own.ephemeral_mib or OTHER_FILES_MIB
    return replace(own, ephemeral_mib=others_mib + quantity.to_mib(spec.engine.scratch_disk))


def copies_in_memory(spec: TrainingJobSpec, load: Workload) -> int:
    """MiB of each pod for the copies of its state (`checkpoint.memory`), with the fewest pods; 0: none, or the state's size is
    not known here."""
    policy, trains_all = spec.checkpoint.memory, spec.engine is not None and spec.engine.adapter is None
    if policy is None or load.model is None or load.batch is None or not trains_all:
        return 0
    lost = policy.parity_of(spec.shape.min_pods) * load.gang.per_pod
    return copies_mib(load.model, load.batch, load.gang, lost)


def waiting(
    obj: TrainingJob, tenant: str, now: datetime, load: Workload | None = None, run: Run | None = None
) -> Job:
    """The job as if it waited, unless a run is given.

    Args:
        load: what the spec asks for, if that is known already.
    """
    spec, meta, status = obj.spec, obj.metadata, obj.status
    load = workload(obj) if load is None else load
    progress = status.progress if status is not None else None
    return Job(
        id=JobId(meta.uid or "draft"),
        name=meta.name,
        namespace=meta.namespace or "",
        tenant=tenant,
        kind=JobKind.TRAINING if spec.engine is not None else JobKind.OPAQUE,
        user=meta.annotations.get(ANNOTATION_REQUESTER, ""),
        workload_class=load.workload_class,
        min_pods=spec.shape.min_pods,
        # A gang starts with the number of pods that it can get, and keeps it.
        max_pods=spec.shape.max_pods,
        required_domain=None if spec.shape.within is None else list(Domain).index(spec.shape.within) + 1,
        per_pod=asked(spec),
        most_devices=0 if spec.engine is None else spec.engine.processes_per_pod,
        more_host_memory_mib=copies_in_memory(spec, load),
        accelerators=tuple(spec.accelerators or ()),
        modes=load.modes,
        priority=spec.priority,
        preemptible=spec.preemptible,
        submitted_at_s=(meta.creation_timestamp or now).timestamp(),
        remaining_work=load.remaining(progress.step if progress is not None else 0),
        attained_s=status.usage.work_units if status is not None and status.usage is not None else 0.0,
        preemptions=(status.preemptions or 0) if status is not None else 0,
        last_move_at_s=status.last_move_time.timestamp()
        if status is not None and status.last_move_time
        else None,
        deadline_s=spec.deadline.timestamp() if spec.deadline is not None else None,
        promised=promised(obj),
        run=run,
    )
