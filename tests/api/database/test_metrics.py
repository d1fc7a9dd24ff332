"""The database's times and failures, as `/metrics` shows them."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from tests.free_port import free_port

from busbar.api.database.engine import Database, Unreachable
from busbar.api.database.metrics import DatabaseMetrics


def count(metrics: DatabaseMetrics, name: str, operation: str) -> float | None:
    return metrics.registry.get_sample_value(f"busbar_api_database_{name}", {"operation": operation})


def test_the_names_of_the_metrics() -> None:
    assert {family.name for family in DatabaseMetrics().registry.collect()} == {
        "busbar_api_database_failures",
        "busbar_api_database_seconds",
    }


async def test_reads_and_writes_are_counted_apart_and_errors_of_the_database_fail(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    async with database.write() as tx:
        await tx.execute(text("SELECT 1"))
    with pytest.raises(SQLAlchemyError):
        async with database.read() as db:
            await db.execute(text("SELECT nothing FROM nowhere"))
    await database.close()
    seen = database.metrics
    assert [count(seen, "seconds_count", o) for o in ("read", "write")] == [1, 1]
    assert [count(seen, "failures_total", o) for o in ("read", "write")] == [1, 0]


async def test_an_unreachable_database_fails_as_others_do() -> None:
    database = Database(f"postgresql+asyncpg://a:b@127.0.0.1:{free_port()}/x")
    with pytest.raises(Unreachable):
        async with database.read():
            pass
    await database.close()
    assert count(database.metrics, "failures_total", "read") == 1


def test_a_refusal_of_ours_is_no_failure_and_its_time_counts() -> None:
    ticks = iter([10.0, 12.5])
    metrics = DatabaseMetrics(clock=lambda: next(ticks))
    with pytest.raises(ValueError), metrics.timed("write"):  # noqa: PT011 - any error that is not the database's
        raise ValueError
    assert count(metrics, "failures_total", "write") == 0
    assert count(metrics, "seconds_sum", "write") == 2.5
