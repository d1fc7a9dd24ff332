"""Agent and guard as processes: whatever is killed or stopped, boards with a lease are lowered, others are not.

The boards are simulated, and their limits are files, which stay when a process ends as they stay in a real board.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
from tests.free_port import free_port
from tests.operator.agent.lease_keys import CERTIFICATE
from tests.operator.agent.lease_keys import KEY as SIGNING

from busbar.kube.contracts.power import (
    LEASE_PATH,
    PATH,
    SIGNATURE,
    AgentAnswer,
    AgentReport,
    lease_bearer,
    telemetry_bearer,
)
from busbar.operator.agent.signing import Signer
from busbar.operator.agent.simulated import FolderLimits

KEY = b"0123456789abcdef0123456789abcdef"
NAME = "simulated"
PATIENCE_S = 60.0
UUIDS = ("SIMULATED-n-0", "SIMULATED-n-1")


class Node:
    """The boards of one node, and the processes that limit them."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        (folder / "key").write_bytes(KEY)
        (folder / "certificate").write_bytes(CERTIFICATE)
        (folder / "limits").mkdir()
        self.limits = FolderLimits(folder / "limits")
        self.env = {
            **os.environ,
            "PYTHONPATH": ".src",
            "BUSBAR_POWER_KEY_FILE": str(folder / "key"),
            "BUSBAR_POWER_LEASE_CERT_FILE": str(folder / "certificate"),
            "BUSBAR_AGENT_BACKEND": "simulated",
            "BUSBAR_AGENT_SIMULATED_NODES": "n",
            "BUSBAR_AGENT_SIMULATED_BOARDS": "2",
            "BUSBAR_AGENT_SIMULATED_HOST_WATTS": "100",
            "BUSBAR_AGENT_SIMULATED_LIMITS_DIR": str(folder / "limits"),
            "BUSBAR_AGENT_SET_LIMITS": "true",
            "BUSBAR_AGENT_HEARTBEAT_FILE": str(folder / "beat"),
            "BUSBAR_AGENT_HOST": "127.0.0.1",
            "BUSBAR_AGENT_PORT": str(self.port),
            "BUSBAR_AGENT_LOG_LEVEL": "error",
        }
        self.sequence = 0

    @contextlib.asynccontextmanager
    async def process(self, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "busbar.operator.agent.main", *arguments, env=self.env
        )
        try:
            yield made
        finally:
            if made.returncode is None:
                made.kill()
            await made.wait()

    async def report(self) -> AgentReport | None:
        """None: nobody answers."""
        headers = {"Authorization": f"Bearer {telemetry_bearer(KEY, NAME)}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session,
                session.get(f"http://127.0.0.1:{self.port}{PATH}", headers=headers) as answer,
            ):
                return AgentAnswer.model_validate_json(await answer.read()).reports[0]
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def says(self) -> AgentReport:
        found: list[AgentReport] = []

        async def answers() -> bool:
            if report := await self.report():
                found.append(report)
            return bool(found)

        await until(answers)
        return found[0]

    async def send(self, **fields: Any) -> int:
        report = await self.says()
        self.sequence += 1
        message = {"node": "n", "epoch": report.epoch, "sequence": self.sequence, **fields}
        if "watts" in fields:
            message |= {"clockS": report.clock_s, "ttlS": 60.0, "hostWatts": 100.0}
        body = json.dumps({"leases": [message]}).encode()
        headers = {
            "Authorization": f"Bearer {lease_bearer(KEY, NAME)}",
            SIGNATURE: Signer(SIGNING).sign(body),
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"http://127.0.0.1:{self.port}{LEASE_PATH}",
                headers=headers,
                data=body,
            ) as answer,
        ):
            return answer.status

    async def has(self, watts: float) -> None:
        """Waits until all boards together have this limit; a lease is sent again where the machine was too busy."""

        async def holds() -> bool:
            return sum(self.limits.get(uuid, 400.0) for uuid in UUIDS) == watts

        await until(holds)

    async def leased(self) -> None:
        """Waits until the boards have the limits of a lease."""

        async def holds() -> bool:
            await self.send(watts=700.0)
            return sum(self.limits.get(uuid, 400.0) for uuid in UUIDS) == 600.0

        await until(holds)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():  # noqa: ASYNC110 - other processes have no event for it
            await asyncio.sleep(0.02)


async def test_a_guard_lowers_the_boards_of_an_agent_that_is_stopped_or_killed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    async with node.process("guard"), node.process() as agent:
        first = await node.says()
        await node.has(200.0)
        await node.leased()
        agent.send_signal(signal.SIGSTOP)
        await node.has(200.0)
        agent.send_signal(signal.SIGCONT)

        async def stands() -> bool:
            """It does not know what happened meanwhile."""
            limits = (await node.says()).limits
            return limits is not None and limits.state == "Standing"

        await until(stands)
        await node.leased()
        agent.kill()
        await node.has(200.0)
        async with node.process():
            again = await node.says()
            assert again.epoch != first.epoch
            assert again.limits is not None
            assert (again.limits.state, again.limits.sequence) == ("Standing", 0)
            await node.leased()


async def test_an_agent_that_is_told_to_stop_leaves_the_standing_cap_and_released_boards_alone(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    async with node.process() as agent:
        await node.leased()
        agent.terminate()
        await agent.wait()
        await node.has(200.0)
    node.limits.update(dict.fromkeys(UUIDS, 400.0))
    async with node.process("guard") as guard:
        await node.has(200.0)  # without an agent
        async with node.process() as agent:
            await node.says()
            assert await node.send() == 200
            await node.has(800.0)
            agent.kill()
            await agent.wait()
        node.limits["SIMULATED-n-0"] = 321.0
        guard.terminate()
        assert await guard.wait() == 0
        assert node.limits["SIMULATED-n-0"] == 321.0, "nobody limits it"
