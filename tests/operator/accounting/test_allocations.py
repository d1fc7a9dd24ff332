"""What pools and tenants have allocated, counted as rounds follow each other."""

from __future__ import annotations

from dataclasses import replace

from busbar.operator.accounting.allocations import AllocationCounts, Allocations
from busbar.scheduler import Job, JobId, JobKind, Node, Placement, Pool, Resources, Run, Snapshot, Tenant

EIGHT = Resources(8000, 64_000, 262_144)
FOUR = Resources(4000, 1000, 1024)


def gang(name: str, pool: str, *nodes: str) -> Job:
    run = Run(Placement(pool, "H100", "resident", nodes, FOUR), 0.0)
    return Job(
        JobId(name), name, "ns", "a", JobKind.TRAINING, min_pods=len(nodes), max_pods=len(nodes), per_pod=FOUR, run=run
    )  # fmt: skip


def snapshot(*jobs: Job, second: str = "new") -> Snapshot:
    nodes = Node("n0", "old", EIGHT), Node("n1", second, EIGHT)
    return Snapshot((Pool("old", "H100"), Pool("new", "H100")), nodes, (Tenant("a"),), jobs)


def held(found: Allocations) -> dict[str, float]:
    assert sum(found.tenants["a"].by_pool.values()) == found.tenants["a"].allocated.get("H100", 0.0)
    return {name: pool.allocated for name, pool in found.pools.items()}


def test_a_gang_over_two_pools_counts_where_its_pods_stand() -> None:
    counts = AllocationCounts()
    assert held(counts.follow(snapshot(gang("g", "old", "n0", "n1", "n1")))) == {"old": 4.0, "new": 8.0}
    both = snapshot(gang("g", "old", "n0", "n1", "n1"), gang("h", "old", "n0"))
    assert held(counts.follow(both)) == {"old": 8.0, "new": 8.0}
    assert held(counts.follow(snapshot())) == {"old": 0.0, "new": 0.0}


def test_a_node_that_changes_its_pool_under_a_gang_leaves_no_remainder() -> None:
    counts = AllocationCounts()
    whole = gang("g", "old", "n0", "n1")
    counts.follow(snapshot(whole))
    moved = snapshot(replace(whole, preemptions=1), second="old")
    assert held(counts.follow(moved)) == {"old": 8.0, "new": 0.0}
    assert held(counts.follow(replace(moved, jobs=()))) == {"old": 0.0, "new": 0.0}
