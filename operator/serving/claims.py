"""A ModelService as jobs of the scheduler's snapshot, one for each replica."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from busbar.kube.types import AcceleratorPool, ModelService, TrainingJob
from busbar.kube.types.engines import ServiceEngine
from busbar.kube.types.meta import ANNOTATION_REQUESTER
from busbar.kube.types.service_status import ModelServiceStatus, PoolReplicas, ScalingCause
from busbar.operator.accounting.budgets import FREE, Hold
from busbar.operator.pods.claims import Claim, per_pod
from busbar.operator.pods.replica_place import place_of
from busbar.operator.pods.replica_pods import service_pod_name
from busbar.operator.pods.volume_claims import lacks_claims
from busbar.operator.profiles.table import Workload
from busbar.operator.serving.engine_mode import engine_mode
from busbar.operator.serving.replicas import is_pinned, startable, wanted_indexes, wanted_places
from busbar.operator.serving.scaling import desired_replicas
from busbar.operator.serving.scaling_status import by_pool
from busbar.operator.serving.view import model_uri
from busbar.operator.watch.projections import Pod, Sleep
from busbar.scheduler import Job, JobId, JobKind, Run

_FOR_WHAT_IS_THERE = (ScalingCause.PANIC, ScalingCause.IN_FLIGHT, ScalingCause.WOKEN)
"""Causes of a number that is for requests that have come, not for those that are expected."""


def claims(
    service: ModelService,
    pods: tuple[Pod, ...],
    jobs: Iterable[TrainingJob],
    tenant: str,
    now: datetime,
    budget: Hold = FREE,
    pools: Iterable[AcceleratorPool] = (),
) -> list[Claim]:
    """One job per replica that exists or is wanted.

    Args:
        pods: those that the object owns.
        jobs: those whose output the service may serve.
        budget: what its tenant's budgets do to it; the least number of replicas is started unless they stop what runs.
        pools: those that there are; a replica is not placed where its model is known to fit in no engine mode.
    """
    found: list[Claim] = []
    for pod in pods:
        place = place_of(pod)
        if pod.ended or place is None:
            continue
        run = Run(
            placement=place,
            started_at_s=(pod.created_at or now).timestamp(),
            releasing=pod.deleting or pod.draining_since is not None,
        )
        job = replace(replica(service, pod.rank, tenant, now), run=run, power_cap=place.power_cap)
        # What sleeps serves nobody: any job that waits may have its place.
        found.append(Claim(replace(job, yields=pod.sleep is Sleep.ASLEEP), frozenset({pod.uid})))
    model = model_uri(service, jobs)
    if service.metadata.deletion_timestamp is None and model.uri and not lacks_claims(service.status):
        held = {p.rank for p in pods}
        wanted = [i for i in wanted_indexes(service, pods) if i not in held]
        if budget.why:
            wanted = wanted[: startable(service, pods, budget)]
        places, pinned = wanted_places(service, pods), is_pinned(service)
        urgent = needed_now(service, pods, places)
        fitting = fitting_pools(service, model.made_by, pools)
        for order, index in enumerate(wanted):
            job = replica(service, index, tenant, now)
            job = replace(job, pools=fitting, needed_now=order < urgent)
            cap = places[order].power_cap_percent if order < len(places) else None
            if order < len(places) and (pinned or cap is not None):
                # What is known of the watts there holds in no other pool of the type.
                job = replace(job, pools=(places[order].pool,), power_cap=(cap or 100) / 100)
            elif order < len(places):
                job = replace(job, accelerators=(places[order].accelerator or "",))
            found.append(Claim(job))
    return found


def first_replicas(
    service: ModelService,
    jobs: Iterable[TrainingJob],
    tenant: str,
    now: datetime,
    pools: Iterable[AcceleratorPool] = (),
) -> list[Job]:
    """The replicas that a service would begin with, were it created and not suspended: those that `claims` would make then."""
    count, _, _ = desired_replicas(service, None, None, now, has_model=True)
    pools, chosen = tuple(pools), by_pool(service, None, count) or {}
    types = {pool.metadata.name: pool.spec.accelerator for pool in pools}
    rows = [
        PoolReplicas(pool=name, replicas=0, desired=wanted, accelerator=types.get(name))
        for name, wanted in sorted(chosen.items())
    ]
    made = service.model_copy(update={"status": ModelServiceStatus(desired_replicas=count, pools=rows)})
    return [claim.job for claim in claims(made, (), jobs, tenant, now, pools=pools)]


def needed_now(service: ModelService, pods: Iterable[Pod], places: Iterable[PoolReplicas]) -> int:
    """How many missing replicas requests wait for, by the status; the others are for load that is foreseen.

    That is the first one where none serves or starts; all of them where requests that were there decided the number last; else
    as many as the replicas that are there lack for the load of now.

    Args:
        places: where the missing replicas shall be, as far as it was chosen.
    """
    status = service.status or ModelServiceStatus()
    rows = {row.pool: row.requests_per_second or 0.0 for row in status.pools or ()}
    there = [pod for pod in pods if pod.stays and not pod.parked]
    missing = (status.desired_replicas or 0) - len(there)
    cause = status.scaling_history[-1].cause if status.scaling_history else None
    if missing <= 0 or cause in _FOR_WHAT_IS_THERE:
        return max(0, missing)
    count = 0 if there else 1
    carried = sum(rows.get(pod.pool, 0.0) for pod in there)
    load = status.forecast.now if status.forecast is not None else 0.0
    each = [rows.get(place.pool, 0.0) for place in places]
    for more in (*each, *[0.0] * (missing - len(each))):
        if carried >= load:
            break
        carried, count = carried + more, count + 1
    return min(count, missing)


def fitting_pools(
    service: ModelService, made_by: Workload | None, pools: Iterable[AcceleratorPool]
) -> tuple[str, ...]:
    """The pools in which the model fits in some engine mode; empty: any may do, or none is known to."""
    modes = {pool.metadata.name: engine_mode(service, made_by, pool) for pool in pools}
    found = sorted(name for name, choice in modes.items() if choice is None or choice.fits)
    return tuple(found) if len(found) < len(modes) else ()


def replica(service: ModelService, index: int, tenant: str, now: datetime) -> Job:
    """One replica as if it waited: without its run."""
    spec, meta = service.spec, service.metadata
    return Job(
        id=replica_id(service, index),
        name=service_pod_name(meta.name, index),
        namespace=meta.namespace or "",
        tenant=tenant,
        kind=JobKind.SERVING,
        user=meta.annotations.get(ANNOTATION_REQUESTER, ""),
        per_pod=per_pod(spec.shape),
        most_devices=1 if spec.engine is ServiceEngine.BUILTIN else 0,
        accelerators=tuple(spec.accelerators or ()),
        priority=spec.priority,
        preemptible=False,
        submitted_at_s=(meta.creation_timestamp or now).timestamp(),
        reclaim_deadline_s=float(spec.drain_seconds),
        service=f"{meta.namespace}/{meta.name}",
    )


def replica_id(service: ModelService, index: int) -> JobId:
    return JobId(f"{service.metadata.uid}/{index}")
