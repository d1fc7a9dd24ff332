"""Brings the database to the newest schema at start, or moves it by hand (`busbar-api migrate`).

On PostgreSQL an advisory lock lets one of several starting replicas do it while the others wait; on SQLite a
lock on a file beside the database does the same, and foreign keys are off while tables are rebuilt in batches. Each
migration is one transaction on both: one that was interrupted (by a full disk, or kill -9) has done nothing.
Alembic keeps its context in module globals: one migration at a time per process.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, event, text
from sqlalchemy.engine import make_url

from busbar.api.database.engine import make_engine

if TYPE_CHECKING:
    from alembic.config import Config

ADVISORY_LOCK = 0x62757362  # "busb": any constant that no other program on this server uses
LOCK_TIMEOUT = "15s"


def config_for(connection: Connection | None = None) -> Config:
    """Alembic's configuration, made in code: the package carries no ini file."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    return config


async def migrate(url: str, revision: str = "head") -> None:
    """Upgrade or downgrade the database at `url` to `revision` ("base" empties it; "-1" is the one before)."""
    engine = make_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _leave_transactions_to_us)
        event.listen(engine.sync_engine, "begin", _begin)
    try:
        async with engine.connect() as connection:
            with _file_lock(url):
                await connection.run_sync(_migrate, revision)
    finally:
        await engine.dispose()


def _leave_transactions_to_us(connection: Any, _record: Any) -> None:
    """Python's sqlite3 begins no transaction before DDL, so that each statement would be one. Within a transaction
    foreign keys cannot be turned off any more."""
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys=OFF")
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def file_of(url: str) -> Path | None:
    """The file of a SQLite database; None: it has none."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        return None
    return Path(parsed.database)


@contextlib.contextmanager
def _file_lock(url: str) -> Iterator[None]:
    """Hold `<database>.lock`, for SQLite in a file."""
    file = file_of(url)
    if file is None:
        yield
        return
    with Path(f"{file}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _migrate(connection: Connection, revision: str) -> None:
    from alembic import command

    postgresql = connection.dialect.name == "postgresql"
    if postgresql:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": ADVISORY_LOCK})
        connection.execute(text(f"SET lock_timeout = '{LOCK_TIMEOUT}'"))
        connection.commit()
    try:
        config = config_for(connection)
        if revision == "base" or revision.startswith("-") or _is_older(connection, config, revision):
            command.downgrade(config, revision)
        else:
            command.upgrade(config, revision)
        connection.commit()
    finally:
        if postgresql:
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": ADVISORY_LOCK})
            connection.commit()


def _is_older(connection: Connection, config: Config, revision: str) -> bool:
    """Whether the database has gone past this revision."""
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    current = MigrationContext.configure(connection).get_current_revision()
    if revision == "head" or current is None:
        return False
    passed = ScriptDirectory.from_config(config).iterate_revisions(current, "base")
    return revision in {each.revision for each in passed}


def check(connection: Connection) -> None:
    """Raise when the tables in code and the migrations differ (`alembic check`)."""
    from alembic import command

    command.check(config_for(connection))
