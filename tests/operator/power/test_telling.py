"""Which nodes the scheduler may count on as telling who holds their boards."""

from __future__ import annotations

from dataclasses import replace

from tests.operator.energy.test_ledger import caches
from tests.operator.power.keepers import keeper_of
from tests.operator.power.parts import domain, node
from tests.operator.power.test_limited_runs import reading

from busbar.kube.informer import Key
from busbar.operator.power.readings import Reading
from busbar.operator.power.telling import KEPT_S, TellingNodes


def test_a_node_stays_one_for_a_minute_after_nobody_says_it_any_more() -> None:
    nodes = TellingNodes()
    assert nodes.look((), 0.0) == frozenset()
    assert nodes.look(("n0", "n1"), 1.0) == {"n0", "n1"}
    assert nodes.look(("n1",), KEPT_S) == {"n0", "n1"}
    assert nodes.look(("n1",), 1.0 + KEPT_S) == {"n1"}
    assert nodes.look((), 1.0 + KEPT_S) == {"n1"}


def said(name: str, *pods: str | None) -> Reading:
    """A node with two boards."""
    made = reading(name, 400.0, 400.0)
    boards = {u: b for u, b in made.meters.items() if u != "host"}
    told = zip(boards.items(), pods, strict=True)
    found = {uuid: replace(board, pods=None if who is None else (who,)) for (uuid, board), who in told}
    return replace(made, meters={**made.meters, **found})


def test_the_keeper_tells_the_rounds_of_limited_nodes_and_wakes_one_when_they_are_others() -> None:
    of, woken, clock = caches(), list[frozenset[str]](), [100.0]
    of.power_domains.items = {
        Key("", "rack"): domain("rack", 9000.0, None, "Lease", 200.0, rack="a"),
        Key("", "seen"): domain("seen", 9000.0, rack="b"),
    }
    of.nodes.items = {
        Key("", name): node(name, rack=rack) for name, rack in (("n0", "a"), ("n1", "a"), ("n2", "b"))
    }
    keeper = keeper_of(of, clock, wake=lambda: woken.append(of.telling))
    readings = keeper.gatherer.readings
    for name in ("n0", "n2"):
        readings[name] = said(name, "team/a", "team/b")
    readings["n1"] = said("n1", "team/c", None)
    keeper.tick()
    keeper.tick()
    assert keeper.boards["n0"] == {"n0-0": (Key("team", "a"),), "n0-1": (Key("team", "b"),)}
    assert woken == [{"n0"}], "of n1 nobody says it whole, and n2 is only observed"
    readings["n0"], readings["n1"] = said("n0", None, None), said("n1", "team/c", "team/c")
    clock[0] += 1.0
    keeper.tick()
    assert "n0" not in keeper.boards
    clock[0] += KEPT_S
    keeper.tick()
    assert woken == [{"n0"}, {"n0", "n1"}, {"n1"}]
