"""Several replicas of the API on one PostgreSQL: one of them writes the history, and another goes on where it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection
from tests.api.conftest import JOB, NOW, Clock
from tests.api.memory_kube import MemoryKube

from busbar.api.access.tenancy import Tenancy
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.kubernetes.store import Store
from busbar.api.records import leadership
from busbar.api.records.history import History
from busbar.api.records.usage_ledger import By, UsageLedger
from busbar.kube.contracts.usage import UsageRecord
from busbar.kube.resources import TENANTS, TRAINING_JOBS

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.parametrize("database_url", ["postgresql"], indirect=True),
]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - there is no event for "a watch has caught up"
            await asyncio.sleep(0)


class Replica:
    """One process's part: a pool of connections, a watch, and the history."""

    def __init__(self, url: str, kube: MemoryKube, clock: Clock) -> None:
        self.database = Database(url)
        self.store = Store(kube, backoff_s=(0.001, 0.01))
        self.history = History(self.database, self.store, Tenancy(self.store), clock)

    async def start(self) -> None:
        await self.store.start()
        await self.store.synced(30)
        await self.history.reconcile()

    async def stop(self) -> None:
        """Like a kill: its lease stays."""
        await self.store.stop()
        await self.database.close()


class Pair:
    """Two replicas of one cluster; the first leads."""

    def __init__(self, url: str) -> None:
        self.kube, self.clock = MemoryKube(), Clock()
        self.kube.put(TENANTS, {"metadata": {"name": "ada"}, "spec": {"namespaces": ["ada-lab"]}})
        self.kube.put(TRAINING_JOBS, {**JOB, "metadata": {"name": "run", "namespace": "ada-lab"}})
        self.first, self.second = (Replica(url, self.kube, self.clock) for _ in range(2))

    def says(self, seconds: float, *replicas: Replica, step: int = 0) -> None:
        """A status that these replicas hear of."""
        status = {
            "usage": {"acceleratorSeconds": seconds},
            "attempt": 1,
            "progress": {"step": step, "loss": 1.0},
        }
        made = self.kube.status(TRAINING_JOBS, "ada-lab", "run", **status)
        for replica in replicas:
            replica.store.observe(TRAINING_JOBS, made)

    async def rows(self) -> list[tuple[float, bool]]:
        """Accelerator seconds and whether it is closed, of each row."""
        async with self.first.database.read() as db:
            found = (await db.execute(select(tables.jobs))).mappings().all()
        return [(row["accelerator_seconds"], row["deleted_at"] is not None) for row in found]

    async def uid(self) -> str:
        async with self.first.database.read() as db:
            return str((await db.execute(select(tables.jobs.c.uid))).scalar_one())

    async def end_lease(self) -> None:
        """As if its time had passed."""
        async with self.first.database.write() as tx:
            await tx.execute(update(tables.leases).values(until=NOW - timedelta(days=365)))


@pytest.fixture
async def pair(database_url: str) -> AsyncIterator[Pair]:
    made = Pair(database_url)
    await made.first.start()
    await made.second.start()
    yield made
    for replica in (made.first, made.second):
        await replica.stop()


async def test_a_late_replica_turns_nothing_back(pair: Pair) -> None:
    pair.says(10.0, pair.first, pair.second)
    await pair.second.store.stop()  # its watch hears nothing more, and it has not written yet
    pair.says(20.0, pair.first)
    await pair.first.history.flush()
    pair.kube.remove(TRAINING_JOBS, "run", "ada-lab")
    await until(lambda: bool(pair.first.history.pending))
    await pair.first.history.flush()
    await pair.second.history.flush()
    assert await pair.rows() == [(20.0, True)]


async def test_what_happened_around_the_end_of_the_leader_is_in_the_rows_and_once(pair: Pair) -> None:
    for step in (1, 2):
        pair.says(10.0 * step, pair.first, pair.second, step=step)
    await pair.first.history.flush()  # the leader's last write
    pair.says(30.0, pair.second, step=3)
    await pair.second.history.flush()
    assert await pair.rows() == [(20.0, False)]
    pair.kube.remove(TRAINING_JOBS, "run", "ada-lab")
    await until(lambda: bool(pair.second.history.pending))
    await pair.second.history.flush()
    assert await pair.rows() == [(20.0, False)]
    await pair.end_lease()
    await pair.second.history.flush()
    assert await pair.rows() == [(30.0, True)]
    curve = await pair.second.history.curve(await pair.uid())
    assert [point["step"] for point in curve] == [1, 2, 3]


async def test_a_leader_that_was_away_too_long_writes_nothing_more(pair: Pair) -> None:
    pair.says(10.0, pair.first)
    await pair.end_lease()
    pair.says(20.0, pair.second)
    await pair.second.history.flush()
    await pair.first.history.flush()
    assert await pair.rows() == [(20.0, False)]


async def test_a_leader_that_stops_gives_its_place_to_the_next_at_once(pair: Pair) -> None:
    await pair.first.history.resign()
    pair.says(20.0, pair.second)
    await pair.second.history.flush()
    assert await pair.rows() == [(20.0, False)]


async def test_a_follower_keeps_nothing_for_long(pair: Pair) -> None:
    pair.says(10.0, pair.second, step=1)
    pair.clock.forward(seconds=leadership.KEPT_S + 1)
    await pair.second.history.flush()
    assert not pair.second.history.pending


class Stopping(Database):
    """It is stopped before its first commit."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reached, self.goes_on = asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        async with super().write() as tx:
            yield tx
            self.reached.set()
            await self.goes_on.wait()


async def test_a_replica_that_stops_within_a_transaction_holds_nobody_up_for_long(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway sends its report again, to the other replica, which would wait for the rows of the first."""
    monkeypatch.setattr("busbar.api.database.engine.IDLE_IN_TRANSACTION_S", 0.3)
    report = UsageRecord(
        seq=1, key_id="k", tenant="ada", namespace="ada-lab", service="chat", model="m", prompt_tokens=3,
        completion_tokens=5, request_id="r", finished_at=NOW,
    )  # fmt: skip
    stopped, other = Stopping(database_url), Database(database_url)
    late = asyncio.create_task(UsageLedger(stopped).accept("g", [report]))
    try:
        await stopped.reached.wait()
        async with asyncio.timeout(30):
            assert await UsageLedger(other).accept("g", [report]) == 1
        stopped.goes_on.set()
        with pytest.raises((SQLAlchemyError, OSError)):
            await late
        (total,) = await UsageLedger(other).usage(
            By.TENANT, since=NOW, until=NOW + timedelta(seconds=1), tenants=None
        )
        assert (total.requests, total.completion_tokens) == (1, 5)
    finally:
        late.cancel()
        await stopped.close()
        await other.close()
