"""Short builders of small snapshots for tests."""

from __future__ import annotations

from busbar.scheduler import (
    Cell,
    Job,
    JobId,
    JobKind,
    Node,
    PerformanceTable,
    Placement,
    Pool,
    Quota,
    Rate,
    Resources,
    Run,
    Snapshot,
    Tenant,
)

NOW = 1_000_000.0


def gpus(count: int, cpu_m: int = 64_000, memory_mib: int = 262_144) -> Resources:
    return Resources(accelerators_m=1000 * count, cpu_m=cpu_m, memory_mib=memory_mib, ephemeral_mib=100_000)


def pool(name: str, accelerator: str | None = None, tenants: tuple[str, ...] | None = None) -> Pool:
    return Pool(name, accelerator or name, tenants=tenants)


def nodes(of: str, count: int, size: int = 8, first: int = 0) -> tuple[Node, ...]:
    return tuple(Node(f"{of}-{i:04d}", of, gpus(size)) for i in range(first, first + count))


def job(
    name: str,
    tenant: str = "a",
    size: int = 1,
    pods: int = 1,
    *,
    kind: JobKind = JobKind.TRAINING,
    on: Placement | None = None,
    since: float = NOW - 7200,
    saved: float | None = None,
    accelerators: tuple[str, ...] = (),
    priority: int = 100,
    workload_class: str = "",
    preemptible: bool = True,
    submitted: float = NOW - 3600,
    remaining: float | None = None,
) -> Job:
    run = None if on is None else Run(on, since, saved)
    return Job(
        JobId("uid-" + name),
        name,
        "ns-" + tenant,
        tenant,
        kind,
        min_pods=pods,
        max_pods=pods,
        per_pod=Resources(accelerators_m=1000 * size, cpu_m=1000, memory_mib=1024),
        accelerators=accelerators,
        priority=priority,
        workload_class=workload_class,
        preemptible=preemptible,
        submitted_at_s=submitted,
        remaining_work=remaining,
        run=run,
    )


def placed(of: str, *names: str, size: int = 1, accelerator: str | None = None) -> Placement:
    per_pod = Resources(accelerators_m=1000 * size, cpu_m=1000, memory_mib=1024)
    return Placement(of, accelerator or of, "resident", names, per_pod)


def tenant(name: str, weight: float = 1.0, **quota: tuple[int, int | None, int | None]) -> Tenant:
    """A tenant with quota rows in whole accelerators: H100=(guaranteed, borrowable, ceiling)."""
    rows = tuple(
        Quota(
            "*" if kind == "any" else kind,
            1000 * row[0],
            None if row[1] is None else 1000 * row[1],
            None if row[2] is None else 1000 * row[2],
        )
        for kind, row in quota.items()
    )
    return Tenant(name, weight=weight, quotas=rows)


def cluster(*jobs: Job, tenants: tuple[Tenant, ...] = (), **pools: int) -> Snapshot:
    """Pools of that many whole 8-GPU nodes, open to all; tenants are made as the jobs need them."""
    names = {t.name for t in tenants}
    others = tuple(Tenant(name) for name in sorted({j.tenant for j in jobs} - names))
    return Snapshot(
        pools=tuple(pool(name) for name in pools),
        nodes=tuple(node for name, count in pools.items() for node in nodes(name, count)),
        tenants=tenants + others,
        jobs=jobs,
    )


def speeds(workload_class: str, **rows: float) -> PerformanceTable:
    """A table with one-accelerator speeds of one class, and rates of 1."""
    return PerformanceTable(
        tuple(Cell(workload_class, kind, 1000, speed=speed) for kind, speed in rows.items()),
        tuple(Rate(kind) for kind in rows),
    )
