"""Job history: totals from statuses, curves, and changes made while the API was down, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from tests.api.conftest import JOB, NOW, SERVICE, Clock
from tests.api.memory_kube import MemoryKube

from busbar.api.access.tenancy import Tenancy
from busbar.api.database.engine import Database
from busbar.api.kubernetes.store import Store
from busbar.api.records import history as module
from busbar.api.records.history import History
from busbar.kube.informer import Key
from busbar.kube.resources import MODEL_SERVICES, TENANTS, TRAINING_JOBS
from busbar.kube.types import TrainingJob


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url)
    yield opened
    await opened.close()


class Life:
    """A cluster, and the job history that successive API processes record."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.kube = MemoryKube()
        self.clock = Clock()
        self.kube.put(TENANTS, {"metadata": {"name": "ada"}, "spec": {"namespaces": ["ada-lab"]}})
        self.kube.put(TRAINING_JOBS, {**JOB, "metadata": {"name": "run", "namespace": "ada-lab"}})
        self.store: Store | None = None
        self.history: History | None = None

    async def start(self) -> History:
        self.store = Store(self.kube, backoff_s=(0.001, 0.01))
        made = History(self.database, self.store, Tenancy(self.store), self.clock)
        await self.store.start()
        await self.store.synced(30)
        await made.reconcile()
        self.history = made
        return made

    async def stop(self) -> None:
        if self.store is not None:
            await self.store.stop()
        if self.history is not None:
            await self.history.resign()

    def observe(self, **status: Any) -> None:
        """A status write that the running process has seen on return."""
        assert self.store is not None
        self.store.observe(TRAINING_JOBS, self.kube.status(TRAINING_JOBS, "ada-lab", "run", **status))


@pytest.fixture
async def life(database: Database) -> AsyncIterator[Life]:
    made = Life(database)
    yield made
    await made.stop()


async def totals(history: History, tenants: set[str] | None = None) -> list[tuple[str, int, float, float]]:
    rows = await history.compute.totals(
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


async def test_a_job_that_changes_and_goes_between_two_flushes_is_closed(life: Life) -> None:
    history = await life.start()
    life.observe(usage={"acceleratorSeconds": 10.0})
    key = Key("ada-lab", "run")
    assert life.store is not None
    last = life.store.find(TrainingJob, "run", "ada-lab")
    history._on_change(key, last, None)
    await history.flush()
    (gone,) = await history.past(None)
    assert (gone["accelerator_seconds"], gone["deleted_at"]) == (10.0, NOW)


async def test_a_deletion_that_could_not_be_written_is_written_by_the_next_flush(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = await life.start()
    life.observe(usage={"acceleratorSeconds": 10.0})
    assert life.store is not None
    last = life.store.find(TrainingJob, "run", "ada-lab")
    write = history._write

    async def broken(*_: object) -> None:
        history._on_change(Key("ada-lab", "run"), last, None)
        raise OSError("disk full")

    monkeypatch.setattr(history, "_write", broken)
    with pytest.raises(OSError, match="disk full"):
        await history.flush()
    monkeypatch.setattr(history, "_write", write)
    await history.flush()
    assert len(await history.past(None)) == 1


async def test_a_job_keeps_its_tenant_when_the_tenant_is_gone(life: Life) -> None:
    history = await life.start()
    life.observe(usage={"acceleratorSeconds": 10.0})
    await history.flush()
    await life.stop()
    life.kube.remove(TENANTS, "ada")
    history = await life.start()
    life.observe(usage={"acceleratorSeconds": 12.0})
    await history.flush()
    assert await totals(history) == [("ada", 1, 12.0, 0.0)]


async def test_a_status_that_fits_no_column_stops_nobodys_history(life: Life) -> None:
    history = await life.start()
    life.observe(
        phase="P" * 40,
        reason="R" * 300,
        message="half \ud83d and a NUL \0",
        attempt=2**40,
        progress={"step": 2**70, "loss": 1.0},
        usage={"acceleratorSeconds": 5.0},
    )
    await history.flush()
    assert (await totals(history))[0][2] == 5.0


async def usage(history: History, since: float, until: float) -> list[tuple[int, float]]:
    """(jobs, accelerator seconds) between two hours from NOW."""
    start, end = NOW + timedelta(hours=since), NOW + timedelta(hours=until)
    rows = await history.compute.totals("tenant", since=start, until=end, tenants=None)
    return [(row.jobs, row.accelerator_seconds) for row in rows]


async def test_a_range_counts_what_was_used_in_it_and_ranges_add_up(life: Life) -> None:
    history = await life.start()
    for seconds in (100.0, 250.0, 250.0, 400.0):
        life.clock.forward(hours=1)
        life.observe(usage={"acceleratorSeconds": seconds})
        await history.flush()
    assert await usage(history, 0, 2) == [(1, 100.0)]
    assert await usage(history, 2, 3) == [(1, 150.0)]
    assert await usage(history, 3, 5) == [(1, 150.0)]
    assert await usage(history, 0, 5) == [(1, 400.0)]
    assert await usage(history, 5, 9) == []


async def test_a_job_that_ended_long_ago_is_not_counted_again_after_a_restart(life: Life) -> None:
    history = await life.start()
    life.observe(usage={"acceleratorSeconds": 7.0}, completionTime="2026-03-01T12:00:00Z", phase="Succeeded")
    await history.flush()
    await life.stop()
    life.clock.forward(days=40)
    history = await life.start()
    assert await usage(history, 24, 41 * 24) == []
    assert await usage(history, 0, 41 * 24) == [(1, 7.0)]


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


async def test_two_replicas_and_a_restart_give_each_point_once(life: Life) -> None:
    first = await life.start()
    assert life.store is not None
    second = History(life.database, life.store, Tenancy(life.store), life.clock)
    for step in (1, 2, 3):
        life.observe(
            attempt=1, progress={"step": step, "loss": 1.0}, usage={"acceleratorSeconds": 5.0 * step}
        )
        await first.flush()
        await second.flush()
    await life.stop()
    history = await life.start()
    uid = life.kube.objects["trainingjobs", "ada-lab", "run"]["metadata"]["uid"]
    assert [p["step"] for p in await history.curve(uid)] == [1, 2, 3]
    assert await totals(history) == [("ada", 1, 15.0, 0.0)]


async def test_two_replicas_give_each_size_of_a_service_once(life: Life) -> None:
    life.kube.put(MODEL_SERVICES, {**SERVICE, "metadata": {"name": "chat", "namespace": "ada-lab"}})
    first = await life.start()
    assert life.store is not None
    second = History(life.database, life.store, Tenancy(life.store), life.clock)
    for ready in (0, 2, 1, 2):
        life.store.observe(
            MODEL_SERVICES, life.kube.status(MODEL_SERVICES, "ada-lab", "chat", readyReplicas=ready)
        )
    await first.flush()
    await second.flush()
    uid = life.kube.objects["modelservices", "ada-lab", "chat"]["metadata"]["uid"]
    assert [p["ready_replicas"] for p in await first.curve(uid)] == [0, 2, 1, 2]


async def test_points_that_were_there_already_thin_nothing(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SAMPLES", 10)
    first = await life.start()
    assert life.store is not None
    second = History(life.database, life.store, Tenancy(life.store), life.clock)
    for step in range(1, 9):
        life.observe(attempt=1, progress={"step": step, "loss": 1.0})
        await first.flush()
        await second.flush()
    uid = life.kube.objects["trainingjobs", "ada-lab", "run"]["metadata"]["uid"]
    assert [p["step"] for p in await first.curve(uid)] == list(range(1, 9))


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


async def test_an_end_in_the_middle_of_a_write_cuts_nothing_off(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = await life.start()
    write, begun, go_on = history._write, asyncio.Event(), asyncio.Event()

    async def slow(*pending: Any) -> None:
        begun.set()
        await go_on.wait()
        await write(*pending)

    monkeypatch.setattr(module, "FLUSH_S", 0.001)
    monkeypatch.setattr(history, "_write", slow)
    running = asyncio.create_task(history.run())
    life.observe(usage={"acceleratorSeconds": 10.0, "cost": 1.0})
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    last = asyncio.create_task(history.flush())
    await asyncio.sleep(0)
    assert not last.done()
    go_on.set()
    await last
    assert await totals(history) == [("ada", 1, 10.0, 1.0)]


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
