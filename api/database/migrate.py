"""Brings the database to the newest schema at start, or moves it by hand (`busbar-api migrate`).

On PostgreSQL an advisory lock lets one of several starting replicas do it while the others wait; on SQLite
the write lock of the file does the same, and foreign keys are off while tables are rebuilt in batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

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
    """Upgrade or downgrade the database at `url` to `revision` ("base" empties it)."""
    engine = make_engine(url)
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_migrate, revision)
    finally:
        await engine.dispose()


def _migrate(connection: Connection, revision: str) -> None:
    from alembic import command

    postgresql = connection.dialect.name == "postgresql"
    if postgresql:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": ADVISORY_LOCK})
        connection.execute(text(f"SET lock_timeout = '{LOCK_TIMEOUT}'"))
    else:
        connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
    connection.commit()
    try:
        config = config_for(connection)
        if revision == "base" or revision.startswith("-"):
            command.downgrade(config, revision)
        else:
            command.upgrade(config, revision)
        connection.commit()
    finally:
        if postgresql:
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": ADVISORY_LOCK})
        else:
            connection.exec_driver_sql("PRAGMA foreign_keys=ON")
        connection.commit()


def check(connection: Connection) -> None:
    """Raise when the tables in code and the migrations differ (`alembic check`)."""
    from alembic import command

    command.check(config_for(connection))
