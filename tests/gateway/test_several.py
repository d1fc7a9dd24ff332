"""Two gateway processes with state folders of their own, and the real API: one limit over both, and nothing is cut."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy.exc import OperationalError
from tests.api.conftest import (
    GATEWAY,
    SECRET,
    World,
    database_url,
    postgres_server,
    running,
    seed,
    sqlite_template,
    sqlite_url,
)
from tests.api.memory_kube import MemoryKube
from tests.cli.loopback import app_of, listening
from tests.gateway.parts import PATIENCE_S, House, events, route, text_of
from tests.gateway.test_process import Process

from busbar.api.access.identity import Scope
from busbar.api.records.usage_ledger import By
from busbar.api.settings import Settings
from busbar.gateway import lease_keeper
from busbar.kube.types.budget import Period
from busbar.kube.types.inference import CostLimit, InferenceLimits

__all__ = ["database_url", "postgres_server", "sqlite_template", "sqlite_url"]

PRICE = {"prompt": 1.0, "cached": 1.0, "output": 10.0}
"""The engine's prompts have 7 tokens; a request of two words costs 27 millionths."""
OURS: dict[str, Any] = {"tenant": "ada", "namespace": "ada-lab", "price": PRICE}


class Pair:
    """Two gateways behind a balancer that sends nothing to one that is not ready, as a Service does."""

    def __init__(self, house: House, world: World, api: str) -> None:
        self.house = house
        self.world = world
        self.both: list[Process] = []
        self.token = ""
        self.key_id = ""
        self.api = api

    async def start(self) -> None:
        self.world.clock.forward(seconds=(datetime.now(UTC) - self.world.services.clock()).total_seconds())
        for index in range(2):
            self.house.overrides.update(
                api_url=self.api, replicas=2, state_dir=self.house.folder / f"gateway-{index}"
            )
            self.both.append(Process(replace(self.house, overrides=dict(self.house.overrides))))
        await asyncio.gather(*(each.start() for each in self.both))

    async def key(self, **limits: Any) -> None:
        self.token, made = await self.world.services.tokens.create(
            "alice",
            created_by="test",
            scopes=(Scope.INFERENCE,),
            tenant="ada",
            limits=InferenceLimits(**limits),
        )
        self.key_id = made.id

    @asynccontextmanager
    async def post(self, index: int, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self.house.session is not None
        body = {"model": "m", "prompt": [1] * 7, "max_tokens": 2, **fields}
        headers = {"Authorization": f"Bearer {self.token}"}
        async with self.house.session.post(self.both[index].url, json=body, headers=headers) as response:
            yield response

    async def status(self, index: int, **fields: Any) -> int:
        async with self.post(index, **fields) as response:
            await response.read()
            return response.status

    async def ready(self, index: int) -> bool:
        assert self.house.session is not None
        try:
            async with self.house.session.get(f"http://127.0.0.1:{self.both[index].port}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def booked(self) -> tuple[int, float]:
        """(requests, cost) of the key in the ledger."""
        now = self.world.services.clock()
        day = timedelta(days=2)
        rows = await self.world.services.usage_ledger.usage(
            By.KEY, since=now - day, until=now + day, tenants=None
        )
        return next(((row.requests, row.cost) for row in rows if row.group == self.key_id), (0, 0.0))


@asynccontextmanager
async def two(tmp_path: Path, database_url: str) -> AsyncIterator[Pair]:
    """The gateways' neighbours; the test starts the gateways."""
    kube = MemoryKube()
    seed(kube)
    kube.users["to-api"] = {"username": GATEWAY, "groups": ["system:serviceaccounts"]}
    settings = Settings(session_secret=SECRET, database_url=database_url, gateway_url="http://127.0.0.1:9")
    house = House(tmp_path)
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(running(settings, kube))
        url = await stack.enter_async_context(listening(app_of(world.internal)))
        await house.start_neighbours()
        stack.push_async_callback(house.stop)
        pair = Pair(house, world, url)
        stack.push_async_callback(kill_all, pair.both)
        yield pair


@pytest.fixture
async def pair(tmp_path: Path, sqlite_url: str) -> AsyncIterator[Pair]:
    async with two(tmp_path, sqlite_url) as made:
        yield made


@pytest.fixture
async def pair_on_both(tmp_path: Path, database_url: str) -> AsyncIterator[Pair]:
    """On each kind of database."""
    async with two(tmp_path, database_url) as made:
        yield made


async def kill_all(processes: list[Process]) -> None:
    for process in processes:
        if process.process is not None:
            await process.end(signal.SIGKILL)


async def ask_in_turns(pair: Pair, count: int) -> list[int]:
    return [await pair.status(index % 2) for index in range(count)]


async def test_one_limit_is_exact_over_both_over_kill_9_and_a_restart(pair_on_both: Pair) -> None:
    pair = pair_on_both
    await pair.house.operator.publish(route("m", await pair.house.engine("a", "b"), **OURS))
    await pair.key(budgets=[CostLimit(period=Period.MONTH, cost=0.000_027 * 20)])
    await pair.start()
    assert await ask_in_turns(pair, 8) == [200] * 8
    # One dies under load, with what it holds, and the other goes on with what is left meanwhile.
    under_load = [asyncio.create_task(pair.status(index % 2)) for index in range(6)]
    await asyncio.sleep(0)
    await pair.both[0].end(signal.SIGKILL)
    died = await asyncio.gather(*under_load, return_exceptions=True)
    assert all(answer in (200, 429) or isinstance(answer, aiohttp.ClientError) for answer in died)
    await pair.both[0].start()
    answers: list[int] = []
    # On a slow machine a gateway may not hear in time that another one has given something back.
    while answers[-12:] != [429] * 12:
        answers.append(await pair.status(len(answers) % 2))
    for process in pair.both:
        assert await process.end(signal.SIGTERM) == 0
    requests, cost = await pair.booked()
    limit = 0.000_027 * 20
    assert limit - 0.000_027 < cost <= limit + 1e-9
    assert requests >= 8 + died.count(200) + answers.count(200)


async def test_a_limit_of_a_minute_is_exact_over_both_and_says_what_is_left(pair: Pair) -> None:
    await pair.house.operator.publish(route("m", await pair.house.engine("a"), **OURS))
    await pair.key(requests_per_minute=12)
    await pair.start()
    answers = await asyncio.gather(*(pair.status(index % 3 // 2) for index in range(40)))
    assert answers.count(200) == 12
    assert answers.count(429) == 28
    async with pair.post(1) as response:
        assert response.status == 429
        assert response.headers["x-ratelimit-limit-requests"] == "12"
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(response.headers["Retry-After"]) >= 1


async def test_while_the_api_is_away_each_goes_on_with_what_it_holds(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.house.operator.publish(route("m", await pair.house.engine("a", "b"), **OURS))
    await pair.key(budgets=[CostLimit(period=Period.MONTH, cost=0.000_027 * 64)])
    await pair.start()
    assert await ask_in_turns(pair, 4) == [200] * 4
    await asyncio.sleep(2 * lease_keeper.ROUND_S)

    async def away(*_: Any) -> Any:
        raise OperationalError("SELECT", None, Exception("away"))

    with monkeypatch.context() as patch:
        patch.setattr(pair.world.services.budget_leases, "renew", away)
        patch.setattr(pair.world.services.keys, "lookup", away)
        answers = await ask_in_turns(pair, 20)
        held = answers.count(200)
        assert 64 // 16 <= held <= 2 * (64 // 16)  # between half of the headroom of each and all of it
        assert {*answers} == {200, 429}
    accepted = 4 + held
    async with asyncio.timeout(PATIENCE_S):
        while accepted < 64:
            accepted += await pair.status(accepted % 2) == 200
    assert await ask_in_turns(pair, 4) == [429] * 4
    for process in pair.both:
        assert await process.end(signal.SIGTERM) == 0
    requests, cost = await pair.booked()
    assert requests == 64
    assert cost == pytest.approx(0.000_027 * 64)


async def test_a_rolling_restart_cuts_no_stream_and_fails_no_request(pair: Pair) -> None:
    """Clients send a request again that got no answer's first byte, as a Service's clients do."""
    engine = await pair.house.engine("a", "b", "c")
    await pair.house.operator.publish(route("m", engine, **OURS))
    await pair.key(tokens_per_minute=1_000_000, requests_per_minute=100_000)
    pair.house.overrides["linger_s"] = 0.5
    await pair.start()
    engine.pause_at = 2
    opened = [asyncio.create_task(stream(pair, index)) for index in (0, 1)]
    async with asyncio.timeout(PATIENCE_S):
        while len(engine.bodies) < 2:  # noqa: ASYNC110 - two arrivals
            await asyncio.sleep(0.01)
    engine_of_others = await pair.house.engine("d")
    await pair.house.operator.publish(route("m", engine, **OURS), route("n", engine_of_others, **OURS))
    done, failed, stop = 0, 0, asyncio.Event()

    async def client() -> None:
        nonlocal done, failed
        while not stop.is_set():
            for attempt in range(50):
                try:
                    # As a Service sends connections: to who is ready.
                    index = (done + attempt) % 2
                    if await pair.ready(index) and await pair.status(index, model="n") == 200:
                        done += 1
                        break
                except aiohttp.ClientError:
                    pass  # no byte of an answer had come
                await asyncio.sleep(0.05)
            else:
                failed += 1

    clients = [asyncio.create_task(client()) for _ in range(3)]
    for index in (0, 1):
        ending = asyncio.create_task(pair.both[index].end(signal.SIGTERM))
        async with asyncio.timeout(PATIENCE_S):
            while await pair.ready(index):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        before = done
        async with asyncio.timeout(PATIENCE_S):
            while done < before + 5:  # noqa: ASYNC110 - the clients count
                await asyncio.sleep(0.02)
        assert not ending.done(), "it did not wait for its stream"
        if index == 1:
            engine.go.set()
        else:
            engine.pause_at = None
            engine.go.set()
            engine.go = asyncio.Event()
            engine.pause_at = 2
        assert await ending == 0
        await pair.both[index].start()
    stop.set()
    await asyncio.gather(*clients)
    texts = await asyncio.gather(*opened)
    assert [text_of(each) for each in texts] == ["abc", "abc"]
    assert failed == 0
    assert done > 10


async def stream(pair: Pair, index: int) -> list[object]:
    async with pair.post(index, stream=True) as response:
        assert response.status == 200
        return events(await response.read())
