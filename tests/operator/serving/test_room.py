"""What a service is told of the scheduler's last snapshot."""

from __future__ import annotations

from dataclasses import replace

from tests.operator.builders import service
from tests.scheduler.build import gpus, tenant

from busbar.operator.serving.room import RoomReader, held_back, no_less_than
from busbar.scheduler import Node, Pool, Snapshot
from busbar.scheduler.autoscale.columns import Column, LimitKind, Limits, Row
from busbar.scheduler.explain.service_room import BudgetLeft, Spent

SNAPSHOT = Snapshot(
    pools=(Pool("l4", "L4"),), nodes=(Node("n", "l4", gpus(4)),), tenants=(tenant("team", L4=(1, 1, None)),)
)


def test_each_snapshot_is_read_once_and_each_service_by_its_shape_and_tenant() -> None:
    reader, of = RoomReader(), service(shape={"acceleratorsPerPod": 1})
    assert reader.of(None, of, "team", ["l4"]) is None
    found = reader.of(SNAPSHOT, of, "team", ["l4"])
    assert found is not None
    assert (found.stock, [(row.name, row.most) for row in found.rows]) == (
        {"l4": 4}, [("the tenant's quota of L4", 2.0)]
    )  # fmt: skip
    assert reader.of(SNAPSHOT, of, "team", ["l4"]) is found
    paid = reader.of(SNAPSHOT, of, "team", ["l4"], [BudgetLeft("day", Spent.ACCELERATOR_HOURS, 3.0, 9.0)])
    assert paid is not None
    assert [row.most for row in paid.rows] == [2.0, 3.0], "what is left of budgets is read each time"
    other = reader.of(SNAPSHOT, of, "guest", ["l4"])
    assert other is not None
    assert other.rows == ()
    assert reader.of(replace(SNAPSHOT), of, "team", ["l4"]) is not found
    assert found.short == frozenset()
    lacks = reader.of(replace(SNAPSHOT), of, "team", ["l4"], lacking=["rack"])
    assert lacks is not None
    assert lacks.short == {"the power of domain rack"}


def test_a_row_is_never_below_what_is_there_and_names_itself_where_it_holds_back() -> None:
    rows = (Row("the quota", {"l4": 2.0}, 3.0, LimitKind.QUOTA),)
    assert no_less_than(rows, {"l4": 1})[0].most == 3.0
    assert no_less_than(rows, {"l4": 4, "t4": 9})[0].most == 8.0
    column, limits = Column("l4", "l4", 1.0, (2.0,)), Limits(rows=rows)
    assert held_back([column], limits, {"l4": 1}, {"l4": 2.0}, 2.0) == ""
    assert held_back([column], limits, {"l4": 1}, {"l4": 2.0}, 5.0) == (
        "5 requests/s need more replicas, held back by the quota."
    )
    assert held_back([column], Limits(), {"l4": 1}, {"l4": 2.0}, 5.0) == ""
