"""What the keeper of the domains hands on to those who learn from nodes' meters."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.builders import SETTINGS, service
from tests.operator.energy.test_ledger import caches
from tests.operator.power.parts import domain, node
from tests.operator.power.test_limited_replicas import CLASS, ENGINE, Replica, known, on
from tests.operator.power.test_limited_runs import reading

from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.informer import Key
from busbar.operator.metrics import Metrics
from busbar.operator.power.keeper import PowerKeeper
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.power.work import NodeWork
from busbar.operator.queue.controller import Controller
from busbar.operator.write.writer import Writer
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
    keeper = PowerKeeper(
        of,
        cast(Writer, None),
        Controller(Metrics(), workers=1),
        SETTINGS,
        PowerMetrics(CollectorRegistry()),
        clock=lambda: clock[0],
        replicas=told,
        engine=ENGINE,
    )
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
