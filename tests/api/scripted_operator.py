"""Snapshots of an in-memory cluster, built as the operator builds them: enough for real plans in tests."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tests.api.memory_kube import MemoryKube

from busbar.api.errors import Unavailable
from busbar.kube.contracts.power import Backend, LeaseState
from busbar.kube.contracts.power_view import FeedPower, NodePower, PowerPicture, PowerSeries, Resolution
from busbar.kube.contracts.preview import NodeLoad, PreviewAnswer
from busbar.kube.contracts.service_plan import ServicePlanAnswer, ServicePlanRequest
from busbar.kube.contracts.service_series import PoolSeries, SeriesSpan, ServiceSeries
from busbar.kube.resources import ACCELERATOR_POOLS, MODEL_SERVICES, TENANTS, TRAINING_JOBS
from busbar.kube.types.quantity import to_bytes, to_millis
from busbar.operator.forecasts.worker import Answer
from busbar.operator.previews.preview import Calibration, PreviewQuestion, answer, loads_of, with_forecast
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
    """Answers `GET /nodes` and `POST /preview` without a server or a process of its own."""

    def __init__(self, kube: MemoryKube) -> None:
        self._kube = kube
        self.away = False
        self.drafts: list[dict[str, Any]] = []
        self.ended: tuple[Finished, ...] = ()
        self.planned: list[ServicePlanRequest] = []
        self.plan = ServicePlanAnswer(possible=False, reason="Nothing is known.", rate=1.0)
        self.series: tuple[str, str, Resolution] | None = None

    async def close(self) -> None:
        return None

    async def nodes(self) -> list[NodeLoad]:
        return loads_of(self._snapshot(None)).nodes

    async def power(self) -> PowerPicture:
        """Every pool's nodes hang on a feed of their own below one row; the second node of each is silent."""
        feeds: list[FeedPower] = []
        nodes: list[NodePower] = []
        for load in loads_of(self._snapshot(None)).nodes:
            name = f"rack-{load.pool}"
            if name not in [feed.name for feed in feeds]:
                feeds.append(
                    FeedPower(
                        name=name, parent="row", budget_watts=2000.0, ready=True, reason="Leasing", nodes=2,
                        policy="Lease", leased_watts=1900.0, capped_nodes=1,
                        draw_watts=800.0, assumed_watts=1000.0, headroom_watts=180.0, silent_nodes=1, simulated_nodes=2,
                        work_per_kilowatt_hour=1.25, metered=True, meter_error=-0.031, meter_problem="The meter at pdu is away.",
                    )
                )  # fmt: skip
            nodes.append(
                NodePower(
                    name=load.name, feeds=(name, "row"), watts=800.0, nameplate_watts=1000.0, boards=8,
                    boards_from=Backend.SIMULATED, lease_watts=850.0, capped=True, limits=LeaseState.LEASED,
                    age_seconds=0.5, silent=load.name.endswith("1"), why="there are watts enough", boards_by_pod=True,
                )
            )  # fmt: skip
        row = FeedPower(name="row", budget_watts=4000.0, ready=False, reason="NoNodes", nodes=2 * len(feeds))
        return PowerPicture(feeds=(row, *feeds) if feeds else (), nodes=tuple(nodes))

    async def power_series(self, feed: str, node: str, resolution: Resolution) -> PowerSeries:
        self.series = (feed, node, resolution)
        return PowerSeries(name=feed or node, resolution=resolution, watts=(None, 800.0))

    async def preview(self, draft: dict[str, Any], *, admin: bool) -> PreviewAnswer:
        self.drafts.append(draft)
        snapshot, meta = self._snapshot(draft), draft["metadata"]
        question = PreviewQuestion(
            base=snapshot, drafts=(), policy=Policy(solver=False), now=time.time(), admin=admin,
            key=f"{meta['namespace']}/{meta.get('name') or ''}", service=draft["kind"] == "ModelService",
        )  # fmt: skip
        found = answer(question)
        if not found.waits or not self.ended:
            return found
        job = next(job for job in snapshot.jobs if job.id == "draft")
        told = what_if(snapshot, Policy(solver=False), job, time.time(), self.ended)
        start = (told.p50_s, told.p90_s) if told.p50_s is not None and told.p90_s is not None else None
        return with_forecast(found, Answer("draft", start), Calibration(20, 0.45, 0.9))

    async def service_plan(self, asked: ServicePlanRequest) -> ServicePlanAnswer:
        if self.away:
            raise Unavailable("the operator does not answer")
        self.planned.append(asked)
        return self.plan.model_copy(update={"rate": asked.rate})

    async def service_series(self, namespace: str, name: str, span: SeriesSpan) -> ServiceSeries:
        """Two pools; the last third of the time is known."""
        if self.away:
            raise Unavailable("the operator does not answer")

        def some(*values: float) -> tuple[float | None, ...]:
            known = span.periods // 3
            return (*[None] * (span.periods - known), *(values[i % len(values)] for i in range(known)))

        pools = (
            PoolSeries(pool="h100", accelerator="H100", ready_replicas=some(1, 2), capacity_per_second=some(4, 8)),
            PoolSeries(pool="old", accelerator="V100", ready_replicas=some(3), capacity_per_second=some(3)),
        )  # fmt: skip
        return ServiceSeries(
            namespace=namespace, name=name, span=span, begins=datetime(2026, 11, 29, tzinfo=UTC), percentile=99.0,
            requests_per_second=some(2, 5, 9), capacity_per_second=some(7, 11), tokens_per_second=some(400, 900),
            attainment=some(1.0, 0.97), ttft_milliseconds=some(300, 900), ttft_median_milliseconds=some(90),
            tpot_milliseconds=some(30, 60), tpot_median_milliseconds=some(25), pools=pools,
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
