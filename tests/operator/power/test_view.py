"""What others are told of feeds and nodes."""

from __future__ import annotations

from dataclasses import replace

from tests.operator.power.parts import domain, node, reading

from busbar.kube.contracts.power import LeaseState, LimitsReport
from busbar.operator.power.membership import membership
from busbar.operator.power.view import picture


def test_feeds_say_what_a_watt_hour_costs_in_work_where_they_hold_jobs_back() -> None:
    found = membership([domain("row", 1000.0), domain("open", 1000.0)], [node("a")])
    told = picture(found, {}, {}, 0.0, 3.0, {}, {}, {"row": 0.00123456}, {})
    assert {feed.name: feed.work_per_kilowatt_hour for feed in told.feeds} == {"row": 1.2346, "open": None}


def test_nodes_say_why_they_have_their_lease_which_boards_take_none_and_whether_holders_are_known() -> None:
    found = membership([domain("row", 1000.0, rack="a")], [node(name, rack="a") for name in "abc"])
    plain = reading("a", 300.0, boards=2)
    meters = {**plain.meters, "b1": replace(plain.meters["b1"], refuses=True)}
    limits = LimitsReport(state=LeaseState.LEASED, sequence=1, conflicts=("b0",))
    readings = {
        "a": replace(plain, meters=meters, limits=limits),
        "b": reading("b", 300.0, boards=2),
    }
    nodes = picture(found, {}, readings, 0.0, 3.0, {}, {}, {}, {}, {"a": "raised"}, {"b"}).nodes
    assert [(n.name, n.why, n.refusing_boards, n.conflicting_boards, n.boards_by_pod) for n in nodes] == [
        ("a", "raised", 1, 1, False),
        ("b", "", 0, 0, True),
        ("c", "", 0, 0, False),
    ]
