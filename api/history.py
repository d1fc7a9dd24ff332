"""Job history: a projection of object status into the database, filled by our own watch.

    watch ──► newest object per uid (a dict, so a busy object costs one write per flush)
                    └── flush every FLUSH_S: upsert `jobs`, note `compute`, add `samples`, thin long curves

The row always holds the totals of the status, so after being down the next list brings it up to date; jobs
that vanished meanwhile are marked deleted with the last totals seen. Several replicas write the same rows.
Nothing here is needed to schedule.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, delete, func, select, update
from sqlalchemy.exc import SQLAlchemyError

from busbar.api.clock import Clock, utc_now
from busbar.api.compute import Compute
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.kubernetes import Object
from busbar.api.projection import Sample, row_of, sample_of
from busbar.api.store import Store
from busbar.api.tenancy import Tenancy
from busbar.kube.informer import Key
from busbar.kube.resources import MODEL_SERVICES, TRAINING_JOBS, Resource

FLUSH_S = 1.0
MAX_SAMPLES = 2_000
"""Per job; a longer curve loses every other point of its older half."""

log = logging.getLogger(__name__)


class History:
    """The projection and its queries."""

    def __init__(self, database: Database, store: Store, tenancy: Tenancy, clock: Clock = utc_now) -> None:
        self._db = database
        self._store = store
        self._tenancy = tenancy
        self._now = clock
        self.compute = Compute(database)
        self._changed: dict[str, Object] = {}
        self._gone: dict[str, Object] = {}
        self._pending: dict[str, list[tuple[Sample, datetime]]] = {}
        self._last_sample: dict[str, Sample] = {}
        self._counts: dict[str, int] = {}
        self._flushing = asyncio.Lock()
        store.subscribe(self._on_change)

    # -- filling ---------------------------------------------------------------------------------------

    def _on_change(self, resource: Resource, _key: Key, old: Object | None, new: Object | None) -> None:
        if resource not in (TRAINING_JOBS, MODEL_SERVICES):
            return
        if old is not None and (new is None or new["metadata"]["uid"] != old["metadata"]["uid"]):
            self._gone[old["metadata"]["uid"]] = old
            self._changed.pop(old["metadata"]["uid"], None)
        if new is None:
            return
        uid = new["metadata"]["uid"]
        self._changed[uid] = new
        self._gone.pop(uid, None)
        sample = sample_of(new)
        if sample is not None and sample != self._last_sample.get(uid):
            self._last_sample[uid] = sample
            self._pending.setdefault(uid, []).append((sample, self._now()))

    async def run(self) -> None:
        """Flush for ever. A database that is away costs nothing but delay: what is pending stays pending.

        Whoever cancels this cuts off no write: it ends by itself, and the next `flush` waits for it.
        """
        await self._store.synced(timeout_s=3600)
        await asyncio.shield(self.reconcile())
        while True:
            await asyncio.sleep(FLUSH_S)
            with contextlib.suppress(SQLAlchemyError, OSError):
                await asyncio.shield(self.flush())

    async def reconcile(self) -> None:
        """After a start: rows of objects that are no longer there are closed."""
        async with self._flushing:
            await self._reconcile()

    async def _reconcile(self) -> None:
        alive = {
            obj["metadata"]["uid"]
            for resource in (TRAINING_JOBS, MODEL_SERVICES)
            for obj in self._store.all(resource)
        }
        jobs = tables.jobs
        async with self._db.read() as db:
            open_rows = (
                (await db.execute(select(jobs.c.uid).where(jobs.c.deleted_at.is_(None)))).scalars().all()
            )
        lost = [uid for uid in open_rows if uid not in alive]
        if lost:
            async with self._db.write() as tx:
                for uid in lost:
                    await tx.execute(update(jobs).where(jobs.c.uid == uid).values(deleted_at=self._now()))
        await self._flush()

    async def flush(self) -> None:
        """Write what changed since the last flush, in one transaction."""
        async with self._flushing:
            await self._flush()

    async def _flush(self) -> None:
        if not (self._changed or self._gone or self._pending):
            return
        changed, gone, pending = self._changed, self._gone, self._pending
        self._changed, self._gone, self._pending = {}, {}, {}
        try:
            await self._write(changed, gone, pending)
        except BaseException as error:
            # Put it back; what arrived meanwhile is newer and wins.
            newer = {*self._changed, *self._gone}
            self._changed |= {uid: obj for uid, obj in changed.items() if uid not in newer}
            self._gone |= {uid: obj for uid, obj in gone.items() if uid not in newer}
            for uid, points in self._pending.items():
                pending.setdefault(uid, []).extend(points)
            self._pending = pending
            log.warning("history was not written and will be tried again: %s", type(error).__name__)
            raise

    async def _write(
        self,
        changed: dict[str, Object],
        gone: dict[str, Object],
        pending: dict[str, list[tuple[Sample, datetime]]],
    ) -> None:
        now = self._now()
        rows = [self._row(obj, now) for obj in changed.values()]
        rows += [{**self._row(obj, now), "deleted_at": now} for obj in gone.values()]
        rows.sort(key=lambda row: str(row["uid"]))  # replicas that lock rows in one order do not deadlock
        points = [
            _point(uid, sample, at) for uid, samples in sorted(pending.items()) for sample, at in samples
        ]
        async with self._db.write() as tx:
            if rows:
                statement = self._db.upsert(tables.jobs)
                kept = ("uid", "created_at")
                changes = {name: statement.excluded[name] for name in rows[0] if name not in kept}
                known = func.nullif(statement.excluded.tenant, "")  # a tenant that is gone still had the job
                changes["tenant"] = func.coalesce(known, tables.jobs.c.tenant)
                await tx.execute(statement.on_conflict_do_update(index_elements=["uid"], set_=changes), rows)
                await self.compute.note(tx, rows, now)
            if points:
                once = self._db.upsert(tables.samples).on_conflict_do_nothing(
                    index_elements=["uid", "attempt", "mark"]
                )
                await tx.execute(once, points)
            for uid in pending:
                await self._thin(tx, uid, len(pending[uid]))
        for uid in gone:
            self._last_sample.pop(uid, None)
            self._counts.pop(uid, None)
            self.compute.forget(uid)

    def _row(self, obj: Object, now: datetime) -> dict[str, Any]:
        return row_of(obj, self._tenancy.tenant_of(obj["metadata"]["namespace"]), now)

    async def _thin(self, tx: Any, uid: str, added: int) -> None:
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
        # We counted what we offered; another replica, or we before a restart, may have written it already.
        doomed = ids[: len(ids) // 2][1::2] if len(ids) > MAX_SAMPLES else []
        await tx.execute(delete(samples).where(samples.c.id.in_(doomed)))
        self._counts[uid] = len(ids) - len(doomed)

    async def prune(self, older_than: datetime) -> None:
        """Forget jobs that were deleted before a time, with their samples."""
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
