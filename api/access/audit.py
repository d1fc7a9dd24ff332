"""The audit trail: one row per write, with who made it and how it ended.

A write of an object in Kubernetes has its row before it is made (`Begun`): while the database does not answer, nothing is
written that nobody could find here. An end that cannot be noted is noted later, by the next write or look at the trail. If
the process ends before, the row says `Begun`: that the write was asked for, and not what became of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.database.types import storable
from busbar.api.errors import ApiError

BEGUN, DONE = "Begun", "Done"
MESSAGE_CHARS = 500
MAX_ID = 2**63 - 1
"""The largest id that both databases can compare with."""


@dataclass(frozen=True)
class Entry:
    """One row of the trail."""

    id: int
    at: datetime
    subject: str
    action: str
    kind: str
    namespace: str
    name: str
    outcome: str
    message: str
    source: str


@dataclass
class Record:
    """What the block of `Audit.write` may add to the row of its success."""

    message: str = ""


class Audit:
    """Writes and reads the audit table."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._db = database
        self._now = clock
        self._late: dict[int, tuple[str, str]] = {}
        """Rows whose outcome and message could not be written yet."""

    @asynccontextmanager
    async def ahead(
        self, subject: str, action: str, kind: str, *, namespace: str, name: str, source: str
    ) -> AsyncIterator[None]:
        """Record the write that the block makes elsewhere, before and after it. The block is not entered while the
        database is away, and its result stands where the database goes away meanwhile."""
        values = self._row(
            "", subject=subject, action=action, kind=kind, namespace=namespace, name=name, outcome=BEGUN, source=source
        )  # fmt: skip
        async with self._db.write() as tx:
            made = await tx.execute(tables.audit.insert().values(**values).returning(tables.audit.c.id))
            row: int = made.scalar_one()
        try:
            yield
        except ApiError as error:
            await self._end(row, error.code, error.message)
            raise
        await self._end(row, DONE, "")

    async def _end(self, row: int, outcome: str, message: str) -> None:
        self._late[row] = outcome, storable(message, MESSAGE_CHARS)
        await self._catch_up()

    async def _catch_up(self) -> None:
        """Write the outcomes that are not written yet; they wait for the next call where that fails."""
        late = dict(self._late)
        if not late:
            return
        with suppress(SQLAlchemyError):
            async with self._db.write() as tx:
                await self._write_outcomes(tx, late)
            for row, what in late.items():
                if self._late.get(row) == what:
                    del self._late[row]

    async def _write_outcomes(self, tx: AsyncConnection, late: dict[int, tuple[str, str]]) -> None:
        for row, (outcome, message) in sorted(late.items()):
            await tx.execute(
                update(tables.audit).where(tables.audit.c.id == row).values(outcome=outcome, message=message)
            )

    @asynccontextmanager
    async def write(
        self, subject: str, action: str, kind: str, *, namespace: str = "", name: str = "", source: str = ""
    ) -> AsyncIterator[Record]:
        """Record the write that the block makes in the database: `Done`, or the code of the error that it raised."""
        record = Record()
        try:
            yield record
        except ApiError as error:
            await self.note(subject, action, kind, namespace, name, error.code, error.message, source)
            raise
        await self.note(subject, action, kind, namespace, name, DONE, record.message, source)

    async def note(
        self,
        subject: str,
        action: str,
        kind: str,
        namespace: str,
        name: str,
        outcome: str,
        message: str,
        source: str,
    ) -> None:
        values = self._row(
            message, subject=subject, action=action, kind=kind, namespace=namespace, name=name, outcome=outcome,
            source=source,
        )  # fmt: skip
        async with self._db.write() as tx:
            await tx.execute(tables.audit.insert().values(**values))

    def _row(self, message: str, **said: str) -> dict[str, object]:
        """The values of a new row."""
        names = {key: storable(said[key], 253) for key in ("subject", "namespace", "name")}
        return {"at": self._now(), **said, **names, "message": storable(message, MESSAGE_CHARS)}

    async def page(
        self, *, before: int | None = None, subject: str | None = None, limit: int = 100
    ) -> list[Entry]:
        """Rows, newest first, older than the row `before`."""
        await self._catch_up()
        query = select(tables.audit).order_by(tables.audit.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(tables.audit.c.id < before)
        if subject:
            query = query.where(tables.audit.c.subject == storable(subject, 253))
        async with self._db.read() as db:
            rows = (await db.execute(query)).mappings().all()
        return [Entry(**row) for row in rows]

    async def prune(self, older_than: datetime) -> None:
        async with self._db.write() as tx:
            await tx.execute(delete(tables.audit).where(tables.audit.c.at < older_than))
