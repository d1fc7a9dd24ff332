"""The agent's port, and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from busbar.kube.contracts.power import (
    PATH,
    PORT,
    SIMULATOR,
    AgentAnswer,
    Backend,
    telemetry_bearer,
)
from busbar.kube.errors import SettingsError
from busbar.operator.agent.meters import BackendAbsent, Node, Sample
from busbar.operator.agent.server import Agent, probed
from busbar.operator.agent.settings import Settings, load
from busbar.operator.agent.simulated import SimulatedBoards

KEY = b"0123456789abcdef"
PLAYED = Settings(
    key=KEY, backend="simulated", host="127.0.0.1", port=0, simulated_nodes=("a", "b"), simulated_boards=2
)


async def ask(agent: Agent, bearer: str, path: str = PATH) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{agent.port}{path}", headers=headers) as answer,
    ):
        return answer.status, await answer.read()


async def test_only_the_bearer_of_this_agent_is_answered() -> None:
    agent = Agent(PLAYED, probed(PLAYED))
    await agent.start()
    try:
        for wrong in ("", KEY.decode(), telemetry_bearer(KEY, "a"), telemetry_bearer(b"x" * 16, SIMULATOR)):
            assert (await ask(agent, wrong))[0] == 401
        status, body = await ask(agent, telemetry_bearer(KEY, SIMULATOR))
        assert status == 200
        answer = AgentAnswer.model_validate_json(body)
        assert [(r.node, len(r.boards), r.boards_from) for r in answer.reports] == [
            ("a", 2, Backend.SIMULATED),
            ("b", 2, Backend.SIMULATED),
        ]
        assert (await ask(agent, "", "/healthz"))[0] == 200
    finally:
        await agent.stop()


class Breaking:
    backend = Backend.NVML
    broken = False

    def sample(self, clock_s: float) -> Sequence[Sample]:
        if self.broken:
            raise BackendAbsent("the board fell off the bus")
        return SimulatedBoards("n", 1).sample(clock_s)


async def test_meters_that_cannot_be_read_keep_their_last_report_and_its_clock() -> None:
    settings, boards, times = replace(PLAYED, node="n", backend="probe"), Breaking(), iter((1.0, 2.0, 3.0))
    agent = Agent(settings, [Node("n", "e", boards, None, (), {}, 0.0)], clock=lambda: next(times))
    await agent.start()
    try:
        boards.broken = True
        agent.sample()
        _, body = await ask(agent, telemetry_bearer(KEY, "n"))
        (told,) = AgentAnswer.model_validate_json(body).reports
        assert (told.clock_s, len(told.boards)) == (1.0, 1)
        assert b"fell off the bus" in (await ask(agent, "", "/healthz"))[1]
        boards.broken = False
        agent.sample()
        _, body = await ask(agent, telemetry_bearer(KEY, "n"))
        assert AgentAnswer.model_validate_json(body).reports[0].clock_s == 3.0
    finally:
        await agent.stop()


def test_a_machine_without_meters_says_what_was_tried() -> None:
    (node,) = probed(Settings(key=KEY, node="n"))
    assert [probe.backend for probe in node.probes] == [Backend.NVML, Backend.RAPL]
    assert all(probe.used or probe.why for probe in node.probes)


def test_settings_need_a_key_and_know_the_node(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY)
    found = load({"BUSBAR_POWER_KEY_FILE": str(file), "NODE_NAME": "gpu-1"})
    assert (found.node, found.key, found.port, found.backend) == ("gpu-1", KEY, PORT, "probe")
    with pytest.raises(SettingsError, match="BUSBAR_POWER_KEY_FILE"):
        load({"NODE_NAME": "gpu-1"})
    with pytest.raises(SettingsError, match="BUSBAR_AGENT_BACKEND"):
        load({"BUSBAR_POWER_KEY_FILE": str(file), "BUSBAR_AGENT_BACKEND": "nvml"})
