"""Job history: a projection of object status into the database, filled by our own watch.

    watch ──► newest object per uid (a dict, so a busy object costs one write per flush)
                    └── flush every FLUSH_S: upsert `jobs`, note `compute`, add `samples`, thin long curves

A row holds the totals of the status, so after downtime the next list brings it up to date; jobs that were
deleted meanwhile are marked with the last totals seen. Of several replicas one writes (`leadership.py`): a late one
would turn rows back. The others keep the last minute of what they see; the one that leads next writes that, and all
objects anew. Nothing here is needed to schedule.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import RowMapping, delete, func, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from busbar.api.access.tenancy import Tenancy
from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.kubernetes.store import Store
from busbar.api.records.compute import Compute
from busbar.api.records.leadership import KEPT_S, Leadership
from busbar.api.records.projection import Kept, Sample, row_of, sample_of
from busbar.kube.informer import Key
from busbar.kube.types import ModelService, TrainingJob
from busbar.kube.types.meta import Resource as Model

FLUSH_S = 1.0
MAX_SAMPLES = 2_000
"""Samples per job; beyond that, every other point of the older half is deleted."""

log = logging.getLogger(__name__)


class History:
    """Writes the projection and answers queries about it."""

    def __init__(self, database: Database, store: Store, tenancy: Tenancy, clock: Clock = utc_now) -> None:
        self._db = database
        self._store = store
        self._tenancy = tenancy
        self._now = clock
        self.compute = Compute(database)
        self._leadership = Leadership(database, "history")
        self._term: int | None = None
        """In which this process led last, and has written every object."""
        self._changed: dict[str, Kept] = {}
        self._gone: dict[str, tuple[Kept, datetime]] = {}
        self._pending: dict[str, list[tuple[Sample, datetime]]] = {}
        self._last_sample: dict[str, Sample] = {}
        self._counts: dict[str, int] = {}
        self._flushing = asyncio.Lock()
        store.subscribe(self._on_change)

    @property
    def pending(self) -> int:
        """Objects and jobs of which something is not written yet."""
        return len(self._changed) + len(self._gone) + len(self._pending)

    # -- filling ---------------------------------------------------------------------------------------

    def _on_change(self, _key: Key, old: Model | None, new: Model | None) -> None:
        if isinstance(old, Kept) and (new is None or new.metadata.uid != old.metadata.uid):
            self._gone[old.metadata.uid] = old, self._now()
            self._changed.pop(old.metadata.uid, None)
        if not isinstance(new, Kept):
            return
        uid = new.metadata.uid
        self._changed[uid] = new
        self._gone.pop(uid, None)
        sample = sample_of(new)
        if sample is not None and sample != self._last_sample.get(uid):
            self._last_sample[uid] = sample
            self._pending.setdefault(uid, []).append((sample, self._now()))

    async def run(self) -> None:
        """Flush forever. While the database is unavailable, changes stay pending.

        Cancelling this does not interrupt a write: it finishes, and the next `flush` waits for it.
        """
        await self._store.synced(timeout_s=3600)
        await asyncio.shield(self.reconcile())
        while True:
            await asyncio.sleep(FLUSH_S)
            with contextlib.suppress(SQLAlchemyError, OSError):
                await asyncio.shield(self.flush())

    async def reconcile(self) -> None:
        """After a start: write every object, and mark rows of objects that no longer exist as deleted."""
        async with self._flushing:
            self._term = None
            await self._flush(unasked=True)

    @contextlib.asynccontextmanager
    async def replaced(self) -> AsyncIterator[None]:
        """Write nothing while the block replaces the tables; afterwards every object that exists is written anew, and
        the rows of others are marked as deleted, by whichever replica leads then."""
        async with self._flushing:
            yield
            self._term = None
            with contextlib.suppress(SQLAlchemyError, OSError):  # what is pending is tried again by `run`
                await self._leadership.depose()
                await self._flush(unasked=True)

    async def flush(self) -> None:
        """Write what changed since the last flush, in one transaction, where this process leads."""
        async with self._flushing:
            await self._flush()

    async def resign(self) -> None:
        """Let another replica lead at once."""
        async with self._flushing:
            await self._leadership.resign()
            self._term = None

    async def _flush(self, *, unasked: bool = False) -> None:
        if not (self.pending or unasked or self._leadership.due):
            return
        changed, gone, pending = self._changed, self._gone, self._pending
        self._changed, self._gone, self._pending = {}, {}, {}
        try:
            is_written = await self._write(changed, gone, pending)
        except BaseException as error:
            self._put_back(changed, gone, pending)
            log.warning("history was not written and will be tried again: %s", type(error).__name__)
            raise
        if not is_written:
            since = self._now() - timedelta(seconds=KEPT_S)
            recent = {
                uid: [point for point in points if point[1] >= since] for uid, points in pending.items()
            }
            self._put_back(
                {},  # a new leader writes every object
                {uid: seen for uid, seen in gone.items() if seen[1] >= since},
                {uid: points for uid, points in recent.items() if points},
            )

    def _put_back(
        self,
        changed: dict[str, Kept],
        gone: dict[str, tuple[Kept, datetime]],
        pending: dict[str, list[tuple[Sample, datetime]]],
    ) -> None:
        """What arrived meanwhile is newer and wins."""
        newer = {*self._changed, *self._gone}
        self._changed |= {uid: obj for uid, obj in changed.items() if uid not in newer}
        self._gone |= {uid: seen for uid, seen in gone.items() if uid not in newer}
        for uid, points in self._pending.items():
            pending.setdefault(uid, []).extend(points)
        self._pending = pending

    async def _write(
        self,
        changed: dict[str, Kept],
        gone: dict[str, tuple[Kept, datetime]],
        pending: dict[str, list[tuple[Sample, datetime]]],
    ) -> bool:
        """Whether it was written: not where another replica leads."""
        async with self._db.write() as tx:
            term = await self._leadership.take(tx)
            if term is None:
                return False
            if term != self._term:
                changed = await self._begin(tx, changed, gone)
            await self._write_rows(tx, changed, gone)
            await self._write_points(tx, pending)
        self._term = term
        for uid in gone:
            self._last_sample.pop(uid, None)
            self._counts.pop(uid, None)
            self.compute.forget(uid)
        return True

    async def _begin(
        self, tx: AsyncConnection, changed: dict[str, Kept], gone: dict[str, tuple[Kept, datetime]]
    ) -> dict[str, Kept]:
        """A term begins: what is remembered of the tables is void, and rows that are open wrongly are closed.

        Returns:
            Every object that exists.
        """
        self._counts.clear()
        self.compute.forget_all()
        existing: tuple[Kept, ...] = (*self._store.all(TrainingJob), *self._store.all(ModelService))
        alive = {obj.metadata.uid: obj for obj in existing} | changed
        jobs = tables.jobs
        found = await tx.execute(select(jobs.c.uid).where(jobs.c.deleted_at.is_(None)))
        lost = sorted(uid for uid in found.scalars() if uid not in alive and uid not in gone)
        for uid in lost:
            await tx.execute(update(jobs).where(jobs.c.uid == uid).values(deleted_at=self._now()))
        log.info("this replica writes the history: %d objects, %d rows closed", len(alive), len(lost))
        return alive

    async def _write_rows(
        self, tx: AsyncConnection, changed: dict[str, Kept], gone: dict[str, tuple[Kept, datetime]]
    ) -> None:
        now = self._now()
        rows = [self._row(obj, now) for obj in changed.values()]
        rows += [{**self._row(obj, now), "deleted_at": at} for obj, at in gone.values()]
        if not rows:
            return
        statement = self._db.upsert(tables.jobs)
        kept = ("uid", "created_at")
        changes = {name: statement.excluded[name] for name in rows[0] if name not in kept}
        known = func.nullif(
            statement.excluded.tenant, ""
        )  # keep the tenant of a job whose tenant was deleted
        changes["tenant"] = func.coalesce(known, tables.jobs.c.tenant)
        await tx.execute(statement.on_conflict_do_update(index_elements=["uid"], set_=changes), rows)
        await self.compute.note(tx, rows, now)

    async def _write_points(
        self, tx: AsyncConnection, pending: dict[str, list[tuple[Sample, datetime]]]
    ) -> None:
        points = [
            _point(uid, sample, at) for uid, samples in sorted(pending.items()) for sample, at in samples
        ]
        if points:
            once = self._db.upsert(tables.samples).on_conflict_do_nothing(
                index_elements=["uid", "attempt", "mark"]
            )
            await tx.execute(once, points)
        for uid in pending:
            await self._thin(tx, uid, len(pending[uid]))

    def _row(self, obj: Kept, now: datetime) -> dict[str, Any]:
        return row_of(obj, self._tenancy.tenant_of(obj.metadata.namespace or ""), now)

    async def _thin(self, tx: AsyncConnection, uid: str, added: int) -> None:
        samples = tables.samples
        if uid not in self._counts:
            query = select(func.count()).select_from(samples).where(samples.c.uid == uid)
            self._counts[uid] = (await tx.execute(query)).scalar_one()
        else:
            self._counts[uid] += added
        if self._counts[uid] <= MAX_SAMPLES:
            return
        ids = (
            (await tx.execute(select(samples.c.id).where(samples.c.uid == uid).order_by(samples.c.id)))
            .scalars()
            .all()
        )
        # The count includes samples that another replica, or this one before a restart, had written already.
        doomed = ids[: len(ids) // 2][1::2] if len(ids) > MAX_SAMPLES else []
        await tx.execute(delete(samples).where(samples.c.id.in_(doomed)))
        self._counts[uid] = len(ids) - len(doomed)

    async def prune(self, older_than: datetime) -> None:
        """Delete the rows and samples of jobs that were deleted before a time."""
        async with self._db.write() as tx:
            await tx.execute(delete(tables.jobs).where(tables.jobs.c.deleted_at < older_than))

    # -- reading ---------------------------------------------------------------------------------------

    async def curve(self, uid: str, points: int = 500) -> list[RowMapping]:
        """A job's samples in time order, at most about `points` of them."""
        samples = tables.samples
        query = select(samples).where(samples.c.uid == uid).order_by(samples.c.id)
        async with self._db.read() as db:
            rows = list((await db.execute(query)).mappings().all())
        if len(rows) <= points:
            return rows
        stride = -(-len(rows) // points)
        return [*rows[: len(rows) - 1 : stride], rows[-1]]

    async def past(self, namespaces: Collection[str] | None, limit: int = 100) -> list[RowMapping]:
        """Jobs that were deleted, newest first; `namespaces` None: everybody's."""
        jobs = tables.jobs
        query = (
            select(jobs).where(jobs.c.deleted_at.is_not(None)).order_by(jobs.c.deleted_at.desc()).limit(limit)
        )
        if namespaces is not None:
            query = query.where(jobs.c.namespace.in_(sorted(namespaces)))
        async with self._db.read() as db:
            return list((await db.execute(query)).mappings().all())


def _point(uid: str, sample: Sample, at: datetime) -> dict[str, Any]:
    """The row of `samples` for a point."""
    return {"uid": uid, "at": at, **asdict(sample)}
