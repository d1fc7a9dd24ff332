"""Backup and restore of the database as lines of JSON (`busbar.api.database.dump`).

A backup is read in one read transaction, so it is the state of one moment. A restore is one write transaction: it is
complete or nothing of it is there. It is the one transaction here that waits for the network, because a dump need not
fit into memory or a temporary folder; the limit on how long a request's body may take bounds it.

A restore needs a database that is otherwise unused. In it there may be: the caller's own row, tokens and sessions; rows
of the audit trail, which are kept after those of the backup; and the history of objects that exist now, which is made
anew from their status. Objects that were created again have other uids, so a restore takes a table from old to new.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version

from sqlalchemy import Table, delete, func, select, text
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from busbar.api.access.audit import Audit
from busbar.api.access.identity import Caller, CallerRole, Scope, check_subject, foreign_groups
from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.dump import MAX_LINE_BYTES, Header, Reader, Row, Writer, dumped
from busbar.api.database.engine import Database, wait_for_the_client
from busbar.api.errors import Conflict, Invalid
from busbar.api.records.history import History

BATCH_ROWS = 500
CHUNK_BYTES = 64 * 1024
_OF_PEOPLE = ("subjects", "tokens")
"""Tables in which the caller's own rows may exist; those stay as they are."""
_WITH_UID = frozenset({"jobs", "compute", "samples"})


@dataclass(frozen=True)
class DatabaseState:
    """Whether a backup can be restored here."""

    revision: str
    version: str
    unused: bool
    found: list[str]
    """What stands in the way, in words."""


@dataclass(frozen=True)
class Restored:
    """What a restore wrote."""

    rows: int
    made_at: datetime
    made_by: str


class Backup:
    """Reads and replaces the tables."""

    def __init__(self, database: Database, history: History, audit: Audit, clock: Clock = utc_now) -> None:
        self._db = database
        self._history = history
        self._audit = audit
        self._now = clock

    async def state(self, caller: Caller) -> DatabaseState:
        """The schema, and whether `restore` would take a dump of it from this caller."""
        async with self._db.read() as db:
            revision, found = await _revision(db), await _in_use(db, caller)
        return DatabaseState(revision, version("busbar"), not found, found)

    # -- backup ----------------------------------------------------------------------------------------

    async def dump(self, caller: Caller) -> AsyncIterator[bytes]:
        """All tables; the audit trail says that the caller has begun to read them."""
        await self._audit.note(caller.subject, "backup", "Database", "", "", "Done", "", "")
        await self._history.flush()
        writer, waiting = Writer(), bytearray()
        async with self._moment() as db:
            waiting += writer.header(Header(await _revision(db), version("busbar"), self._now()))
            for table in dumped():
                waiting += writer.table(table)
                result = await db.stream(select(table).order_by(*table.primary_key.columns))
                async for rows in result.mappings().partitions(BATCH_ROWS):
                    for row in rows:
                        waiting += writer.row(table, dict(row))
                    if len(waiting) >= CHUNK_BYTES:
                        yield bytes(waiting)
                        waiting.clear()
        yield bytes(waiting) + writer.trailer()

    @contextlib.asynccontextmanager
    async def _moment(self) -> AsyncIterator[AsyncConnection]:
        """A connection on which every query sees the same moment."""
        async with self._db.engine.connect() as db:
            if self._db.is_sqlite:
                await db.exec_driver_sql("BEGIN")  # the driver begins transactions before writes only
            else:
                await db.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
                await wait_for_the_client(db)
            yield db

    # -- restore ---------------------------------------------------------------------------------------

    async def restore(self, caller: Caller, body: AsyncIterator[bytes]) -> Restored:
        """Write a dump into the database.

        Args:
            body: a line `{"uids": {"old": "new", …}}`, then the dump.

        Raises:
            Conflict: the database is used.
            Invalid: the dump is damaged, cut short, of another schema, or holds what this API would never write.
        """
        async with self._audit.write(caller.subject, "restore", "Database") as record:
            try:
                async with self._history.replaced():
                    done = await self._restore(caller, body)
            except (IntegrityError, DataError) as error:
                raise Invalid("the backup holds rows that contradict each other") from error
            finally:
                async for _ in body:  # a client that still sends would not read the answer
                    pass
            record.message = f"{done.rows} rows of {done.made_at.isoformat()}"
        return done

    async def _restore(self, caller: Caller, body: AsyncIterator[bytes]) -> Restored:
        uids, first = await _uids(body)
        async with self._db.write() as tx:
            await wait_for_the_client(tx)
            await self._lock(tx)
            if found := await _in_use(tx, caller):
                raise Conflict(
                    f"a backup is restored into an unused database only; this one has {', '.join(found)}"
                )
            reader = Reader(await _revision(tx))
            kept = await _set_aside(tx)
            batch = _Batch(self._db, tx, uids)
            for row in reader.feed(first):
                await batch.add(*row)
            async for piece in body:
                for row in reader.feed(piece):
                    await batch.add(*row)
            await batch.write()
            reader.finish()
            await self._set_sequences(tx)
            if kept:
                await tx.execute(tables.audit.insert(), kept)
        assert reader.header is not None
        return Restored(reader.rows, reader.header.at, reader.header.version)

    async def _lock(self, tx: AsyncConnection) -> None:
        """Keep other replicas from writing meanwhile; on SQLite this process is the only one."""
        if not self._db.is_sqlite:
            names = ", ".join(table.name for table in dumped())
            await tx.execute(text("SET LOCAL lock_timeout = '15s'"))
            await tx.execute(text(f"LOCK TABLE {names} IN EXCLUSIVE MODE"))

    async def _set_sequences(self, tx: AsyncConnection) -> None:
        """Let new rows follow the restored ids; SQLite does so by itself."""
        if self._db.is_sqlite:
            return
        for table in (tables.audit, tables.samples):
            following = select(func.coalesce(func.max(table.c.id), 0) + 1).scalar_subquery()
            sequence = func.pg_get_serial_sequence(table.name, "id")
            await tx.execute(select(func.setval(sequence, following, False)))


class _Batch:
    """Rows that are written together, of one table at a time."""

    def __init__(self, database: Database, tx: AsyncConnection, uids: Mapping[str, str]) -> None:
        self._db = database
        self._tx = tx
        self._uids = uids
        self._table: Table | None = None
        self._rows: list[Row] = []

    async def add(self, table: Table, row: Row) -> None:
        if table is not self._table or len(self._rows) >= BATCH_ROWS:
            await self.write()
            self._table = table
        _check(table, row)
        if table.name in _WITH_UID:
            row["uid"] = self._uids.get(row["uid"], row["uid"])
        self._rows.append(row)

    async def write(self) -> None:
        if self._table is None or not self._rows:
            return
        statement = self._db.upsert(self._table)
        if self._table.name in _OF_PEOPLE:
            statement = statement.on_conflict_do_nothing()
        await self._tx.execute(statement, self._rows)
        self._rows = []


def _check(table: Table, row: Row) -> None:
    """Refuse people that could not have logged in and tokens that could not have been made: a file must give nobody
    the rights of a group of Kubernetes."""
    try:
        if table is tables.subjects:
            check_subject(row["name"])
            if set(foreign_groups(row["groups"])) != set(row["groups"]):
                raise Invalid(f"{row['name']} has a group whose name is reserved for Kubernetes")
        elif table is tables.tokens:
            CallerRole(row["role"])
            for scope in row["scopes"]:
                Scope(scope)
    except (Invalid, ValueError) as error:
        raise Invalid(f"the backup holds a row of {table.name} that Busbar never writes: {error}") from error


async def _uids(body: AsyncIterator[bytes]) -> tuple[dict[str, str], bytes]:
    """The first line, and what came with it of the dump."""
    start = b""
    async for piece in body:
        start += piece
        if b"\n" in start or len(start) > MAX_LINE_BYTES:
            break
    line, _, rest = start.partition(b"\n")
    try:
        uids = json.loads(line)["uids"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Invalid('the first line must be {"uids": {"old": "new", …}}') from error
    fits = isinstance(uids, dict) and all(isinstance(v, str) and 0 < len(v) <= 64 for v in uids.values())
    if not fits or len(set(uids.values())) != len(uids):
        raise Invalid("`uids` must name a different new uid for each old one")
    return uids, rest


async def _revision(db: AsyncConnection) -> str:
    return str((await db.execute(text("SELECT version_num FROM alembic_version"))).scalar_one())


async def _in_use(db: AsyncConnection, caller: Caller) -> list[str]:
    """What makes the database a used one, in words; see the head of this module."""
    people, tokens, jobs = tables.subjects, tables.tokens, tables.jobs
    counts = {
        "people": select(func.count()).select_from(people).where(people.c.name != caller.subject),
        "tokens of others": select(func.count())
        .select_from(tokens)
        .where(tokens.c.subject != caller.subject),
        "rows of inference usage": select(func.count()).select_from(tables.ledger),
        "gateways that delivered usage": select(func.count()).select_from(tables.ledger_cursor),
        "jobs and services that no longer exist": select(func.count())
        .select_from(jobs)
        .where(jobs.c.deleted_at.is_not(None)),
    }
    found = [(name, (await db.execute(query)).scalar_one()) for name, query in counts.items()]
    return [f"{count} {name}" for name, count in found if count]


async def _set_aside(tx: AsyncConnection) -> list[Row]:
    """Remove what makes way for the backup; the rows of the audit trail, without ids, to be written after it."""
    trail = tables.audit
    rows = (await tx.execute(select(trail).order_by(trail.c.id))).mappings().all()
    await tx.execute(delete(trail))
    await tx.execute(delete(tables.jobs))
    return [{name: value for name, value in row.items() if name != "id"} for row in rows]
