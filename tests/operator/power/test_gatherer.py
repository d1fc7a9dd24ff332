"""Who is asked, and for which nodes each may answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from tests.operator.builders import NOW, SETTINGS
from tests.operator.power.parts import node, told

from busbar.kube.contracts.power import SIMULATED_LABEL, SIMULATOR, AgentAnswer, telemetry_bearer
from busbar.kube.informer import Key
from busbar.operator.power.gatherer import Gatherer, Source, sources
from busbar.operator.settings import Settings
from busbar.operator.watch.projections import Pod, Requests

KEY = b"0123456789abcdef"
CONFIGURED = replace(SETTINGS, power_key=KEY, power_simulator_url="http://simulator:8094/")
NODES = [node("real"), node("played", **{SIMULATED_LABEL: ""})]


def agent(on: str, **fields: Any) -> Pod:
    base = Pod(Key(SETTINGS.namespace, f"busbar-agent-{on}"), "u", "Running", NOW, on, Requests())
    return replace(base, owner="DaemonSet busbar-agent", ip="10.0.0.7", **fields)


def test_agents_answer_for_their_node_and_the_simulator_for_nodes_with_its_label() -> None:
    assert sources(CONFIGURED, NODES, [agent("real"), agent("played")]) == [
        Source("http://simulator:8094/telemetry", SIMULATOR, frozenset({"played"})),
        Source("http://10.0.0.7:8094/telemetry", "real", frozenset({"real"})),
    ]


@pytest.mark.parametrize(
    "pod",
    [
        replace(agent("real"), key=Key("team", "busbar-agent-real")),
        replace(agent("real"), owner="DaemonSet other"),
        replace(agent("real"), owner=""),
        replace(agent("real"), phase="Pending"),
        replace(agent("real"), ip=""),
        replace(agent("real"), host_network=True),
    ],
    ids=["another namespace", "another owner", "no owner", "pending", "no address", "host network"],
)
def test_no_other_pod_is_asked(pod: Pod) -> None:
    assert len(sources(CONFIGURED, [], [agent("real")])) == 1
    assert sources(CONFIGURED, [], [pod]) == []


def test_without_a_key_or_a_simulator_nobody_is_asked() -> None:
    assert sources(replace(CONFIGURED, power_key=b""), NODES, [agent("real")]) == []
    assert sources(replace(CONFIGURED, power_simulator_url=""), NODES, []) == []
    assert sources(CONFIGURED, NODES[:1], []) == []


def test_a_source_is_believed_for_its_nodes_only_and_the_simulator_may_not_claim_a_meter() -> None:
    gatherer = Gatherer(CONFIGURED, clock=lambda: 0.0)
    simulator = Source("s", SIMULATOR, frozenset({"played"}))
    gatherer.take(simulator, told("real", a=(1.0, 1.0)), 0.0)
    gatherer.take(simulator, told("played", backend="nvml", a=(1.0, 1.0)), 0.0)
    assert gatherer.readings == {}
    gatherer.take(simulator, told("played", a=(1.0, 1.0)), 0.0)
    gatherer.take(Source("r", "real", frozenset({"real"})), told("real", backend="nvml", a=(2.0, 1.0)), 0.0)
    assert {name: reading.is_simulated for name, reading in gatherer.readings.items()} == {
        "played": True,
        "real": False,
    }
    assert gatherer.series["real"].seconds.last(0, 1) == [2.0]
    gatherer.keep(["real"])
    assert set(gatherer.readings) == set(gatherer.series) == {"real"}


def test_an_answer_that_was_overtaken_does_not_count() -> None:
    """Two starts of an agent may be asked at the same time; what was asked for later is newer."""
    gatherer, source = Gatherer(CONFIGURED, clock=lambda: 0.0), Source("r", "real", frozenset({"real"}))
    gatherer.take(source, told("real", epoch="new", a=(2.0, 1.0)), 5.0)
    gatherer.take(source, told("real", epoch="old", a=(3.0, 1.0)), 4.0)
    assert gatherer.readings["real"].epoch == "new"


async def test_an_answer_that_is_wrong_redirects_or_is_too_long_is_no_reading() -> None:
    good = AgentAnswer(reports=(told("n", a=(1.0, 1.0)),)).model_dump_json(by_alias=True)
    answers: dict[str, Any] = {
        "/a": lambda: web.Response(text="{"),
        "/b": lambda: web.HTTPFound("/good"),
        "/c": lambda: web.Response(text=good + " " * 70_000),
        "/d": lambda: web.Response(status=503),
        "/good": lambda: web.Response(text=good),
    }
    expected = f"Bearer {telemetry_bearer(KEY, 'n')}"

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == expected
        found: web.StreamResponse = answers[request.path]()
        return found

    app = web.Application()
    app.router.add_get("/{any}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    root = f"http://127.0.0.1:{runner.addresses[0][1]}"
    gatherer = Gatherer(replace(Settings(), power_key=KEY), clock=lambda: 0.0)
    try:
        for path in ("/a", "/b", "/c", "/d", "/good"):
            assert gatherer.readings == {}, path
            await gatherer._ask(Source(root + path, "n", frozenset({"n"})))
        assert set(gatherer.readings) == {"n"}
        gatherer.ask([Source(f"{root}/good", "n", frozenset({"n"}))] * 3)
        assert len(gatherer._asked) == 1, "who is being asked is not asked again"
    finally:
        await gatherer.close()
        await runner.cleanup()
