"""What goes into a round, and what a round says; that nothing is overrun is in `test_failures.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.power.parts import domain, node, told

from busbar.kube.contracts.power import MOST_SEQUENCE, LeaseState, LimitsReport
from busbar.operator.power.board_parts import Parts
from busbar.operator.power.leasing import Round, new_leader, node_power, take_round
from busbar.operator.power.lessor import control_settings
from busbar.operator.power.membership import membership
from busbar.operator.power.readings import Metered, Reading, read
from busbar.operator.power.work import NodeWork, WorkKind
from busbar.operator.settings import Settings

CONTROL = control_settings(Settings())
NODES = [node(f"n{i}", rack="a") for i in range(2)]
RACK = domain("rack", 2000.0, None, "Lease", 200.0, rack="a")


def standing(name: str, at_s: float = 0.0, sequence: int = 0, **boards: tuple[float, float]) -> Reading:
    """A node at its standing cap; boards are of 100 to 400 W."""
    meters: dict[str, Any] = boards or {"a": (100.0, 0.0)}
    found = read(None, told(name, 10.0 + at_s, **meters), at_s)
    assert isinstance(found, Reading)
    limited = {uuid: replace(meter, limit_w=100.0) for uuid, meter in found.meters.items()}
    limits = LimitsReport(state=LeaseState.STANDING, sequence=sequence)
    return replace(found, meters=limited, limits=limits)


def one_round(*readings: Reading) -> Round:
    found = membership([RACK], NODES)
    return take_round(new_leader(0.0), found, {r.node: r for r in readings}, 0.5, CONTROL)


def test_the_first_leases_are_the_lowest_limits_and_count_from_the_nodes_clock() -> None:
    made = one_round(standing("n0"), standing("n1", sequence=9))
    assert {m.node: (m.watts, m.host_watts, m.clock_s, m.ttl_s) for m in made.messages} == {
        "n0": (300.0, 200.0, 10.0, 10.0),
        "n1": (300.0, 200.0, 10.0, 10.0),
    }
    assert made.feeds["rack"].leased_w == 1200.0, "nobody knows yet what was promised to them before"
    assert all(m.sequence > 2**20 for m in made.messages)
    held = "held at the floor until the node has confirmed a lease of this controller"
    assert made.why == {"n0": held, "n1": held}


def test_boards_that_refuse_count_with_the_host_and_a_node_of_none_else_is_not_controlled() -> None:
    reading = standing("n0", a=(100.0, 0.0), b=(100.0, 0.0))
    refusing = replace(reading, meters={**reading.meters, "b": replace(reading.meters["b"], refuses=True)})
    power = node_power(refusing, 200.0)
    assert (power.host_w, power.boards, power.floor_w, power.nameplate_w) == (600.0, 1, 700.0, 1000.0)
    assert power.controllable
    every = {uuid: replace(meter, refuses=True) for uuid, meter in reading.meters.items()}
    assert not node_power(replace(reading, meters=every), 200.0).controllable
    assert not node_power(replace(reading, limits=None), 200.0).controllable
    full = one_round(standing("n0", sequence=MOST_SEQUENCE), standing("n1"))
    assert [m.node for m in full.messages] == ["n1"], "no sequence is left for n0"


@pytest.mark.parametrize(("host_w", "expected"), [(None, 1400.0), (300.0, 700.0), (0.0, 400.0)])
def test_what_the_domain_says_of_the_host_goes_before_its_meter(
    host_w: float | None, expected: float
) -> None:
    reading = standing("n0")
    with_host = replace(reading, meters={**reading.meters, "host": Metered(90.0, 0.0, 1000.0, 1000.0)})
    assert node_power(with_host, host_w).nameplate_w == expected


def test_the_part_of_a_lease_for_boards_leaves_refusing_boards_to_the_agent() -> None:
    """The agent takes the nameplates of such boards off by itself, at once when it sees it."""
    reading = standing("n0", a=(100.0, 0.0), b=(100.0, 0.0))
    refusing = replace(reading, meters={**reading.meters, "b": replace(reading.meters["b"], refuses=True)})
    (message,) = [m for m in one_round(refusing, standing("n1")).messages if m.node == "n0"]
    assert (message.watts, message.host_watts) == (700.0, 200.0)


def test_nodes_on_no_feed_are_released_and_those_that_may_not_set_limits_are_left_alone() -> None:
    away, dumb = standing("away"), replace(standing("dumb"), limits=None)
    silent = standing("silent", at_s=-9.0)
    made = take_round(
        new_leader(0.0), membership([], []), {r.node: r for r in (away, dumb, silent)}, 0.5, CONTROL
    )
    assert [(m.node, m.watts) for m in made.messages] == [("away", None)]
    assert made.feeds == {}
    released = replace(
        away, limits=LimitsReport(state=LeaseState.RELEASED, sequence=made.messages[0].sequence)
    )
    again = take_round(made.state, membership([], []), {"away": released}, 1.5, CONTROL)
    assert again.messages == ()


def test_a_node_that_returns_counts_whole_until_it_confirms_what_was_sent_since() -> None:
    """Leases from before it left may still be on their way."""
    inside, outside = membership([RACK], NODES), membership([RACK], NODES[1:])
    made, told = one_round(standing("n0"), standing("n1")), dict.fromkeys(("n0", "n1"), 0)
    leased_w = []
    for second, found in enumerate((inside, outside, inside, inside), start=1):
        told |= {m.node: m.sequence for m in made.messages}
        readings = {name: standing(name, float(second), told[name]) for name in told}
        made = take_round(made.state, found, readings, second + 0.5, CONTROL)
        leased_w.append(made.feeds["rack"].leased_w)
    assert leased_w[0] < 2 * 600.0, "both have confirmed a lease"
    assert leased_w[2] >= 600.0 + 300.0, "n0 with its nameplate"
    assert made.state.counted["n0"][1] < 600.0


def test_a_domain_below_one_at_fault_is_leased_and_bound_by_the_next_sound_one() -> None:
    """The row and another domain select one node equally; the rack below the row has nodes of its own."""
    tree = [
        domain("hall", 1500.0, None, "Static", 200.0),
        domain("row", 1400.0, "hall", "Static", 200.0, row="a"),
        domain("other", 1400.0, None, "Static", 200.0, row="a"),
        domain("rack", 1300.0, "row", "Static", 200.0, rack="a"),
    ]
    found = membership(tree, [*NODES, node("lost", row="a")])
    assert set(found.faults) == {"row", "other"}
    assert {name: each.parent for name, each in found.sound.items()} == {"hall": None, "rack": "hall"}
    readings = {name: standing(name) for name in ("n0", "n1", "lost")}
    made = take_round(new_leader(0.0), found, readings, 0.5, CONTROL)
    assert {message.node for message in made.messages} == {"n0", "n1"}
    assert set(made.feeds) == {"hall", "rack"}
    assert made.feeds["hall"].leased_w == 1800.0, "with the nameplate of the node that nobody leases"


def test_the_cap_of_a_job_goes_with_the_lease_and_its_boards_want_no_more() -> None:
    """Two nodes that draw all they may: the one under a cap of half leaves what it cannot use to the other."""
    found, state, caps = membership([RACK], NODES), new_leader(0.0), {"n0": 0.5}
    told, leased = dict.fromkeys(("n0", "n1"), 0), dict.fromkeys(("n0", "n1"), 300.0)
    for second in range(40):
        readings = {}
        for name, sequence in told.items():
            limit_w = min(400.0 * caps.get(name, 1.0), leased[name] - 200.0)
            reading = standing(name, float(second), sequence, a=(limit_w, limit_w * second))
            meters = {"a": replace(reading.meters["a"], limit_w=limit_w)}
            state_ = LeaseState.LEASED if sequence else LeaseState.STANDING
            limits = LimitsReport(state=state_, sequence=sequence)
            readings[name] = replace(reading, meters=meters, limits=limits)
        tight = [domain("rack", 1000.0, None, "Lease", 200.0, rack="a")]
        works = {name: NodeWork(parts=Parts(part)) for name, part in caps.items()}
        made = take_round(state, membership(tight, NODES), readings, second + 0.5, CONTROL, works)
        state = made.state
        for message in made.messages:
            told[message.node], leased[message.node] = message.sequence, message.watts or 0.0
            assert message.board_part == caps.get(message.node, 1.0)
    assert found.is_limited("n0")
    assert sum(leased.values()) <= 990.0
    assert leased["n0"] == pytest.approx(400.0, abs=10.0), "200 W of the host, and half of a board of 400 W"
    assert leased["n1"] > 570.0
    assert made.feeds["rack"].forecast_w == pytest.approx(sum(leased.values()), abs=12.0)


def test_boards_with_parts_of_their_own_want_no_more_and_the_rest_goes_to_other_nodes() -> None:
    """Two nodes of two boards that draw all they may; one board may draw half, and no other is slowed for it."""
    tight = membership([domain("rack", 1700.0, None, "Lease", 200.0, rack="a")], NODES)
    works = {"n0": NodeWork(parts=Parts(named={"a": 0.5}))}
    state, held = new_leader(0.0), {name: (0, {"a": 100.0, "b": 100.0}) for name in ("n0", "n1")}
    leased: dict[str, float] = {}
    for second in range(40):
        readings = {}
        for name, (sequence, limits_w) in held.items():
            drawn = {uuid: (watts, watts * second) for uuid, watts in limits_w.items()}
            reading = standing(name, float(second), sequence, **drawn)
            meters = {u: replace(meter, limit_w=limits_w[u]) for u, meter in reading.meters.items()}
            state_ = LeaseState.LEASED if sequence else LeaseState.STANDING
            readings[name] = replace(
                reading, meters=meters, limits=LimitsReport(state=state_, sequence=sequence)
            )
        made = take_round(state, tight, readings, second + 0.5, CONTROL, works)
        state = made.state
        for message in made.messages:
            parts = message.board_parts
            assert (message.board_part, parts) == (1.0, {"a": 0.5} if message.node == "n0" else {})
            leased[message.node] = message.watts or 0.0
            boards_w = leased[message.node] - 200.0
            low = min(boards_w / 2, 400.0 * parts.get("a", 1.0))
            held[message.node] = message.sequence, {"a": low, "b": min(boards_w - low, 400.0)}
    assert 700.0 < leased["n0"] < 800.0 + 20.0, (
        "a host, half a board and a board at most, and what the wants are rounded by"
    )
    assert leased["n1"] - leased["n0"] > 100.0
    assert 1600.0 < sum(leased.values()) <= 1683.0


def test_of_two_nodes_with_the_same_peaks_the_one_whose_bucket_is_empty_gets_more() -> None:
    found = membership([domain("rack", 720.0, None, "LeaseWithBurst", 200.0, rack="a")], NODES)
    state, held = new_leader(0.0), {f"n{i}": (0, 0.0, 0.0) for i in range(2)}
    for second in range(1, 61):
        readings = {}
        for name, (sequence, lease_w, burst_j) in held.items():
            watts = 300.0 if second % 3 == 0 else 150.0
            reading = standing(name, float(second), sequence, a=(watts, 0.0))
            limits = LimitsReport(
                state=LeaseState.LEASED if sequence else LeaseState.STANDING,
                sequence=sequence,
                lease_watts=lease_w or None,
                free=burst_j > 0,
                bucket_j=(burst_j if name == "n1" else 0.0) if burst_j else None,
            )
            readings[name] = replace(reading, limits=limits)
        made = take_round(state, found, readings, second + 0.1, CONTROL)
        state = made.state
        for message in made.messages:
            held[message.node] = (message.sequence, message.watts or 0.0, message.burst_j)
    assert held["n0"][2] > 0, "peaks were seen"
    assert held["n0"][1] > held["n1"][1] + 10.0
    assert held["n0"][1] + held["n1"][1] <= 0.99 * 720.0


def shared(works: dict[str, NodeWork]) -> dict[str, float]:
    """Leases after a minute on a feed for 1,000 W: n0 peaks at 400 W for a second of three, n1 draws what it may."""
    found = membership([domain("rack", 1000.0, None, "Lease", 200.0, rack="a")], NODES)
    state, told, leased = new_leader(0.0), {"n0": 0, "n1": 0}, {"n0": 300.0, "n1": 300.0}
    for second in range(1, 61):
        readings = {}
        for name, sequence in told.items():
            limit_w = leased[name] - 200.0
            watts = limit_w if name == "n1" or second % 3 == 0 else 150.0
            reading = standing(name, float(second), sequence, a=(min(watts, limit_w), 0.0))
            meters = {"a": replace(reading.meters["a"], limit_w=limit_w)}
            held = LeaseState.LEASED if sequence else LeaseState.STANDING
            readings[name] = replace(
                reading, meters=meters, limits=LimitsReport(state=held, sequence=sequence)
            )
        made = take_round(state, found, readings, second + 0.1, CONTROL, works)
        state = made.state
        for message in made.messages:
            told[message.node], leased[message.node] = message.sequence, message.watts or 0.0
    assert sum(leased.values()) <= 990.0
    return leased


def test_who_serves_first_gets_watts_before_who_trains() -> None:
    plain = shared({})
    assert plain["n0"] == pytest.approx(plain["n1"], abs=30.0), "nothing is known of either"
    training = NodeWork(kind=WorkKind.TRAINING)
    serving = NodeWork(weight=4.0, first_token=1.0, kind=WorkKind.SERVING)
    known = shared({"n0": serving, "n1": training})
    assert known["n0"] > known["n1"] + 100.0
    assert known["n0"] > plain["n0"] + 50.0
    low = shared({"n0": replace(serving, weight=0.25, first_token=0.0), "n1": replace(training, weight=4.0)})
    assert low["n1"] > low["n0"] + 100.0
