"""A gang whose speed depends on how many nodes it stands on is placed and valued by the cell of the place it gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import (
    ActionKind,
    Cell,
    Job,
    PerformanceTable,
    Policy,
    Rate,
    Snapshot,
    Source,
    applied,
    check_plan,
    plan,
)
from busbar.scheduler.candidates.candidates import CandidateBuilder
from busbar.scheduler.model.table import TableView

from ..build import NOW, cluster, job, placed


def table(*speeds: tuple[str, int, int, float]) -> PerformanceTable:
    """Cells of class "g": (type, accelerators, nodes, speed)."""
    cells = tuple(
        Cell("g", kind, 1000 * size, speed=speed, source=Source.MEASURED, nodes=nodes)
        for kind, size, nodes, speed in speeds
    )
    return PerformanceTable(cells, (Rate("H100"), Rate("A100")))


FALLS = table(("H100", 4, 1, 10.0), ("H100", 4, 2, 4.0), ("A100", 4, 1, 6.0), ("A100", 4, 2, 5.0))
"""Fast on one node of H100, slower on two than on A100."""
GANG = job("gang", pods=4, workload_class="g", remaining=36_000.0)


def fillers(kind: str, count: int, of: int) -> list[Job]:
    return [
        job(f"{kind}-{i}", size=of, on=placed(kind, f"{kind}-{i:04d}", size=of), preemptible=False)
        for i in range(count)
    ]


def decided(snapshot: Snapshot) -> dict[str, tuple[str, int]]:
    """Where the plan puts each job that it starts or moves: pool and nodes."""
    result, _ = plan(snapshot, Policy(), NOW)
    assert check_plan(snapshot, result) == []
    return {
        snapshot_name(snapshot, action.job): (action.to.pool, len(set(action.to.nodes)))
        for action in result.actions
        if action.to is not None
    }


def snapshot_name(snapshot: Snapshot, job_id: str) -> str:
    return next(one.name for one in snapshot.jobs if one.id == job_id)


def options(snapshot: Snapshot) -> list[tuple[str, int, float]]:
    builder = CandidateBuilder(snapshot, TableView(snapshot.table), Policy(), NOW)
    return [(c.accelerator, c.nodes, c.speed) for c in builder.of(GANG).candidates]


def test_there_is_a_candidate_for_each_number_of_nodes_that_makes_a_difference() -> None:
    snapshot = replace(cluster(GANG, H100=2, A100=2), table=FALLS)
    assert options(snapshot) == [("H100", 1, 10.0), ("A100", 1, 6.0), ("A100", 0, 5.0), ("H100", 0, 4.0)]


def test_fewer_nodes_than_hold_the_gang_are_none() -> None:
    small = replace(cluster(GANG, H100=2, A100=2), table=FALLS)
    nodes = tuple(replace(n, capacity=replace(n.capacity, accelerators_m=2000)) for n in small.nodes)
    assert options(replace(small, nodes=nodes)) == [("A100", 0, 5.0), ("H100", 0, 4.0)]


def test_noise_between_numbers_of_nodes_makes_no_candidate() -> None:
    near = table(("H100", 4, 1, 10.0), ("H100", 4, 2, 9.9))
    assert options(replace(cluster(GANG, H100=2), table=near)) == [("H100", 0, 9.9)]


def test_it_goes_to_one_node_of_the_fast_type() -> None:
    assert decided(replace(cluster(GANG, H100=2, A100=2), table=FALLS)) == {"gang": ("H100", 1)}


def test_it_goes_to_the_slower_type_where_the_fast_one_would_spread_it() -> None:
    full = [*fillers("H100", 2, 6)]
    snapshot = replace(cluster(GANG, *full, H100=2, A100=2), table=FALLS)
    assert decided(snapshot) == {"gang": ("A100", 1)}


def test_it_is_spread_where_there_is_nothing_better_and_valued_so() -> None:
    full = [*fillers("H100", 2, 6), *fillers("A100", 2, 6)]
    snapshot = replace(cluster(GANG, *full, H100=2, A100=2), table=FALLS)
    assert decided(snapshot) == {"gang": ("A100", 2)}
    result, _ = plan(snapshot, Policy(), NOW)
    alone, _ = plan(replace(snapshot, jobs=(GANG,)), Policy(), NOW)
    others, _ = plan(replace(snapshot, jobs=tuple(full)), Policy(), NOW)
    assert result.value - others.value == pytest.approx(alone.value * 0.5)


def test_a_spread_gang_moves_together_when_that_pays() -> None:
    spread = placed("H100", "H100-0000", "H100-0000", "H100-0001", "H100-0001")
    running = replace(job("gang", pods=4, workload_class="g", remaining=36_000.0, on=spread, saved=NOW))
    snapshot = replace(cluster(running, H100=2), table=FALLS)
    result, _ = plan(snapshot, Policy(), NOW)
    (action,) = result.actions
    assert action.kind is ActionKind.MOVE
    assert action.to is not None
    assert len(set(action.to.nodes)) == 1
    after = applied(snapshot, result, NOW)
    assert plan(after, Policy(), NOW)[0].actions == ()


def test_it_stays_spread_where_the_end_is_near() -> None:
    spread = placed("H100", "H100-0000", "H100-0000", "H100-0001", "H100-0001")
    running = job("gang", pods=4, workload_class="g", remaining=40.0, on=spread, saved=NOW)
    assert decided(replace(cluster(running, H100=2), table=FALLS)) == {}


def test_an_elastic_job_does_not_grow_onto_a_second_node_where_that_is_slower() -> None:
    speeds = table(
        ("H100", 2, 1, 5.0),
        ("H100", 2, 2, 3.0),
        ("H100", 4, 1, 9.0),
        ("H100", 4, 2, 4.0),
        ("H100", 3, 2, 3.5),
    )
    elastic = replace(GANG, min_pods=2, max_pods=4)
    full = fillers("H100", 2, 6)
    assert decided(replace(cluster(elastic, *full, H100=2), table=speeds)) == {"gang": ("H100", 1)}
