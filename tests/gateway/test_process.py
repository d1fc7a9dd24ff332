"""The gateway as a process of its own: killed by SIGKILL, started again, ended by SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from tests.free_port import free_port
from tests.gateway.parts import KEY_A, PATIENCE_S, House, events, route, text_of

from busbar.gateway import main


class Process:
    """`busbar-gateway` as a process, with its API, operator and engines in this one."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.port = free_port()
        internal = f"127.0.0.1:{free_port()}"
        house.overrides.update(public_address=f"127.0.0.1:{self.port}", internal_address=internal)
        self.process: asyncio.subprocess.Process | None = None
        self.url = f"http://127.0.0.1:{self.port}/v1/completions"
        self.log = house.folder / "log"

    async def start(self) -> None:
        environment = {**os.environ, **self.house.environment()}
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "busbar.gateway.main", env=environment, stderr=log
            )
        ready = f"http://127.0.0.1:{self.port}/ready"
        assert self.house.session is not None
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    async with self.house.session.get(ready) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.02)

    async def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.process.wait()

    async def stream(self) -> list[object]:
        async with self.post(stream=True) as response:
            return events(await response.read())

    def post(self, **fields: object) -> aiohttp.client._RequestContextManager:
        assert self.house.session is not None
        headers = {"Authorization": f"Bearer {KEY_A}"}
        body = {"model": "m", "prompt": "a prompt that must not be logged", **fields}
        return self.house.session.post(self.url, json=body, headers=headers)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    house = House(tmp_path)
    await house.start_neighbours()
    process = Process(house)
    try:
        yield process
    finally:
        if process.process is not None:
            await process.end(signal.SIGKILL)
        await house.stop()


async def test_usage_survives_kill_9_at_every_stage_and_is_counted_once(process: Process) -> None:
    house = process.house
    engine = await house.engine("a", "b", "c")
    await house.operator.publish(route("m", engine))
    await process.start()
    assert text_of(await process.stream()) == "abc"  # looks the key up
    await house.api.wait_for(1)

    house.api.away = True  # finished, on disk, not delivered
    assert text_of(await process.stream()) == "abc"
    engine.pause_at = 2  # in mid-stream, two words delivered
    async with process.post(stream=True) as response:
        got = b""
        while b'"b"' not in got:
            got += await response.content.readuntil(b"\n\n")
        await process.end(signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await response.content.read()
    async with asyncio.timeout(PATIENCE_S):
        await engine.cancelled.wait()

    engine.pause_at = None
    house.api.away = False
    house.api.forget_answers = 1  # accepted by the API, whose answer is lost
    await process.start()
    await house.api.wait_for(3)
    await process.end(signal.SIGKILL)
    await process.start()
    assert text_of(await process.stream()) == "abc"
    await house.api.wait_for(4)
    assert await process.end(signal.SIGTERM) == 0
    assert house.api.total("id-a") == (4, 28, 11)
    assert len({gateway for gateway, _ in house.api.records}) == 1
    assert sorted(seq for _, seq in house.api.records) == [1, 2, 3, 4]
    usage = house.folder / "state" / "usage"
    assert not list(usage.glob("*.ndjson"))


async def test_a_killed_gateway_comes_back_with_its_last_routes_while_the_operator_is_away(
    process: Process,
) -> None:
    house = process.house
    await house.operator.publish(route("m", await house.engine("a")))
    await process.start()
    await house.routes_saved()
    await house.operator.stop()
    await process.end(signal.SIGKILL)
    await process.start()
    assert text_of(await process.stream()) == "a"


async def test_sigterm_lets_a_stream_end(process: Process) -> None:
    house = process.house
    engine = await house.engine("a", "b")
    engine.pause_at = 1
    await house.operator.publish(route("m", engine))
    await process.start()
    streaming = asyncio.create_task(process.stream())
    async with asyncio.timeout(PATIENCE_S):
        await engine.arrived.wait()
    ending = asyncio.create_task(process.end(signal.SIGTERM))
    async with asyncio.timeout(PATIENCE_S):
        while await accepts(process.port):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    engine.go.set()
    assert text_of(await streaming) == "ab"
    assert await ending == 0
    assert house.api.total("id-a") == (1, 7, 2)


async def accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await writer.wait_closed()
    except ConnectionError:  # refused; or reset, when the port closed before the connection was accepted
        return False
    return True


async def test_the_log_holds_neither_keys_nor_bearers_nor_prompts(process: Process) -> None:
    house = process.house
    await house.operator.publish(route("m", await house.engine("an answer"), bearer="very-secret"))
    house.engines[0].bearer = "very-secret"
    await process.start()
    await process.stream()
    await process.end(signal.SIGTERM)
    text = process.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {"started", "request", "stopped"} <= {line["message"] for line in lines}
    (request,) = [line for line in lines if line["message"] == "request"]
    assert (request["status"], request["service"], request["keyId"]) == (200, "team-a/m", "id-a")
    for secret in (KEY_A, "very-secret", "must not be logged", "an answer", "to-api", "to-operator"):
        assert secret not in text


async def test_an_unknown_setting_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    environment = {**os.environ, "BUSBAR_GATEWAY_HOLD_TIMEOUT": "3"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "busbar.gateway.main", env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, text = await process.communicate()
    assert process.returncode == 2
    assert b"BUSBAR_GATEWAY_HOLD_TIMEOUT is not a setting" in text
    assert b"BUSBAR_GATEWAY_HOLD_TIMEOUT_S" in text


def test_full_collections_pass_over_what_was_there_at_the_start() -> None:
    try:
        main._settle_heap()
        assert gc.get_freeze_count() > len(gc.get_objects())
    finally:
        gc.unfreeze()
