"""`busbar power` against the real API, and the lines that it makes of what it is told."""

from __future__ import annotations

import json
from typing import Any

from tests.cli.conftest import Site

from busbar.cli.commands.power import _ordered, bar, explained, limits, moves
from busbar.kube.contracts.power import LeaseState
from busbar.kube.contracts.power_view import FeedPower, NodePower


async def test_power_shows_the_tree_of_feeds_and_the_nodes(site: Site) -> None:
    done = await site.busbar("power")
    assert done.code == 0, done.err
    assert done.lines[0].split() == (
        [
            "DOMAIN",
            "USE",
            "DRAW",
            "LEASED",
            "BUDGET",
            "HEADROOM",
            "NODES",
            "CAPPED",
            "SILENT",
            "SIMULATED",
            "WORK/KWH",
            "METER",
            "REASON",
        ]
    )
    assert done.lines[1].startswith("row ")
    assert "[....................]    ?" in done.lines[1]
    assert done.lines[2].startswith("  rack-cpu ")
    assert "[########++++++++++..]  90%" in done.lines[2]
    assert done.lines[2].split()[-13:] == [
        "1.9",
        "kW",
        "2.0",
        "kW",
        "180",
        "W",
        "2",
        "1",
        "1",
        "2",
        "1.25",
        "-3.1%",
        "Leasing",
    ]
    assert done.lines[1].split()[4] == "-", "nothing is leased"
    assert "bobs" not in done.out
    nodes = await site.busbar("power", "nodes")
    shown = " ".join(nodes.lines[1].split())
    assert shown == "cpu-node-0 rack-cpu 800 W 850 W leased, capped 1.0 kW 8 yes simulated none 0s"
    assert nodes.lines[2].endswith("0s silent")
    assert len(json.loads((await site.busbar("power", "nodes", "-o", "json")).out)["items"]) == 4
    assert (await site.busbar("power", "-o", "name")).lines == ["row", "rack-cpu", "rack-h100"]


async def test_power_watch_looks_again_and_says_what_has_changed(site: Site) -> None:
    site.monkeypatch.setattr("busbar.cli.commands.power.time.sleep", lambda seconds: None)
    done = await site.busbar("power", "watch", "--times", "2")
    assert done.code == 0
    assert done.out == 2 * (await site.busbar("power")).out
    assert (await site.busbar("power", "watch", "--every", "0")).code == 2


def test_leases_limits_and_silence_that_have_changed_are_told() -> None:
    def node(name: str, lease: float | None = None, **more: Any) -> NodePower:
        state = LeaseState.STANDING if lease is None else LeaseState.LEASED
        return NodePower(name=name, lease_watts=lease, limits=state, silent=more.get("silent", False))

    before = {n.name: n for n in (node("a", 4000.0), node("b", 4000.0), node("c"), node("d"), node("e"))}
    now = {
        n.name: n
        for n in (node("a", 4050.0), node("b", 3000.0), node("c", 900.0), node("d", silent=True), node("f"))
    }
    assert list(moves(before, now)) == [
        "b: lease 4.0 kW -> 3.0 kW",
        "c: standing -> leased",
        "d: silent",
        "f: new",
        "e: gone",
    ]


async def test_power_explain_says_what_limits_a_node_or_the_nodes_of_a_job(site: Site) -> None:
    done = await site.busbar("power", "explain", "cpu-node-0")
    assert done.code == 0, done.err
    assert done.lines[0] == (
        "cpu-node-0 hangs on rack-cpu. It draws 800 W, at most 1.0 kW, and ? with its boards at their lowest limits. "
        "A lease of 850 W limits it, by the policy Lease of its domain. Why: there are watts enough. "
        "It is known which pods hold which of its boards."
    )
    assert [line.split()[0] for line in done.lines[1:]] == ["DOMAIN", "row", "rack-cpu"]
    told = json.loads((await site.busbar("power", "explain", "cpu-node-1", "-o", "json")).out)
    assert ([n["name"] for n in told["nodes"]], [d["name"] for d in told["domains"]]) == (
        ["cpu-node-1"],
        ["rack-cpu", "row"],
    )
    await site.busbar("apply", "-f", site.manifest())
    waits = await site.busbar("power", "explain", "stdlib")
    assert (waits.code, waits.out) == (0, "stdlib has no nodes: nobody has looked at it yet\n")
    stored = site.world.kube.objects["trainingjobs", "ada-lab", "stdlib"]
    stored["status"] = {"phase": "Queued", "message": "Needs 2,696 W on the power domain rack-cpu."}
    waits = await site.busbar("power", "explain", "job/stdlib", "-o", "table")
    assert waits.out == "stdlib has no nodes: Needs 2,696 W on the power domain rack-cpu.\n"
    place = {
        "id": "x",
        "pool": "cpu",
        "accelerator": "cpu",
        "pods": 2,
        "nodes": ["cpu-node-1", "gone", "cpu-node-1"],
    }
    stored["status"] = {
        "phase": "Running",
        "attempt": 1,
        "admission": {**place, "acceleratorsPerPod": 1, "powerCapPercent": 70, "powerCapWatts": 280},
        "power": {"attempt": 1, "limitPercent": 70, "seconds": 90, "slowdown": 1.07},
    }
    placed = await site.busbar("power", "explain", "stdlib")
    assert placed.lines[0] == (
        "stdlib has its place on cpu-node-1, gone. Its power cap: 70 % of each board's limit (280 W), until its feed has "
        "watts left. Power limits: boards at 70 % of their highest, 1.07 times as long as without limits so far. "
        "Nothing is known of the watts of gone."
    )
    assert "It is silent: these are the numbers of 0s ago." in placed.lines[1]
    assert (await site.busbar("power", "explain", "nobody")).code == 3


def test_an_explained_node_says_why_nothing_limits_it() -> None:
    red = FeedPower(name="red", budget_watts=500.0, ready=False, reason="FloorAboveBudget", nodes=1)
    node = NodePower(
        name="n", feeds=("red",), watts=5.0, floor_watts=300.0, nameplate_watts=900.0, silent=False
    )
    says = {
        None: "Its agent may set no limits",
        LeaseState.STANDING: "no lease in force, so its boards are at their lowest limits",
        LeaseState.RELEASED: "Its boards are released",
    }
    for state, text in says.items():
        told = explained(node.model_copy(update={"limits": state}), {"red": red})
        assert text in told
        assert told.endswith("Even the lowest limits are above the budget of red.")
    assert explained(NodePower(name="n"), {}) == (
        "n hangs on no power domain. It has never reported what it draws."
    )


def test_boards_that_refuse_limits_or_have_anothers_and_whose_holders_are_unknown_are_told() -> None:
    node = NodePower(
        name="n", watts=5.0, boards=8, limits=LeaseState.LEASED, capped=True, silent=False, refusing_boards=2
    )
    assert limits(node) == "leased, capped, 2 refuse"
    told = explained(node, {})
    assert "2 of its 8 boards take no limit." in told
    assert "Which pods hold which of its boards is not known" in told
    conflict = node.model_copy(update={"refusing_boards": 0, "conflicting_boards": 1, "boards_by_pod": True})
    assert limits(conflict) == "leased, capped, 1 in conflict"
    told = explained(conflict, {})
    assert "Something else writes limits of 1 of its 8 boards." in told
    assert told.endswith("It is known which pods hold which of its boards.")
    others = node.model_copy(update={"limits": None})
    assert limits(others) == "not ours, capped", "no limits are set there, so none is refused"
    assert "take no limit" not in explained(others, {})


def test_a_bar_ends_at_the_budget_and_says_when_it_is_passed() -> None:
    assert bar(None, 0.0, 100.0) == "[....................]    ?"
    assert bar(0.0, 0.0, 100.0) == "[....................]   0%"
    assert bar(90.0, 20.0, 100.0) == "[##################++> 110%"
    assert bar(None, 50.0, 100.0) == "[++++++++++..........]  50%"


def test_a_tree_of_feeds_shows_each_once_whatever_their_parents() -> None:
    def feed(name: str, parent: str) -> FeedPower:
        return FeedPower(name=name, parent=parent, budget_watts=1.0, ready=False, reason="Cycle", nodes=0)

    found = [feed("a", "b"), feed("b", "a"), feed("c", "gone"), feed("d", "c")]
    assert [(each.name, depth) for each, depth in _ordered(found)] == [("c", 0), ("d", 1), ("a", 0), ("b", 0)]
