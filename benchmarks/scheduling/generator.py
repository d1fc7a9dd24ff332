"""A seeded cluster in steady state: full, fragmented, with as many jobs waiting as running."""

from __future__ import annotations

from random import Random

from busbar.scheduler import (
    Cell,
    Job,
    JobId,
    Node,
    PerformanceTable,
    Placement,
    Pool,
    Quota,
    Rate,
    Resources,
    Run,
    Snapshot,
    Source,
    Tenant,
)

TYPES = {"H100": 3.2, "A100": 1.6, "L4": 0.5, "V100": 0.6}
"""Accelerator types and their exchange rates."""
NOW = 10_000_000.0
PER_NODE = 8


def generate(
    nodes: int = 1000, running: int = 2000, waiting: int = 2000, tenants: int = 10, seed: int = 0
) -> Snapshot:
    """Four types in equal parts, 8 accelerators per node, gangs of 1 to 64 accelerators (half of them one)."""
    random = Random(seed)
    names = [f"{kind}-{i:05d}" for kind in TYPES for i in range(nodes // len(TYPES))]
    free = {kind: {name: PER_NODE for name in names if name.startswith(kind + "-")} for kind in TYPES}
    jobs: list[Job] = []
    for number in range(running):
        jobs.append(_job(number, random, tenants, _place(random, free)))
    for number in range(running, running + waiting):
        jobs.append(_job(number, random, tenants, None))
    guaranteed = 1000 * nodes * PER_NODE // len(TYPES) // tenants // 2
    rows = tuple(Quota(kind, guaranteed) for kind in TYPES)
    return Snapshot(
        pools=tuple(Pool(kind, kind) for kind in TYPES),
        nodes=tuple(
            Node(name, name.split("-")[0], Resources(1000 * PER_NODE), topology=(f"rack-{i // 16:03d}",))
            for i, name in enumerate(names)
        ),
        tenants=tuple(Tenant(f"t{i}", weight=1 + i % 3, quotas=rows) for i in range(tenants)),
        jobs=tuple(jobs),
        table=_table(random),
    )


def _size(random: Random) -> int:
    return 1 if random.random() < 0.5 else random.choice((2, 4, 8, 8, 16, 32, 64))


def _place(random: Random, free: dict[str, dict[str, int]]) -> Placement | None:
    size = _size(random)
    pods, per_pod = (1, size) if size <= PER_NODE else (size // PER_NODE, PER_NODE)
    kind = random.choice(list(TYPES))
    fitting = [name for name, left in free[kind].items() if left >= per_pod]
    if len(fitting) < pods:
        size, pods, per_pod = 1, 1, 1
        kinds = [other for other, nodes in free.items() if any(nodes.values())]
        if not kinds:
            return None
        kind = kinds[0]
        fitting = [name for name, left in free[kind].items() if left >= 1]
    chosen = random.sample(fitting, pods)
    for name in chosen:
        free[kind][name] -= per_pod
    return Placement(kind, kind, "resident", tuple(sorted(chosen)), Resources(1000 * per_pod))


def _job(number: int, random: Random, tenants: int, placement: Placement | None) -> Job:
    size = _size(random)
    pods, per_pod = (1, size) if size <= PER_NODE else (size // PER_NODE, PER_NODE)
    if placement is not None:
        pods, per_pod = placement.pods, placement.per_pod.accelerators_m // 1000
    age = random.uniform(600, 200_000)
    started = NOW - random.uniform(0.1, 0.9) * age
    run = None if placement is None else Run(placement, started, max(started, NOW - random.uniform(0, 1800)))
    return Job(
        JobId(f"job-{number:06d}"),
        f"job-{number:06d}",
        "ns",
        f"t{random.randrange(tenants)}",
        workload_class=f"class-{random.randrange(40):02d}",
        min_pods=pods,
        max_pods=pods,
        per_pod=Resources(1000 * per_pod),
        priority=random.choice((50, 100, 100, 100, 200)),
        submitted_at_s=NOW - age,
        remaining_work=random.lognormvariate(9.5, 1.5) if random.random() < 0.5 else None,
        attained_s=0.0 if placement is None else age / 2 * pods * per_pod,
        run=run,
    )


def _table(random: Random) -> PerformanceTable:
    cells = []
    for number in range(40):
        for kind, rate in TYPES.items():
            speed = rate * random.lognormvariate(0, 0.3)
            for size in (1, 2, 4, 8, 16, 32, 64):
                cells.append(
                    Cell(
                        f"class-{number:02d}",
                        kind,
                        1000 * size,
                        speed=speed * size**0.95,
                        source=Source.MEASURED,
                    )
                )
    return PerformanceTable(tuple(cells), tuple(Rate(kind, rate) for kind, rate in TYPES.items()))
