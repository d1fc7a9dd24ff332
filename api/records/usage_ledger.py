"""The usage ledger: what gateways report, once each.

A gateway numbers its records and sends them again until their receipt is confirmed. (gateway, seq) is the
key, so a repeated delivery changes nothing and no token is counted twice. What the records cost is added to the sums
of their key and tenant in the same transaction (`busbar.api.access.spending`), and taken off what the gateway holds of
their budgets (`busbar.api.access.budget_leases`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Text, cast, func, or_, select

from busbar.api.access.budget_leases import BudgetLeases
from busbar.api.access.spending import Spending
from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.records.batch_charges import chargeable
from busbar.kube.contracts.allowances import NANO
from busbar.kube.contracts.usage import UsageRecord


class By(StrEnum):
    """What usage is summed over."""

    TENANT = "tenant"
    NAMESPACE = "namespace"
    SERVICE = "service"
    MODEL = "model"
    KEY = "key"
    DAY = "day"


@dataclass(frozen=True)
class InferenceTotals:
    """Inference usage of one group."""

    group: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: float


_COLUMN = {
    By.TENANT: tables.ledger.c.tenant,
    By.NAMESPACE: tables.ledger.c.namespace,
    By.SERVICE: tables.ledger.c.service,
    By.MODEL: tables.ledger.c.model,
    By.KEY: tables.ledger.c.key_id,
}


class UsageLedger:
    """Writes and reads the ledger table."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._db = database
        self._spending = Spending(database, clock)
        self._leases = BudgetLeases(database, clock)
        self._now = clock

    async def accept(self, gateway: str, records: Sequence[UsageRecord]) -> int:
        """Store what is new; returns the highest number taken from this gateway so far."""
        now = self._now()
        async with self._db.write() as tx:
            new = await chargeable(tx, records)
            if new:
                rows = [{"gateway": gateway, "received_at": now, **_columns(record)} for record in new]
                statement = self._db.upsert(tables.ledger).on_conflict_do_nothing(
                    index_elements=["gateway", "seq"]
                )
                stored = set(await tx.scalars(statement.returning(tables.ledger.c.seq), rows))
                booked = [record for record in new if record.seq in stored]
                await self._spending.add(tx, booked)
                await self._leases.book(tx, gateway, booked)
            cursor = tables.ledger_cursor
            query = select(cursor.c.accepted_through).where(cursor.c.gateway == gateway)
            before = (await tx.execute(query)).scalar_one_or_none()
            through = max([before or 0, *(record.seq for record in records)])
            if through != before:
                reach = self._db.upsert(cursor).values(
                    gateway=gateway, accepted_through=through, updated_at=now
                )
                await tx.execute(
                    reach.on_conflict_do_update(
                        index_elements=["gateway"], set_={"accepted_through": through, "updated_at": now}
                    )
                )
        return through

    async def usage(
        self,
        by: By,
        *,
        since: datetime,
        until: datetime,
        tenants: Collection[str] | None,
        namespaces: Collection[str] = (),
    ) -> list[InferenceTotals]:
        """Sums per group over a time range, of these tenants' requests and of everybody's to services in these namespaces;
        `tenants` None counts all."""
        ledger = tables.ledger
        column: Any = func.substr(cast(ledger.c.finished_at, Text), 1, 10) if by is By.DAY else _COLUMN[by]
        query = (
            select(
                column.label("group"),
                func.count().label("requests"),
                func.coalesce(func.sum(ledger.c.prompt_tokens), 0).label("prompt_tokens"),
                func.coalesce(func.sum(ledger.c.completion_tokens), 0).label("completion_tokens"),
                func.coalesce(func.sum(ledger.c.cached_tokens), 0).label("cached_tokens"),
                func.coalesce(func.sum(ledger.c.cost_nano), 0).label("cost_nano"),
            )
            .where(ledger.c.finished_at >= since, ledger.c.finished_at < until)
            .group_by(column)
            .order_by(column)
        )
        if tenants is not None:
            theirs = ledger.c.tenant.in_(sorted(tenants))
            query = query.where(or_(theirs, ledger.c.namespace.in_(sorted(namespaces))))
        async with self._db.read() as db:
            rows = (await db.execute(query)).mappings().all()
        return [
            InferenceTotals(
                str(row["group"]),
                int(row["requests"]),
                int(row["prompt_tokens"]),
                int(row["completion_tokens"]),
                int(row["cached_tokens"]),
                int(row["cost_nano"]) / NANO,
            )
            for row in rows
        ]


def _columns(record: UsageRecord) -> dict[str, Any]:
    return record.model_dump(mode="python", by_alias=False)
