"""Job history: totals of status, curves, and catching up, on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from tests.api.conftest import JOB, NOW, SERVICE, Clock
from tests.api.memory_kube import MemoryKube

from busbar.api import history as module
from busbar.api.database.engine import Database
from busbar.api.history import History
from busbar.api.store import Store
from busbar.api.tenancy import Tenancy
from busbar.kube.resources import MODEL_SERVICES, TENANTS, TRAINING_JOBS


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url)
    yield opened
    await opened.close()


class Life:
    """A cluster, and the history that one API process after the other keeps of it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.kube = MemoryKube()
        self.clock = Clock()
        self.kube.put(TENANTS, {"metadata": {"name": "ada"}, "spec": {"namespaces": ["ada-lab"]}})
        self.kube.put(TRAINING_JOBS, {**JOB, "metadata": {"name": "run", "namespace": "ada-lab"}})
        self.store: Store | None = None

    async def start(self) -> History:
        self.store = Store(self.kube, backoff_s=(0.001, 0.01))
        made = History(self.database, self.store, Tenancy(self.store), self.clock)
        await self.store.start()
        await self.store.synced(5)
        await made.reconcile()
        return made

    async def stop(self) -> None:
        if self.store is not None:
            await self.store.stop()

    def observe(self, **status: Any) -> None:
        """A status write that the running process sees at once."""
        assert self.store is not None
        self.store.observe(TRAINING_JOBS, self.kube.status(TRAINING_JOBS, "ada-lab", "run", **status))


@pytest.fixture
async def life(database: Database) -> AsyncIterator[Life]:
    made = Life(database)
    yield made
    await made.stop()


async def totals(history: History, tenants: set[str] | None = None) -> list[tuple[str, int, float, float]]:
    rows = await history.totals(
        "tenant", since=NOW - timedelta(days=1), until=NOW + timedelta(days=1), tenants=tenants
    )
    return [(row.group, row.jobs, row.accelerator_seconds, row.cost) for row in rows]


async def test_the_row_holds_the_totals_of_the_status_however_often_it_is_written(life: Life) -> None:
    history = await life.start()
    for seconds in (10.0, 20.0, 20.0, 35.0):
        life.observe(usage={"acceleratorSeconds": seconds, "cost": seconds / 10})
        await history.flush()
    assert await totals(history) == [("ada", 1, 35.0, 3.5)]
    assert await totals(history, {"bob-corp"}) == []


async def test_after_being_down_it_catches_up_with_what_the_status_says(life: Life) -> None:
    history = await life.start()
    life.observe(usage={"acceleratorSeconds": 10.0}, phase="Running")
    await history.flush()
    await life.stop()
    life.kube.status(TRAINING_JOBS, "ada-lab", "run", usage={"acceleratorSeconds": 99.0}, phase="Succeeded")
    life.kube.put(MODEL_SERVICES, {**SERVICE, "metadata": {"name": "chat", "namespace": "ada-lab"}})
    history = await life.start()
    assert await totals(history) == [("ada", 2, 99.0, 0.0)]


async def test_what_was_deleted_while_it_was_down_is_closed_with_the_last_totals_seen(life: Life) -> None:
    history = await life.start()
    life.observe(usage={"acceleratorSeconds": 10.0})
    await history.flush()
    await life.stop()
    life.kube.remove(TRAINING_JOBS, "run", "ada-lab")
    history = await life.start()
    (gone,) = await history.past({"ada-lab"})
    assert (gone["name"], gone["accelerator_seconds"], gone["deleted_at"]) == ("run", 10.0, NOW)
    assert await history.past(set()) == []


async def test_a_job_made_again_under_its_name_is_another_row(life: Life) -> None:
    history = await life.start()
    life.kube.remove(TRAINING_JOBS, "run", "ada-lab")
    await life.stop()
    life.kube.put(TRAINING_JOBS, {**JOB, "metadata": {"name": "run", "namespace": "ada-lab"}})
    history = await life.start()
    assert len(await history.past(None)) == 1
    assert (await totals(history))[0][1] == 2


async def test_curves_keep_each_change_in_order_and_ignore_writes_that_say_nothing_new(life: Life) -> None:
    history = await life.start()
    uid = life.kube.objects["trainingjobs", "ada-lab", "run"]["metadata"]["uid"]
    for step in (1, 2, 2, 3):
        life.clock.forward(seconds=1)
        life.observe(attempt=1, progress={"step": step, "loss": 4.0 - step, "tokensPerSecond": 100.0})
    life.observe(message="only words")
    await history.flush()
    curve = await history.curve(uid)
    assert [(p["step"], p["loss"]) for p in curve] == [(1, 3.0), (2, 2.0), (3, 1.0)]


async def test_long_curves_are_thinned_and_keep_both_ends(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SAMPLES", 40)
    history = await life.start()
    uid = life.kube.objects["trainingjobs", "ada-lab", "run"]["metadata"]["uid"]
    for step in range(1, 301):
        life.observe(attempt=1, progress={"step": step, "loss": 1.0})
        if step % 5 == 0:
            await history.flush()
    steps = [p["step"] for p in await history.curve(uid)]
    assert len(steps) <= 40
    assert (steps[0], steps[-1]) == (1, 300)
    assert steps == sorted(steps)
    few = [p["step"] for p in await history.curve(uid, points=10)]
    assert len(few) <= 12
    assert (few[0], few[-1]) == (1, 300)


async def test_a_write_that_fails_is_written_by_the_next_flush(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = await life.start()
    uid = life.kube.objects["trainingjobs", "ada-lab", "run"]["metadata"]["uid"]
    life.observe(attempt=1, progress={"step": 1, "loss": 1.0}, usage={"acceleratorSeconds": 5.0})
    write = history._write

    async def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(history, "_write", broken)
    with pytest.raises(OSError, match="disk full"):
        await history.flush()
    monkeypatch.setattr(history, "_write", write)
    life.observe(attempt=1, progress={"step": 2, "loss": 0.5}, usage={"acceleratorSeconds": 6.0})
    await history.flush()
    assert [p["step"] for p in await history.curve(uid)] == [1, 2]
    assert (await totals(history))[0][2] == 6.0


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), "nan", None, "oops"])
async def test_losses_that_are_no_numbers_leave_a_gap_and_break_nothing(life: Life, loss: object) -> None:
    history = await life.start()
    uid = life.kube.objects["trainingjobs", "ada-lab", "run"]["metadata"]["uid"]
    life.observe(attempt=1, progress={"step": 1, "loss": loss})
    await history.flush()
    (point,) = await history.curve(uid)
    assert point["loss"] is None


async def test_old_deleted_jobs_are_forgotten_with_their_samples(life: Life) -> None:
    history = await life.start()
    life.observe(attempt=1, progress={"step": 1, "loss": 1.0})
    await history.flush()
    uid = life.kube.objects["trainingjobs", "ada-lab", "run"]["metadata"]["uid"]
    await life.stop()
    life.kube.remove(TRAINING_JOBS, "run", "ada-lab")
    history = await life.start()
    await history.prune(NOW + timedelta(seconds=1))
    assert await history.past(None) == []
    assert await history.curve(uid) == []
