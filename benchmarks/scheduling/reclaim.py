"""One reclaim scenario: the work that is lost when lent capacity is reclaimed.

Sixteen nodes of 8 are lent out to two tenants as gangs of 1 to 16 with checkpoints of random age; the owner's gangs
arrive and reclaim half of it. The same choice of victims is made by our planner, by newest first (as Kueue and
kube-scheduler break ties) and by lowest priority first, each adding victims until the gang fits.
"""

from __future__ import annotations

from random import Random
from typing import Any

from busbar.scheduler import (
    ActionKind,
    Job,
    JobId,
    Node,
    Placement,
    Policy,
    Pool,
    Quota,
    Resources,
    Run,
    Snapshot,
    Tenant,
    plan,
)

NOW = 1_000_000.0
NODES = 16


def scenario(seed: int) -> Snapshot:
    random = Random(seed)
    free = {f"n{i:02d}": 8 for i in range(NODES)}
    jobs: list[Job] = []
    while sum(free.values()):
        size = random.choice((1, 2, 4, 8, 16))
        pods, per_pod = (1, size) if size <= 8 else (size // 8, 8)
        fitting = [name for name, left in free.items() if left >= per_pod]
        if len(fitting) < pods:
            continue
        chosen = random.sample(fitting, pods)
        for name in chosen:
            free[name] -= per_pod
        started = NOW - random.uniform(3600, 40_000)
        placement = Placement("gpu", "gpu", "resident", tuple(sorted(chosen)), Resources(1000 * per_pod))
        jobs.append(
            Job(
                JobId(f"lent-{len(jobs):03d}"),
                f"lent-{len(jobs):03d}",
                "ns",
                random.choice(("b", "c")),
                min_pods=pods,
                max_pods=pods,
                per_pod=placement.per_pod,
                priority=random.choice((50, 100, 200)),
                submitted_at_s=started - 60,
                run=Run(placement, started, NOW - random.uniform(0, min(3600.0, NOW - started))),
            )
        )
    mine = Job(
        JobId("owner"),
        "owner",
        "ns",
        "a",
        min_pods=NODES // 2,
        max_pods=NODES // 2,
        per_pod=Resources(8000),
        submitted_at_s=NOW,
    )
    return Snapshot(
        (Pool("gpu", "gpu"),),
        tuple(Node(name, "gpu", Resources(8000)) for name in free),
        (Tenant("a", quotas=(Quota("gpu", 8000 * NODES),)), Tenant("b"), Tenant("c")),
        (*jobs, mine),
    )


def lost(job: Job) -> float:
    """Accelerator-seconds repeated if the job is stopped now."""
    assert job.run is not None
    saved = job.run.started_at_s if job.run.saved_at_s is None else job.run.saved_at_s
    return (job.restart_s + NOW - saved) * job.run.placement.accelerators_m / 1000


def in_order(snapshot: Snapshot, newest: bool) -> float:
    """Victims in a fixed order until eight nodes are free; victims that turn out not to be needed are spared."""
    running = [job for job in snapshot.jobs if job.run is not None]
    if newest:
        running.sort(key=lambda job: (-job.run.started_at_s if job.run else 0.0, job.id))
    else:
        running.sort(key=lambda job: (job.priority, -job.run.started_at_s if job.run else 0.0, job.id))
    victims: list[Job] = []
    while _whole(snapshot, victims) < NODES // 2:
        victims.append(running[len(victims)])
    for job in list(victims):
        rest = [other for other in victims if other is not job]
        if _whole(snapshot, rest) >= NODES // 2:
            victims = rest
    return sum(lost(job) for job in victims)


def _whole(snapshot: Snapshot, victims: list[Job]) -> int:
    gone = {job.id for job in victims}
    busy = {
        name
        for job in snapshot.jobs
        if job.run is not None and job.id not in gone
        for name in job.run.placement.nodes
    }
    return NODES - len(busy)


def rows(seeds: int = 10) -> list[dict[str, Any]]:
    """Accelerator-hours lost by each rule, per seed."""
    out = []
    for seed in range(seeds):
        snapshot = scenario(seed)
        result, _ = plan(snapshot, Policy(), NOW)
        started = any(a.job == "owner" and a.kind is ActionKind.START for a in result.actions)
        stopped = {a.job for a in result.actions if a.kind is ActionKind.PREEMPT}
        moved = {a.job for a in result.actions if a.kind is ActionKind.MOVE}
        ours = sum(lost(job) for job in snapshot.jobs if job.id in stopped | moved)
        newest, lowest = in_order(snapshot, True), in_order(snapshot, False)
        row = {
            "seed": seed,
            "owner_started": started,
            "ours_h": ours / 3600,
            "newest_first_h": newest / 3600,
            "lowest_priority_h": lowest / 3600,
        }
        met = started and ours < newest and ours < lowest
        out.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} | {"met": met})
    return out
