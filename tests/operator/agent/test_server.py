"""The agent's port, and its settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from tests.operator.agent.boards import Clock
from tests.operator.agent.kubelet import Kubelet, answer
from tests.operator.agent.lease_keys import ANOTHER_KEY, CERTIFICATE
from tests.operator.agent.lease_keys import KEY as SIGNING

from busbar.kube.contracts.power import (
    LEASE_PATH,
    PATH,
    PORT,
    SIGNATURE,
    SIMULATOR,
    AgentAnswer,
    Backend,
    LeaseState,
    lease_bearer,
    telemetry_bearer,
)
from busbar.kube.errors import SettingsError
from busbar.operator.agent import heartbeat
from busbar.operator.agent.board_pods import KEPT_S
from busbar.operator.agent.limits import BoardLimit
from busbar.operator.agent.meters import BackendAbsent, Node, Sample
from busbar.operator.agent.probing import probed
from busbar.operator.agent.server import Agent
from busbar.operator.agent.settings import Settings, load
from busbar.operator.agent.signing import Signer
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


async def post(agent: Agent, bearer: str, body: object, key: bytes = SIGNING) -> tuple[int, str]:
    text = body if isinstance(body, str) else json.dumps(body)
    headers = {"Authorization": f"Bearer {bearer}", SIGNATURE: Signer(key).sign(text.encode())}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{agent.port}{LEASE_PATH}", headers=headers, data=text) as answer,
    ):
        return answer.status, await answer.text()


LEASES = lease_bearer(KEY, SIMULATOR)


async def test_leases_are_taken_refused_and_reported() -> None:
    settings, clock = replace(PLAYED, set_limits=True, lease_cert=CERTIFICATE), Clock()
    agent = Agent(settings, probed(settings), clock)
    await agent.start()
    try:
        _, body = await ask(agent, telemetry_bearer(KEY, SIMULATOR))
        first = AgentAnswer.model_validate_json(body).reports
        assert [r.limits and r.limits.state for r in first] == [LeaseState.STANDING] * 2
        assert [b.limit_watts for b in first[0].boards] == [100.0, 100.0], "from the start"
        message = {"node": "a", "epoch": first[0].epoch, "sequence": 7, "watts": 2350.0, "hostWatts": 1750.0}
        message |= {"clockS": clock.now_s, "ttlS": 10.0}
        release = {"node": "b", "epoch": first[1].epoch, "sequence": 1}
        assert (await post(agent, LEASES, {"leases": [message, release]}))[0] == 200
        clock.now_s += 0.5
        agent.sample()
        _, body = await ask(agent, telemetry_bearer(KEY, SIMULATOR))
        a, b = AgentAnswer.model_validate_json(body).reports
        assert a.limits is not None
        assert (a.limits.state, a.limits.sequence, a.limits.remaining_s) == (LeaseState.LEASED, 7, 9.0)
        assert [board.limit_watts for board in a.boards] == [300.0, 300.0]
        assert all(board.watts <= 300.0 for board in a.boards)
        assert [board.limit_watts for board in b.boards] == [400.0, 400.0]
        status, text = await post(agent, LEASES, {"leases": [message, {**release, "sequence": 2}]})
        assert status == 409
        assert json.loads(text)["refused"] == [
            {"node": "a", "why": "its sequence is 7, and 7 was taken already"}
        ]
        newer = {"leases": [{**release, "sequence": 5}]}
        status, text = await post(agent, LEASES, newer, ANOTHER_KEY)
        assert (status, "the signature is not" in text) == (401, True)
        elsewhere = {**message, "node": "c", "sequence": 9}
        assert (await post(agent, LEASES, {"leases": [elsewhere]}))[0] == 409
        bad: tuple[object, ...] = ("{", {"leases": []}, {"leases": [{**message, "watts": -1}]})
        for body_ in (*bad, json.dumps({"leases": [{**message, "watts": float("nan")}]})):
            status, text = await post(agent, LEASES, body_)
            assert (status, "Invalid" in text) == (422, True), body_
    finally:
        await agent.stop()


async def test_leases_need_their_own_bearer_and_an_agent_that_may_set_limits() -> None:
    agent = Agent(PLAYED, probed(PLAYED))
    await agent.start()
    try:
        order = {"leases": [{"node": "a", "epoch": "e", "sequence": 1}]}
        for wrong in ("", telemetry_bearer(KEY, SIMULATOR), lease_bearer(KEY, "a")):
            assert (await post(agent, wrong, order))[0] == 401
        status, text = await post(agent, LEASES, order)
        assert (status, "power.agent.setLimits" in text) == (403, True)
        _, body = await ask(agent, telemetry_bearer(KEY, SIMULATOR))
        assert all(r.limits is None for r in AgentAnswer.model_validate_json(body).reports)
        assert (await ask(agent, LEASES))[0] == 401, "nor does it read"
    finally:
        await agent.stop()


async def test_limits_that_fail_stop_the_heartbeat_and_meters_that_fail_do_not(tmp_path: Path) -> None:
    file = tmp_path / "beat"
    settings = replace(PLAYED, set_limits=True, heartbeat_file=str(file), simulated_nodes=("a",))
    clock = Clock()
    (node,) = probed(settings)
    failing: set[str] = set()

    class Failing(SimulatedBoards):
        def sample(self, clock_s: float) -> Sequence[Sample]:
            if "meters" in failing:
                raise BackendAbsent("no")
            return super().sample(clock_s)

        def limits(self) -> Sequence[BoardLimit]:
            if "limits" in failing:
                raise BackendAbsent("no")
            return super().limits()

    agent = Agent(settings, [replace(node, boards=Failing("a", 2))], clock)

    def beats() -> bool:
        clock.now_s += 1.0
        agent.sample()
        return heartbeat.read(file).at_s == clock.now_s

    assert beats()
    failing.add("meters")
    assert beats(), "limits are kept although nothing is measured"
    failing.add("limits")
    assert not beats()
    failing.clear()
    assert beats()


class Breaking:
    backend = Backend.NVML
    broken = False
    samples = 0

    def sample(self, clock_s: float) -> Sequence[Sample]:
        if self.broken:
            raise BackendAbsent("the board fell off the bus")
        self.samples += 1
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


async def test_the_pods_on_each_board_are_told_and_a_kubelet_that_hangs_delays_no_meter(
    tmp_path: Path,
) -> None:
    socket, kubelet, clock = tmp_path / "kubelet.sock", Kubelet(), Clock()
    kubelet.says = answer({"team/a": [("nvidia.com/gpu", "SIMULATED-n-0")]})
    settings = replace(PLAYED, node="n", backend="probe", pod_resources_socket=str(socket), period_s=0.01)
    boards = Breaking()
    agent = Agent(settings, [Node("n", "e", boards, None, (), {}, 0.0)], clock)

    async def tells(pods: tuple[str, ...] | None) -> bool:
        for _ in range(400):
            clock.now_s += 0.05
            (told,) = AgentAnswer.model_validate_json((await ask(agent, bearer))[1]).reports
            if told.boards[0].pods == pods:
                return True
            await asyncio.sleep(0.025)
        return False

    async def until(probe: Callable[[], bool]) -> bool:
        for _ in range(400):
            if probe():
                return True
            await asyncio.sleep(0.025)
        return False

    bearer = telemetry_bearer(KEY, "n")
    await agent.start()
    running = asyncio.create_task(agent.run())
    try:
        assert await tells(None), "nobody listens yet"
        with kubelet.on(socket):
            assert await tells(("team/a",))
            kubelet.hangs, asked = True, kubelet.asked
            assert await until(lambda: kubelet.asked > asked)
            before = boards.samples
            assert await until(lambda: boards.samples >= before + 10)
            assert kubelet.asked - asked < 5, (
                "meters that waited for the kubelet would be read once for each call"
            )
            assert await tells(("team/a",))
            clock.now_s += KEPT_S
            assert await tells(None)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
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
