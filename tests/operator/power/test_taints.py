"""Which nodes have the taint of boards that are not known to be limited."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.operator.power.parts import domain
from tests.operator.power.parts import node as plain
from tests.operator.power.test_leasing import standing

from busbar.kube.contracts.power import LeaseState, LimitsReport
from busbar.operator.power.membership import membership
from busbar.operator.power.readings import Reading
from busbar.operator.power.taints import TAINT, taints
from busbar.operator.watch.projections import Node, project_node
from busbar.operator.write.actions import TaintNode

LIMITED = domain("red", 5000.0, None, "Lease", 200.0, rack="red")
SAFE = standing("n0")  # at its lowest limits, which were read back
PUT, AWAY = TaintNode("n0", TAINT, is_first=True), TaintNode("n0", TAINT, 0)


def node(tainted: bool = False) -> Node:
    return replace(plain("n0", rack="red"), is_tainted=tainted, power_taint=0 if tainted else -1)


def changes(
    reading: Reading | None, tainted: bool = False, policy: str = "Lease", heard: bool = True
) -> list[TaintNode]:
    of = LIMITED if policy == "Lease" else domain("red", 5000.0, rack="red")
    readings = {} if reading is None else {"n0": reading}
    found = membership([of], [node()])
    return taints(found, [node(tainted)], readings, -3.0, heard=heard)


def in_state(state: LeaseState) -> Reading:
    return replace(SAFE, limits=LimitsReport(state=state, sequence=1))


def unread() -> Reading:
    return replace(SAFE, meters={name: replace(meter, limit_w=None) for name, meter in SAFE.meters.items()})


@pytest.mark.parametrize(
    ("reading", "safe"),
    [
        (SAFE, True),
        (in_state(LeaseState.LEASED), True),
        (None, False),  # never heard
        (standing("n0", at_s=-4.0), False),  # silent
        (replace(SAFE, limits=None), False),  # it may set no limits
        (in_state(LeaseState.RELEASED), False),
        (unread(), False),
        (replace(unread(), meters={k: replace(m, refuses=True) for k, m in unread().meters.items()}), True),
    ],
)
def test_a_node_that_should_be_limited_is_tainted_until_limits_were_read_back(
    reading: Reading | None, safe: bool
) -> None:
    assert changes(reading) == ([] if safe else [PUT])
    assert changes(reading, tainted=True) == ([AWAY] if safe else [])
    assert changes(reading, heard=False) == [], "an operator that has just started taints nobody"
    assert changes(reading, tainted=True, heard=False) == ([AWAY] if safe else [])
    assert changes(reading, policy="Observe") == []
    assert changes(reading, tainted=True, policy="Observe") == [AWAY]


def test_the_taint_is_found_among_others_and_no_other_is_touched() -> None:
    others = [
        {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
        {"key": "a", "effect": "NoSchedule"},
    ]
    seen = project_node({"metadata": {"name": "n0"}, "spec": {"taints": [*others, TAINT]}})
    assert (seen.power_taint, seen.is_tainted) == (2, True)
    assert ("busbar.dev/power-not-ready", "", "NoSchedule") in seen.taints, "no new work is placed there"
    assert (node().power_taint, project_node({"metadata": {"name": "n0"}}).is_tainted) == (-1, False)
    assert TaintNode("n0", TAINT, 2).patch == [
        {"op": "test", "path": "/spec/taints/2/key", "value": "busbar.dev/power-not-ready"},
        {"op": "remove", "path": "/spec/taints/2"},
    ]
    assert TaintNode("n0", TAINT).patch == [{"op": "add", "path": "/spec/taints/-", "value": TAINT}]
    assert PUT.patch[0] == {"op": "test", "path": "/spec/taints", "value": None}
