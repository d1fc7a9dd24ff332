"""What the keeper of the domains hands on to those who learn from nodes' meters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.builders import service
from tests.operator.energy.test_ledger import caches, hold
from tests.operator.power.keepers import keeper_of
from tests.operator.power.parts import domain, node
from tests.operator.power.parts import told as reported
from tests.operator.power.test_limited_replicas import CLASS, ENGINE, Replica, known, on
from tests.operator.power.test_limited_runs import reading

from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.informer import Key
from busbar.operator.energy.ledger import Ledger
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.power.readings import Reading, read
from busbar.operator.power.work import NodeWork
from busbar.scheduler.power import Phase
from busbar.scheduler.power.curves import slowdown


@pytest.mark.parametrize("shared", [False, True])
def test_replicas_on_limited_boards_teach_what_limits_cost_and_what_boards_draw(shared: bool) -> None:
    """`shared`: another replica of the class has a board of the node without a limit."""
    of, pod, engine, told = caches(), on("n0"), Replica(), dict[str, ServingStatus]()
    other, second_engine = on("n0", 1, index=1), Replica()
    of.power_domains.items = {Key("", "rack"): domain("rack", 9000.0, None, "Lease", 200.0, rack="a")}
    of.nodes.items = {Key("", "n0"): node("n0", rack="a")}
    of.pods.items = {pod.key: pod} | ({other.key: other} if shared else {})
    of.services.items = {Key("team", "web"): service()}
    of.profiles.items = {Key("", CLASS): known()}
    clock = [0.0]
    keeper = keeper_of(of, clock, replicas=told, engine=ENGINE)
    works: dict[str, NodeWork] = {}
    for second in range(3000):
        clock[0] = float(second)
        part = 1.0 if second // 120 % 2 else 0.6
        answer = engine.second(second, part)
        also = second_engine.second(second, 1.0)
        if second % 6 == 0:
            told[pod.uid] = answer
            told[other.uid] = also
        limited = reading("n0", 400.0 * part, 400.0 * part, *([400.0] if shared else []))
        if shared:
            owners = {"n0-0": pod, "n0-1": pod, "n0-2": other}
            says = {u: replace(limited.meters[u], pods=("/".join(p.key),)) for u, p in owners.items()}
            limited = replace(limited, meters={**limited.meters, **says})
        keeper.gatherer.readings["n0"] = replace(limited, at_s=clock[0])
        keeper.tick()
        works = keeper.works()
    for phase, cost in ((Phase.PREFILL, 1.5), (Phase.DECODE, 0.5)):
        assert slowdown(works["n0"].curves[phase], 0.6) == pytest.approx(1 + 0.4 * cost, rel=0.05)
    drawn = {level: draw.busy for (_, level), draw in keeper.draws.of_class(CLASS).items()}
    assert drawn == {60: pytest.approx(240.0, rel=0.01), 100: pytest.approx(400.0, rel=0.01)}


def test_the_ledger_is_told_which_pods_hold_which_boards() -> None:
    """Eight boards, of which each draws 10 W more than the one before it."""
    of, metrics, clock = caches(), PowerMetrics(CollectorRegistry()), [0.0]
    hold(of, "a", "train", "red-0", 2)
    hold(of, "b", "web", "red-0", 3)
    ledger = Ledger(of, metrics, fresh_s=3.0)
    keeper = keeper_of(of, clock, metrics, energy=ledger)
    for second in range(1, 12):
        clock[0] = float(second)
        boards: dict[str, Any] = {f"b{i}": (10.0 * (i + 1), 10.0 * (i + 1) * second) for i in range(8)}
        found = read(keeper.gatherer.readings.get("red-0"), reported("red-0", second, **boards), clock[0])
        assert isinstance(found, Reading)
        keeper.gatherer.readings["red-0"] = found
        keeper.tick()
    holders = [keys[0].namespace if keys else "" for keys in keeper.boards["red-0"].values()]
    assert "".join(holders) == "aabbb"
    keeper.lessor.why = {"red-0": "raised"}
    told = {node.name: (node.why, node.boards_by_pod) for node in keeper.picture().nodes}
    assert told == {"red-0": ("raised", True), "red-1": ("", False), "blue-0": ("", False)}
    assert ledger.accounts.total("uid-a", None) == pytest.approx(10 * (10 + 20))
    assert ledger.accounts.total("uid-b", None) == pytest.approx(10 * (30 + 40 + 50))
    assert ledger.accounts.total("uid-row/unassigned", None) == pytest.approx(10 * (60 + 70 + 80))
