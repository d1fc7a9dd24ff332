"""Opens the database: SQLite with write-ahead log for one process, PostgreSQL for more.

A session is a short transaction and never spans a network call. SQLite allows one writer, so writes go
through one lock in this process; on PostgreSQL the lock is not taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Table, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from busbar.api.database.metrics import DatabaseMetrics
from busbar.kube.errors import SettingsError

IDLE_IN_TRANSACTION_S = 15.0
"""A transaction in which nothing happens for so long is ended by PostgreSQL: its process has stopped, and the rows that
it wrote would hold up the other replicas."""


CONNECT_S = 5.0
"""For so long a connection to PostgreSQL is tried."""
ANSWER_S = 30.0
"""For so long PostgreSQL is waited for with one statement. A machine that went away says nothing for many minutes."""
PLACE_S = 10.0
"""For so long a request waits for one of the connections, all of which may wait for PostgreSQL."""


class Unreachable(SQLAlchemyError):
    """PostgreSQL cannot be connected to; asyncpg raises an OSError then, SQLAlchemy none of its own."""


class Database:
    """A connection pool with `read()` and `write()` transactions."""

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        self.url = url
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if parsed.drivername not in ("sqlite+aiosqlite", "postgresql+asyncpg"):
            raise SettingsError(
                f"database driver {parsed.drivername!r} is not supported; "
                "use sqlite+aiosqlite:///path or postgresql+asyncpg://user:password@host/name"
            )
        if self.is_sqlite and parsed.database and parsed.database != ":memory:":
            folder = Path(parsed.database).parent
            if not folder.is_dir():
                raise SettingsError(f"database folder {folder} does not exist; mount a volume there")
        self.engine = make_engine(url, ANSWER_S)
        self.metrics = DatabaseMetrics()
        self._writer = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection for queries."""
        with self.metrics.timed("read"), _connecting():
            async with self.engine.connect() as connection:
                yield connection

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, committed when the block ends without an exception."""
        with self.metrics.timed("write"), _connecting():
            async with (
                self._writer if self.is_sqlite else contextlib.nullcontext(),
                self.engine.begin() as connection,
            ):
                yield connection

    def upsert(self, table: Table) -> Any:
        """An INSERT that has `on_conflict_do_nothing` and `on_conflict_do_update` on either database."""
        if self.is_sqlite:
            from sqlalchemy.dialects.sqlite import insert as sqlite_insert

            return sqlite_insert(table)
        from sqlalchemy.dialects.postgresql import insert as postgresql_insert

        return postgresql_insert(table)

    async def close(self) -> None:
        await self.engine.dispose()


def disk_is_full(error: BaseException) -> bool:
    """Whether a database refused a write for want of space: SQLite says the first, PostgreSQL the second."""
    text = str(error).splitlines()[0] if str(error) else ""
    return "disk is full" in text or "No space left on device" in text


@contextlib.contextmanager
def _connecting() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unreachable(str(error)) from error


def make_engine(url: str, answer_s: float | None = None) -> AsyncEngine:
    """An engine with this project's settings for the URL's database.

    Args:
        answer_s: the most seconds for one statement on PostgreSQL; None: a migration may wait for another one.
    """
    if make_url(url).get_backend_name() == "sqlite":
        # One thread per connection: a small pool keeps memory low and still lets reads pass a write.
        engine = create_async_engine(url, pool_size=3, max_overflow=2)
        event.listen(engine.sync_engine, "connect", _sqlite_pragmas)
        event.listen(engine.sync_engine, "invalidate", _sqlite_rollback)
        return engine
    of_session = {
        "timezone": "UTC",
        "application_name": "busbar-api",
        "idle_in_transaction_session_timeout": str(round(IDLE_IN_TRANSACTION_S * 1000)),
    }
    return create_async_engine(
        url,
        pool_size=5,
        max_overflow=5,
        pool_timeout=PLACE_S,
        pool_pre_ping=True,
        connect_args={"server_settings": of_session, "timeout": CONNECT_S, "command_timeout": answer_s},
    )


async def wait_for_the_client(connection: AsyncConnection) -> None:
    """Let this transaction wait for a client longer than `IDLE_IN_TRANSACTION_S`: it sends or reads at its own pace."""
    if connection.dialect.name == "postgresql":
        await connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")


def _sqlite_rollback(connection: Any, _record: Any, _error: BaseException | None) -> None:
    """Roll back a write that was cancelled half way. SQLite keeps a closed connection, with its transaction
    and the write lock, for as long as one of its statements exists, and the traceback of the cancellation
    refers to one. Without this every other write fails after `busy_timeout` until that traceback is freed.

    The connection is closed next, but SQLite keeps a closed connection, its transaction and so the write lock for
    as long as a statement of it exists, and the traceback of the cancellation holds one: until it was freed,
    every other write failed after `busy_timeout`.
    """
    with contextlib.suppress(SQLAlchemyError, sqlite3.Error):  # there may be nothing left to talk to
        connection.rollback()


def _sqlite_pragmas(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "foreign_keys=ON",
        "busy_timeout=30000",
        "cache_size=-2000",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
