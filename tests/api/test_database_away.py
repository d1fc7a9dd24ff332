"""The database is away and comes back, hangs, or has a full disk: what the API cannot record it does not do, it says so,
and it goes on by itself; nothing is lost and nothing is counted twice."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import event, select
from sqlalchemy.exc import OperationalError
from tests.api.conftest import BASE, GATEWAY, JOB, SECRET, World, client, running, seed
from tests.api.memory_kube import MemoryKube
from tests.api.postgres import Server
from tests.gateway.parts import PATIENCE_S
from tests.gateway.test_usage import recorder, use

from busbar.api.database import engine, tables
from busbar.api.database.migrate import migrate
from busbar.api.settings import Settings
from busbar.gateway.keys import ApiUnreachable
from busbar.gateway.spool import Record
from busbar.kube.contracts import usage
from busbar.kube.resources import TRAINING_JOBS

JOBS = f"{BASE}/namespaces/ada-lab/trainingjobs"


@pytest.fixture
def postgres() -> Iterator[Server]:
    """A PostgreSQL that may be stopped: the one that tests share may not."""
    with Server.start(durable=True) as server:
        yield server


@pytest.fixture
async def remote(postgres: Server) -> AsyncIterator[World]:
    """A running API on it."""
    await migrate(postgres.url)
    kube = MemoryKube()
    seed(kube)
    settings = Settings(session_secret=SECRET, database_url=postgres.url, gateway_url="http://127.0.0.1:9")
    async with running(settings, kube) as made:
        yield made


async def submit(alice: httpx2.AsyncClient, name: str) -> httpx2.Response:
    return await alice.post(JOBS, json={**JOB, "metadata": {"name": name}})


def exists(world: World, name: str) -> bool:
    return (TRAINING_JOBS.plural, "ada-lab", name) in world.kube.objects


async def trail(world: World) -> list[tuple[str, str]]:
    """Names and outcomes of the creations of jobs."""
    return [
        (entry.name, entry.outcome)
        for entry in reversed(await world.services.audit.page())
        if entry.kind == "TrainingJob"
    ]


def says_that_it_is_away(answer: httpx2.Response) -> bool:
    return (
        answer.status_code == 503
        and answer.headers["retry-after"] == "2"
        and "the database does not answer" in answer.text
    )


@pytest.mark.postgres
async def test_while_the_database_is_away_nothing_is_done_that_could_not_be_recorded(
    remote: World, postgres: Server
) -> None:
    alice = await remote.as_("alice")
    assert (await submit(alice, "before")).status_code == 201
    postgres.halt()
    for _ in range(2):  # connections of the pool were cut, new ones are refused
        assert says_that_it_is_away(await submit(alice, "meanwhile"))
        assert says_that_it_is_away(await alice.get(JOBS))
    assert not exists(remote, "meanwhile")
    assert (await remote.public.get("/health")).status_code == 200, "a restart would not help"
    postgres.resume()
    assert (await submit(alice, "meanwhile")).status_code == 201
    assert await trail(remote) == [("before", "Done"), ("meanwhile", "Done")]


@pytest.mark.postgres
async def test_a_write_that_was_done_when_the_database_went_away_is_told_and_recorded(
    remote: World, postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = await remote.as_("alice")
    call = remote.kube.call

    async def and_then_the_database_goes(method: str, path: str, **more: Any) -> dict[str, Any]:
        answer = await call(method, path, **more)
        if method == "POST" and path.endswith("/trainingjobs"):
            postgres.halt()
        return answer

    monkeypatch.setattr(remote.kube, "call", and_then_the_database_goes)
    assert (await submit(alice, "done")).status_code == 201, (
        "a repeat would make it twice, or be told that it exists"
    )
    monkeypatch.undo()
    postgres.resume()
    assert await trail(remote) == [("done", "Done")]


@pytest.mark.postgres
async def test_use_and_history_of_an_outage_are_there_once_afterwards(
    remote: World, postgres: Server, tmp_path: Path
) -> None:
    remote.kube.users["gw"] = {"username": GATEWAY}
    http = client(remote.internal, {"Authorization": "Bearer gw"})
    refusals = 0

    class Api:
        """The gateway's way to the API."""

        async def deliver(self, gateway: str, batch: list[Record]) -> int:
            nonlocal refusals
            answer = await http.post(usage.PATH, json={"gateway": gateway, "records": batch})
            if answer.status_code != 200:
                assert says_that_it_is_away(answer)
                refusals += 1
                raise ApiUnreachable(answer.text)
            return usage.UsageAccepted.model_validate_json(answer.text).accepted_through

    gateway = recorder(tmp_path, Api())  # type: ignore[arg-type]  # it asks for no more than `deliver`
    gateway.start()
    history = asyncio.create_task(remote.services.history.run())
    try:
        for number in range(30):
            if number == 10:
                # what is under way goes on meanwhile, as in a real outage
                await asyncio.to_thread(postgres.halt)
            if number == 20:
                async with asyncio.timeout(PATIENCE_S):
                    while not refusals:  # noqa: ASYNC110 - until a delivery has found it away
                        await asyncio.sleep(0.01)
                await asyncio.to_thread(postgres.resume)
            use(gateway, number)
            remote.kube.status(
                TRAINING_JOBS, "ada-lab", "ada-run", usage={"acceleratorSeconds": 60.0 * number}
            )
            await asyncio.sleep(0.05)
    finally:
        await gateway.stop(PATIENCE_S)
        await remote.settle()
        history.cancel()
        await asyncio.gather(history, return_exceptions=True)
    await remote.services.history.flush()
    async with remote.services.database.read() as db:
        taken = (await db.execute(select(tables.ledger.c.request_id))).scalars().all()
        counted = await db.execute(
            select(tables.jobs.c.accelerator_seconds).where(tables.jobs.c.name == "ada-run")
        )
        assert counted.scalar_one() == 60.0 * 29
    assert sorted(taken) == sorted(f"req-{number}" for number in range(30))


@pytest.mark.postgres
async def test_a_database_that_hangs_is_not_waited_for_without_end(
    postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(postgres.url)
    for name in ("CONNECT_S", "ANSWER_S", "PLACE_S"):
        monkeypatch.setattr(engine, name, 0.5)
    kube = MemoryKube()
    seed(kube)
    settings = Settings(session_secret=SECRET, database_url=postgres.url, gateway_url="http://127.0.0.1:9")
    async with running(settings, kube) as world:
        alice = await world.as_("alice")
        assert (await alice.get(JOBS)).status_code == 200
        with frozen(postgres):  # until all are answered
            answers = await asyncio.gather(*(alice.get(JOBS) for _ in range(30)))
            assert all(says_that_it_is_away(answer) for answer in answers)
        async with asyncio.timeout(30):
            while (await submit(alice, "after")).status_code != 201:  # noqa: ASYNC110 - until it has awoken
                await asyncio.sleep(0.1)


@contextmanager
def frozen(postgres: Server) -> Iterator[None]:
    """All its processes stand still."""
    leader = int((postgres.folder / "data" / "postmaster.pid").read_text().split()[0])
    family = [
        leader,
        *(int(pid) for pid in Path(f"/proc/{leader}/task/{leader}/children").read_text().split()),
    ]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)


async def test_on_a_full_disk_people_read_and_nothing_is_done_that_could_not_be_recorded(
    world: World,
) -> None:
    alice = await world.as_("alice")
    assert (await submit(alice, "before")).status_code == 201
    with full_disk(world):
        world.clock.forward(minutes=5)  # so that the use of the token would be noted again
        assert (await alice.get(JOBS)).status_code == 200
        answer = await submit(alice, "meanwhile")
        assert answer.status_code == 503
        assert "the database's disk is full" in answer.text
        page = await alice.post("/api/v1alpha1/tokens", json={"description": "x"})
        assert page.status_code == 503
    assert not exists(world, "meanwhile")
    assert (await submit(alice, "meanwhile")).status_code == 201
    assert await trail(world) == [("before", "Done"), ("meanwhile", "Done")]


@contextmanager
def full_disk(world: World) -> Iterator[None]:
    """SQLite refuses each write, as on a disk without room."""

    def refuse(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.lstrip().upper().startswith(("INSERT", "UPDATE", "DELETE")):
            raise OperationalError(statement, None, sqlite3.OperationalError("database or disk is full"))

    sync = world.services.database.engine.sync_engine
    event.listen(sync, "before_cursor_execute", refuse)
    try:
        yield
    finally:
        event.remove(sync, "before_cursor_execute", refuse)
