"""Snapshots of an in-memory cluster, built as the operator builds them: enough for real plans in tests."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from tests.api.memory_kube import MemoryKube

from busbar.api.errors import Unavailable
from busbar.kube.contracts.forecast import ForecastAnswer
from busbar.kube.resources import ACCELERATOR_POOLS, MODEL_SERVICES, TENANTS, TRAINING_JOBS
from busbar.kube.types.quantity import to_bytes, to_millis
from busbar.scheduler import (
    Finished,
    Job,
    JobId,
    JobKind,
    Node,
    Placement,
    Policy,
    Pool,
    Quota,
    Resources,
    Run,
    Snapshot,
    Tenant,
    what_if,
)

MIB = 1024 * 1024


class ScriptedOperator:
    """Answers `GET /snapshot`, `POST /snapshot` and `POST /forecast` without a server."""

    def __init__(self, kube: MemoryKube) -> None:
        self._kube = kube
        self.away = False
        self.drafts: list[dict[str, Any]] = []
        self.ended: tuple[Finished, ...] = ()
        self.busy = False

    async def close(self) -> None:
        return None

    async def current(self) -> Snapshot:
        return self._snapshot(None)

    async def with_draft(self, draft: dict[str, Any]) -> Snapshot:
        self.drafts.append(draft)
        return self._snapshot(draft)

    async def forecast(self, draft: dict[str, Any]) -> ForecastAnswer:
        if self.busy:
            raise Unavailable("the operator answered 503")
        if not self.ended:
            return ForecastAnswer()
        snapshot = self._snapshot(draft)
        job = next(job for job in snapshot.jobs if job.id == "draft")
        found = what_if(snapshot, Policy(solver=False), job, time.time(), self.ended)
        return ForecastAnswer(
            start_p50_seconds=found.p50_s, start_p90_seconds=found.p90_s, ended_jobs=len(self.ended),
            promises=20, before_p50=0.45, before_p90=0.9,
        )  # fmt: skip

    def _snapshot(self, draft: dict[str, Any] | None) -> Snapshot:
        if self.away:
            raise Unavailable("the operator does not answer")
        pools, nodes, tenants, jobs = [], [], [], []
        owner: dict[str, str] = {}
        for (plural, _, name), obj in self._kube.objects.items():
            spec = obj.get("spec") or {}
            if plural == ACCELERATOR_POOLS.plural:
                allowed = spec.get("tenants")
                pools.append(
                    Pool(
                        name=name,
                        accelerator=spec["accelerator"],
                        resource_name=spec["resourceName"],
                        tenants=None if allowed is None else tuple(allowed),
                        price_per_hour=spec["pricePerHour"],
                    )
                )
                accelerators = 0 if spec["resourceName"] == "cpu" else 8000
                capacity = Resources(accelerators, 8000, 65536, 100_000)
                nodes += [Node(f"{name}-node-{i}", name, capacity) for i in range(2)]
            elif plural == TENANTS.plural:
                quotas = tuple(
                    Quota(q["accelerator"], int(1000 * q.get("guaranteed", 0)))
                    for q in spec.get("quota") or []
                )
                tenants.append(Tenant(name=name, weight=spec.get("weight", 1), quotas=quotas))
                owner |= dict.fromkeys(spec.get("namespaces") or [], name)
        objects = [
            o
            for (plural, _, _), o in self._kube.objects.items()
            if plural in (TRAINING_JOBS.plural, MODEL_SERVICES.plural)
        ]
        for obj in objects:
            jobs += _jobs(obj, owner)
        if draft is not None:
            jobs += [replace(job, id=JobId("draft")) for job in _jobs(draft, owner)[:1]]
        return Snapshot(pools=tuple(pools), nodes=tuple(nodes), tenants=tuple(tenants), jobs=tuple(jobs))


def _jobs(obj: dict[str, Any], owner: dict[str, str]) -> list[Job]:
    meta, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    shape = spec.get("shape") or {}
    per_pod = Resources(
        1000 * shape.get("acceleratorsPerPod", 1),
        to_millis(shape["cpu"]) if "cpu" in shape else 0,
        to_bytes(shape.get("memory", "1Gi")) // MIB,
    )
    key = f"{meta['namespace']}/{meta['name']}"
    service = obj["kind"] == "ModelService"
    if status.get("phase") in ("Succeeded", "Failed") or spec.get("suspend"):
        return []
    run = None
    if status.get("phase") == "Running":
        admission = status["admission"]
        nodes = tuple(admission["nodes"])
        placed = Resources(per_pod.cpu_m or per_pod.accelerators_m, per_pod.cpu_m, per_pod.memory_mib)
        run = Run(Placement(admission["pool"], admission["accelerator"], "resident", nodes, placed), 0.0)
    count = spec.get("minReplicas", 1) if service else 1
    return [
        Job(
            id=JobId(f"{meta['uid']}/{index}" if service else meta["uid"]),
            name=meta["name"],
            namespace=meta["namespace"],
            tenant=owner.get(meta["namespace"], ""),
            kind=JobKind.SERVING if service else JobKind.TRAINING,
            min_pods=shape.get("minPods", 1),
            max_pods=shape.get("maxPods", 1),
            per_pod=per_pod,
            accelerators=tuple(spec.get("accelerators") or ()),
            preemptible=spec.get("preemptible", True),
            service=key if service else "",
            run=run,
        )
        for index in range(count)
    ]
