"""Cells by nodes and link class: which one answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import Cell, PerformanceTable, Pool, Rate, Resources, Source
from busbar.scheduler.model.snapshot import Placement
from busbar.scheduler.model.table import TableView, accelerator_key, link_of, type_of

ONE = Cell("c", "H100", 8000, speed=10.0, source=Source.MEASURED, nodes=1)
TWO = Cell("c", "H100", 8000, speed=6.0, source=Source.MEASURED, nodes=2)
FOUR = Cell("c", "H100", 8000, speed=4.0, source=Source.MEASURED, nodes=4)
ANY = Cell("c", "H100", 8000, speed=9.0)


def speed(*cells: Cell, nodes: int, key: str = "H100", size: int = 8000) -> float:
    found = TableView(PerformanceTable(cells, (Rate("H100"),))).estimate(
        "c", key, "resident", size, nodes=nodes
    )
    assert found is not None
    return found.speed


def test_one_node_and_two_nodes_are_two_cells() -> None:
    assert [speed(ONE, TWO, nodes=n) for n in (1, 2)] == [10.0, 6.0]


def test_a_number_of_nodes_without_a_cell_is_as_fast_as_the_next_larger_one() -> None:
    assert [speed(ONE, TWO, FOUR, nodes=n) for n in (0, 3, 5)] == [10.0, 4.0, 4.0]


def test_a_formula_for_any_number_answers_only_while_none_is_measured() -> None:
    assert [speed(ANY, nodes=n) for n in (0, 1, 2)] == [9.0, 9.0, 9.0]
    assert [speed(ANY, TWO, nodes=n) for n in (0, 1, 2, 3)] == [6.0, 6.0, 6.0, 6.0]


def test_a_measurement_for_any_number_answers_where_no_other_was_made() -> None:
    measured = replace(ANY, source=Source.MEASURED)
    assert [speed(measured, TWO, nodes=n) for n in (1, 2, 3)] == [9.0, 6.0, 9.0]


def test_what_people_fix_for_any_number_holds_for_all() -> None:
    fixed = replace(ANY, source=Source.OVERRIDE)
    assert [speed(fixed, ONE, TWO, nodes=n) for n in (0, 1, 2)] == [9.0, 9.0, 9.0]
    assert speed(fixed, replace(TWO, speed=1.0, source=Source.OVERRIDE), nodes=2) == 1.0


def test_sizes_between_are_those_of_the_same_number_of_nodes() -> None:
    large = [replace(cell, accelerators_m=16_000, speed=2 * cell.speed) for cell in (TWO, FOUR)]
    found = speed(ONE, TWO, FOUR, *large, nodes=2, size=12_000)
    assert 6.0 < found < 12.0
    assert speed(ONE, TWO, FOUR, *large, nodes=4, size=12_000) < found


def test_the_cells_of_a_type_answer_for_link_classes_without_cells() -> None:
    fast = accelerator_key("H100", "nvlink-c2c")
    assert (type_of(fast), link_of(fast), accelerator_key("H100")) == ("H100", "nvlink-c2c", "H100")
    own = replace(ANY, accelerator=fast, speed=30.0)
    assert speed(ANY, nodes=0, key=fast) == 9.0
    assert speed(ANY, own, nodes=0, key=fast) == 30.0
    assert speed(ANY, own, nodes=0) == 9.0
    view = TableView(PerformanceTable(rates=(Rate("H100", 3.2, 700.0, 75.0),)))
    assert (view.rate(fast), view.nameplate_watts(fast), view.idle_watts(fast)) == (3.2, 700.0, 75.0)


def test_a_placement_says_its_key_and_its_nodes() -> None:
    assert Pool("p", "H100", link="pcie5").key == "H100/pcie5"
    place = Placement("p", "H100", "resident", ("a", "a", "b"), Resources(1000), link="pcie5")
    assert (place.key, place.spread) == ("H100/pcie5", 2)
    assert place == replace(place, link="")
    assert replace(place, nodes=("a",)).spread == 0


@pytest.mark.parametrize("learned", [False, True])
def test_a_view_sees_that_only_the_cell_of_other_nodes_changed(learned: bool) -> None:
    def table(two: float) -> PerformanceTable:
        cells = (ONE, replace(TWO, speed=two))
        rates = (Rate("H100"),)
        return PerformanceTable(rates=rates, learned=cells) if learned else PerformanceTable(cells, rates)

    before = TableView(table(6.0))
    assert TableView(table(6.0), before).changed == frozenset()
    assert TableView(table(5.0), before).changed == {"c"}
