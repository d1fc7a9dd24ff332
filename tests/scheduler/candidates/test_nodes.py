"""A gang whose speed depends on how many nodes it stands on is placed and valued by the cell of the place it gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    ActionKind,
    Cell,
    Event,
    Job,
    PerformanceTable,
    Policy,
    Rate,
    Snapshot,
    Source,
    applied,
    check_plan,
    plan,
    react,
)
from busbar.scheduler.candidates.candidates import CandidateBuilder
from busbar.scheduler.model.table import TableView

from ..build import NOW, cluster, job, nodes, placed
from ..strategies import snapshots


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


def test_answers_follow_the_size_of_the_largest_node_and_cells_that_come_later() -> None:
    """With a memo the answer is the same as without, also where nodes changed before the table knew nodes."""
    start = replace(cluster(GANG, *fillers("A100", 2, 8), A100=2, H100=1), table=table(("H100", 4, 1, 10.0)))
    small = tuple(
        replace(node, capacity=replace(node.capacity, accelerators_m=2000)) if node.pool == "H100" else node
        for node in start.nodes
    )
    steps = [
        replace(start, nodes=small),
        replace(start, nodes=small, table=FALLS),
        replace(start, nodes=(*small, *nodes("H100", 1, first=5)), table=FALLS),
        replace(start, nodes=start.nodes, table=FALLS),
    ]
    last, memo = plan(start, Policy(), NOW)
    before = start
    for number, after in enumerate(steps, 1):
        event = Event.between(before, after, NOW + number)
        with_memo, memo = react(after, last, event, memo)
        assert with_memo == react(after, last, event)[0]
        before, last = after, with_memo


@settings(max_examples=60, deadline=None, derandomize=True)
@given(snapshots(), st.lists(st.floats(0.3, 1.0), min_size=6, max_size=6))
def test_plans_of_random_clusters_are_valid_and_hold_with_speeds_by_nodes(
    snapshot: Snapshot, slower: list[float]
) -> None:
    cells = tuple(
        Cell(name, kind, 1000 * size, speed=size * factor, source=Source.MEASURED, nodes=nodes)
        for name, own in (("x", slower[:3]), ("y", slower[3:]))
        for kind in ("H100", "L4", "V100")
        for size in (2, 3, 4, 6, 8)
        for nodes, factor in zip((1, 2, 3), (1.0, own[0], own[0] * own[1]), strict=True)
    )
    by_nodes = replace(snapshot, table=replace(snapshot.table, cells=cells, learned=()))
    policy = Policy(solver_seconds=None)
    result, memo = plan(by_nodes, policy, NOW)
    assert check_plan(by_nodes, result) == []
    after = applied(by_nodes, result, NOW)
    event = Event.between(by_nodes, after, NOW + 1)
    assert react(after, result, event, memo)[0] == react(after, result, event)[0]
