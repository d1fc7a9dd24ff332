"""The audit trail: one row per write, with who made it and how it ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, select

from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.database.types import storable
from busbar.api.errors import ApiError

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

    @asynccontextmanager
    async def write(
        self, subject: str, action: str, kind: str, *, namespace: str = "", name: str = "", source: str = ""
    ) -> AsyncIterator[Record]:
        """Record the write that the block makes: `Done`, or the code of the error that it raised."""
        record = Record()
        try:
            yield record
        except ApiError as error:
            await self.note(subject, action, kind, namespace, name, error.code, error.message, source)
            raise
        await self.note(subject, action, kind, namespace, name, "Done", record.message, source)

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
        async with self._db.write() as tx:
            await tx.execute(
                tables.audit.insert().values(
                    at=self._now(),
                    subject=storable(subject, 253),
                    action=action,
                    kind=kind,
                    namespace=storable(namespace, 253),
                    name=storable(name, 253),
                    outcome=outcome,
                    message=storable(message, MESSAGE_CHARS),
                    source=source,
                )
            )

    async def page(
        self, *, before: int | None = None, subject: str | None = None, limit: int = 100
    ) -> list[Entry]:
        """Rows, newest first, older than the row `before`."""
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
