"""Random clusters for property tests: small, with many corner cases."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from busbar.scheduler import (
    Cell,
    DecayedUsage,
    Job,
    JobId,
    JobKind,
    Node,
    PerformanceTable,
    Placement,
    Pool,
    PowerDomain,
    Quota,
    Rate,
    Resources,
    Run,
    Snapshot,
    Tenant,
    User,
)

from .build import NOW

KINDS = ("H100", "L4", "V100")
TENANTS = ("a", "b", "c")
USERS = ("", "u", "v")


@st.composite
def quotas(draw: st.DrawFn) -> tuple[Quota, ...]:
    rows = []
    for kind in draw(st.sets(st.sampled_from((*KINDS, "*")), max_size=2)):
        guaranteed = draw(st.integers(0, 8)) * 1000
        borrow = draw(st.none() | st.integers(0, 8).map(lambda n: n * 1000))
        above = draw(st.none() | st.integers(0, 8))
        ceiling = None if above is None else guaranteed + above * 1000
        rows.append(Quota(kind, guaranteed, borrow, ceiling))
    return tuple(sorted(rows, key=lambda row: row.accelerator))


@st.composite
def jobs(draw: st.DrawFn, number: int) -> Job:
    pods = draw(st.sampled_from((1, 1, 1, 2, 3)))
    return Job(
        JobId(f"uid-{number:02d}"),
        f"job-{number:02d}",
        "ns",
        draw(st.sampled_from(TENANTS)),
        draw(st.sampled_from((JobKind.TRAINING, JobKind.TRAINING, JobKind.SERVING, JobKind.OPAQUE))),
        workload_class=draw(st.sampled_from(("", "x", "y"))),
        min_pods=pods,
        max_pods=pods * draw(st.sampled_from((1, 1, 2))),
        per_pod=Resources(
            1000 * draw(st.sampled_from((1, 1, 2, 4, 8))), 1000, draw(st.sampled_from((1024, 65536)))
        ),
        accelerators=tuple(sorted(draw(st.sets(st.sampled_from(KINDS), max_size=2)))),
        modes=draw(st.sampled_from((("resident",), ("resident",), ("resident", "offload"), ("offload",)))),
        priority=draw(st.sampled_from((50, 100, 100, 200))),
        preemptible=draw(st.sampled_from((True, True, True, False))),
        submitted_at_s=NOW - draw(st.integers(0, 100_000)),
        remaining_work=draw(st.none() | st.floats(10, 1e6)),
        attained_s=draw(st.floats(0, 1e5)),
        preemptions=draw(st.integers(0, 6)),
        deadline_s=draw(st.sampled_from((None, None, NOW - 60, NOW + 600, NOW + 7200, NOW + 360_000))),
        promised=draw(st.booleans()),
    )


def _start(job: Job, snapshot: Snapshot, free: dict[str, list[int]], since: float, pods: int) -> Job:
    """First fit: place this many pods of the job on allowed nodes, if they fit."""
    for pool in snapshot.pools:
        if job.accelerators and pool.accelerator not in job.accelerators:
            continue
        chosen: list[str] = []
        left = {name: list(row) for name, row in free.items()}
        ask = (job.per_pod.accelerators_m, job.per_pod.cpu_m, job.per_pod.memory_mib)
        for node in snapshot.nodes:
            while node.pool == pool.name and len(chosen) < pods:
                if any(a > f for a, f in zip(ask, left[node.name], strict=True)):
                    break
                left[node.name] = [f - a for a, f in zip(ask, left[node.name], strict=True)]
                chosen.append(node.name)
        if len(chosen) == pods:
            free.update(left)
            placement = Placement(pool.name, pool.accelerator, job.modes[0], tuple(chosen), job.per_pod)
            return replace(job, run=Run(placement, since, since))
    return job


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    kinds = sorted(draw(st.sets(st.sampled_from(KINDS), min_size=1)))
    nodes = tuple(
        Node(
            f"{kind}-{i}",
            kind,
            Resources(1000 * draw(st.sampled_from((1, 4, 8))), 16_000, 131_072),
            topology=(f"rack-{i % 2}",),
        )
        for kind in kinds
        for i in range(draw(st.integers(1, 3)))
    )
    tenants = tuple(
        Tenant(name, draw(st.sampled_from(("", "o"))), draw(st.sampled_from((0.5, 1.0, 2.0))), draw(quotas()))
        for name in TENANTS
    )
    cells = tuple(
        Cell(name, kind, 1000, speed=draw(st.sampled_from((0.5, 1.0, 2.0, 4.0))))
        for name in ("x", "y")
        for kind in KINDS
    )
    cells += tuple(
        Cell("x", kind, 1000, "offload", speed=draw(st.sampled_from((0.5, 1.0)))) for kind in KINDS[:2]
    )
    rates = tuple(Rate(kind, rate) for kind, rate in zip(KINDS, (3.0, 0.5, 1.0), strict=True))
    pools = tuple(Pool(kind, kind) for kind in kinds)
    empty = Snapshot(pools, nodes, tenants, (), PerformanceTable(cells, rates))
    free = {n.name: [n.capacity.accelerators_m, n.capacity.cpu_m, n.capacity.memory_mib] for n in nodes}
    found: list[Job] = []
    for number in range(draw(st.integers(0, 10))):
        job = draw(jobs(number))
        if draw(st.booleans()):
            pods = draw(st.sampled_from((job.min_pods, job.max_pods)))
            job = _start(job, empty, free, NOW - draw(st.sampled_from((10, 1000, 50_000))), pods)
            if job.run is not None and draw(st.integers(0, 9)) == 0:
                job = replace(job, run=replace(job.run, releasing=True))
        found.append(job)
    return replace(empty, jobs=tuple(found))


usages = st.builds(DecayedUsage, st.sampled_from((0.0, 1e6, 5e6)), st.sampled_from((0.0, NOW - 1e5, NOW)))


@st.composite
def peopled(draw: st.DrawFn) -> Snapshot:
    """A snapshot whose tenants have users and past use."""
    snapshot = draw(snapshots())
    tenants = tuple(
        replace(
            tenant,
            usage=draw(usages),
            users=tuple(User(user, draw(st.sampled_from((1.0, 2.0))), draw(usages)) for user in USERS[1:]),
        )
        for tenant in snapshot.tenants
    )
    jobs = tuple(replace(job, user=draw(st.sampled_from(USERS))) for job in snapshot.jobs)
    return replace(snapshot, tenants=tenants, jobs=jobs)


@st.composite
def powered(draw: st.DrawFn) -> Snapshot:
    """A snapshot whose nodes hang on a tree of power domains, some of which limit; some carry more than they may."""
    snapshot = draw(snapshots())
    watts = {kind: draw(st.sampled_from((0.0, 72.0, 300.0, 700.0))) for kind in KINDS}
    rates = tuple(
        replace(rate, watts=watts[rate.accelerator], idle_watts=draw(st.sampled_from((0.0, 10.5))))
        for rate in snapshot.table.rates
    )
    cells = tuple(
        replace(cell, watts=draw(st.sampled_from((0.0, 99.5, 250.0)))) for cell in snapshot.table.cells
    )
    parents = {"hall": "", "row-0": "hall", "row-1": "hall", "rack": "row-1"}
    domains = tuple(
        PowerDomain(
            name,
            draw(st.sampled_from((0.0, 400.0, 1500.0, 3000.0, 1e6))),
            parent,
            draw(st.sampled_from((0.0, 0.0, 100.0))),
            draw(st.sampled_from((True, True, False))),
            draw(st.sampled_from((False, False, False, True))),
        )
        for name, parent in parents.items()
    )
    nodes = tuple(
        replace(node, domain=draw(st.sampled_from(("", "hall", "row-0", "row-1", "rack"))))
        for node in snapshot.nodes
    )
    table = replace(snapshot.table, rates=rates, cells=cells)
    return replace(snapshot, table=table, nodes=nodes, domains=domains)


@st.composite
def capped(draw: st.DrawFn) -> Snapshot:
    """A powered snapshot in which jobs may start under power caps, and some run so: those that have nodes to themselves,
    or whole boards of nodes of which it is known who holds them."""
    snapshot = draw(powered())
    caps = draw(st.sets(st.sampled_from((0.25, 0.4, 0.5, 0.6, 0.7, 0.85)), min_size=1))
    cells = tuple(
        replace(
            cell,
            power_cap=cap,
            speed=cell.speed * draw(st.sampled_from((cap, 1.0, 1.1))),
            watts=draw(st.sampled_from((0.0, 50.0, 200.0))),
        )
        for cell in snapshot.table.cells
        for cap in sorted(caps)
    )
    nodes = tuple(
        replace(
            node, limits_boards=draw(st.sampled_from((True, True, False))), tells_boards=draw(st.booleans())
        )
        for node in snapshot.nodes
    )
    tell = {node.name for node in nodes if node.limits_boards and node.tells_boards}
    sizes = {node.name: node.capacity.accelerators_m for node in nodes}
    whole = sorted({node.capacity for node in nodes}, key=repr)
    whole += [replace(one, accelerators_m=1000) for one in whole if one.accelerators_m > 1000]
    asked = tuple(
        replace(
            job,
            workload_class="x",
            kind=JobKind.TRAINING,
            per_pod=replace(draw(st.sampled_from(whole)), cpu_m=1),
        )
        if job.run is None and draw(st.booleans())
        else job
        for job in snapshot.jobs
    )
    jobs = tuple(
        replace(job, run=replace(job.run, placement=replace(job.run.placement, power_cap=min(caps))))
        if job.run is not None
        and (
            all(sizes[name] == job.per_pod.accelerators_m for name in job.run.placement.nodes)
            or (job.per_pod.accelerators_m % 1000 == 0 and tell.issuperset(job.run.placement.nodes))
        )
        and draw(st.booleans())
        else job
        for job in asked
    )
    table = replace(snapshot.table, cells=snapshot.table.cells + cells)
    return replace(snapshot, table=table, nodes=nodes, jobs=jobs)
