"""The table learns a cell for each number of nodes from reports that say them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import Cell, PerformanceTable, Policy, Rate, Source, TableView
from busbar.scheduler.performance.learning import learn
from busbar.scheduler.performance.reports import Report, absorb, overstated, settle
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.learner import TableLearner
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

FORMULA = Cell("g", "H100", 4000, speed=10.0, limit=30.0, memory_mib=500, watts=400.0)
START = learn(PerformanceTable((FORMULA,), (Rate("H100"), Rate("A100"))))


def told(table: PerformanceTable, *reports: tuple[int, float], size: int = 4000) -> PerformanceTable:
    """The table after reports that our engine made: (nodes, speed)."""
    for number, (nodes, speed) in enumerate(reports):
        name = f"{nodes}/{number}"
        said = Report(name, "a", "g", "H100", size, speed, 600.0, trusted=True, nodes=nodes)
        table = settle(absorb(table, [said]), name, None)
    return learn(table)


def speed(table: PerformanceTable, nodes: int, size: int = 4000) -> float:
    found = TableView(table).estimate("g", "H100", "resident", size, nodes=nodes)
    assert found is not None
    return found.speed


def test_reports_of_one_node_and_of_two_are_two_cells() -> None:
    table = told(START, *[(1, 9.0)] * 9, *[(2, 4.0)] * 9)
    assert speed(table, 1) == pytest.approx(9.0, rel=0.05)
    assert speed(table, 2) == pytest.approx(4.0, rel=0.05)
    assert speed(table, 3) == speed(table, 2)


def test_the_formulas_row_makes_room_for_measured_ones_and_gives_them_what_it_knows() -> None:
    table = told(START, (2, 4.0))
    cells = [cell for cell in table.learned if cell.accelerator == "H100"]
    assert [(cell.nodes, cell.memory_mib, cell.watts, cell.limit) for cell in cells] == [
        (2, 500, 400.0, 30.0)
    ]
    assert cells[0].source is Source.MEASURED


def test_reports_that_do_not_say_their_nodes_count_for_any_number() -> None:
    table = told(START, *[(0, 9.0)] * 9)
    assert [speed(table, nodes) for nodes in (0, 1, 2)] == [speed(table, 0)] * 3
    both = told(table, *[(2, 4.0)] * 9)
    assert speed(both, 1) == speed(both, 0) == pytest.approx(9.0, rel=0.1)
    assert speed(both, 2) == pytest.approx(4.0, rel=0.1)


def test_one_accelerator_stands_on_one_node_whatever_a_report_says() -> None:
    single = learn(replace(START, cells=(replace(FORMULA, accelerators_m=1000),)))
    assert {cell.nodes for cell in told(single, (1, 5.0), size=1000).learned} == {0}


def test_the_formulas_limit_holds_on_any_number_of_nodes() -> None:
    (record,) = absorb(START, [Report("j", "a", "g", "H100", 4000, 31.0, 60.0, nodes=2)]).records
    assert record.fault == "AboveHardwareLimit"


def test_what_a_job_claims_is_held_against_the_cell_of_its_nodes() -> None:
    table = told(START, *[(1, 9.0)] * 9, *[(2, 4.0)] * 9)
    claim = Report("liar", "b", "g", "H100", 4000, 9.0, 1000.0, nodes=2)
    assert overstated(absorb(table, [claim]), "liar") > 4000.0
    assert overstated(absorb(table, [replace(claim, nodes=1)]), "liar") < 1000.0


def test_a_simulated_cluster_finds_out_that_a_class_is_slow_on_two_nodes() -> None:
    """Four gangs of two on nodes with three free places: unknown at first, spread gangs are slow and teach it."""
    measured = {"gpu": {(2, 1): 10.0, (2, 2): 5.0}}
    gangs = tuple(
        TraceJob(f"g{i}", 900.0 * i, 20_000.0, {"gpu": 10.0}, "g", pods=2, measured=measured)
        for i in range(12)
    )
    single = tuple(TraceJob(f"s{i}", 450.0 * i, 2500.0, {"gpu": 1.0}, "s") for i in range(40))
    trace = Trace("spread", tuple(sorted((*gangs, *single), key=lambda job: job.arrival_s)))
    start = PerformanceTable((Cell("g", "gpu", 2000, speed=10.0),), (Rate("gpu"),))
    learner = TableLearner(start, noise=0.02, seed=1)
    simulate(trace, TraceCluster({"gpu": 3}, {"gpu": 3}), Policy(), Settings(), learner=learner)
    known = {cell.nodes: cell.speed for cell in learner.table.learned if cell.workload_class == "g"}
    assert known[1] == pytest.approx(10.0, rel=0.1)
    assert known[2] == pytest.approx(5.0, rel=0.1)
