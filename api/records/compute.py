"""Compute usage of jobs by the hour, so that a time range counts what was used within it.

    totals of status ──► compute(uid, at): the totals as of that hour
    usage of a range ◄── totals before its end minus totals before its beginning

A row holds running totals, not differences: writing it twice (another replica, a restart) changes nothing,
and consecutive ranges add up. Usage counts in the hour in which the status reported it. Usage while no API
ran counts when one is back, or in the hour in which the job completed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Subquery, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from busbar.api.database import tables
from busbar.api.database.engine import Database

AMOUNTS = (
    "accelerator_seconds",
    "work_units",
    "energy_joules",
    "cost",
    "lost_seconds",
    "caused_seconds",
    "caused_cost",
)


@dataclass(frozen=True)
class ComputeTotals:
    """Compute used by one group of jobs."""

    group: str
    jobs: int
    accelerator_seconds: float
    work_units: float
    energy_joules: float
    cost: float
    lost_seconds: float
    caused_seconds: float
    """Accelerator-seconds that training lost to the replicas of these services."""
    caused_cost: float


class Compute:
    """Writes and reads the compute table."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._noted: dict[str, dict[str, Any]] = {}
        """The latest row of each job that this process has written."""

    async def note(self, tx: AsyncConnection, jobs: Sequence[dict[str, Any]], now: datetime) -> None:
        """Write the totals of these rows of `jobs` where they have changed."""
        rows = [row for row in (_row(job, now) for job in jobs) if self._noted.get(row["uid"]) != row]
        if not rows:
            return
        statement = self._db.upsert(tables.compute)
        newer = {name: statement.excluded[name] for name in AMOUNTS}
        await tx.execute(statement.on_conflict_do_update(index_elements=["uid", "at"], set_=newer), rows)
        self._noted.update((row["uid"], row) for row in rows)

    def forget(self, uid: str) -> None:
        """Drop a deleted job from memory."""
        self._noted.pop(uid, None)

    def forget_all(self) -> None:
        """After the table was replaced."""
        self._noted.clear()

    async def totals(
        self, by: str, *, since: datetime, until: datetime, tenants: Collection[str] | None
    ) -> list[ComputeTotals]:
        """What jobs used in a range of time, per group; the range begins and ends with whole hours."""
        jobs, before, after = tables.jobs, up_to(since, "before"), up_to(until, "after")
        column = {"tenant": jobs.c.tenant, "namespace": jobs.c.namespace, "service": jobs.c.name}[by]
        query = (
            select(
                column.label("group"),
                func.count().label("jobs"),
                *(
                    func.sum(after.c[name] - func.coalesce(before.c[name], 0.0)).label(name)
                    for name in AMOUNTS
                ),
            )
            .join_from(after, jobs, jobs.c.uid == after.c.uid)
            .join(before, before.c.uid == after.c.uid, isouter=True)
            .where(after.c.at >= since)
            .group_by(column)
            .order_by(column)
        )
        if tenants is not None:
            query = query.where(jobs.c.tenant.in_(sorted(tenants)))
        async with self._db.read() as db:
            rows = (await db.execute(query)).mappings().all()
        return [ComputeTotals(**row) for row in rows]


def _row(job: dict[str, Any], now: datetime) -> dict[str, Any]:
    at = min(now, job["completed_at"] or now).replace(minute=0, second=0, microsecond=0)
    return {"uid": job["uid"], "at": at, **{name: job[name] for name in AMOUNTS}}


def up_to(end: datetime, name: str) -> Subquery:
    """Each job's totals before a time, and the hour of its last row. Totals never decrease."""
    compute = tables.compute
    amounts = [func.max(compute.c[amount]).label(amount) for amount in AMOUNTS]
    query = select(compute.c.uid, func.max(compute.c.at).label("at"), *amounts)
    return query.where(compute.c.at < end).group_by(compute.c.uid).subquery(name)
