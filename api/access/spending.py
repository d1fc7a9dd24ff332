"""What keys and tenants have spent on inference: sums of the ledger by hour, and the accounts made of them.

A sum is written in the transaction that writes its records, so a repeated delivery changes neither. The ledger itself
is too long to be summed at each look-up of a key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.kube.contracts.allowances import NANO, Account, CostAllowance, key_account, tenant_account
from busbar.kube.contracts.usage import UsageRecord
from busbar.kube.types.budget import period_end, period_start
from busbar.kube.types.inference import InferenceLimits

Limited = tuple[str, InferenceLimits]
"""An account's name and its limits."""


class Spending:
    """Writes and reads the spending table."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._db = database
        self._now = clock

    async def add(self, tx: AsyncConnection, records: Iterable[UsageRecord]) -> None:
        """Add records that are new in the ledger, in its transaction."""
        sums: Counter[tuple[str, datetime]] = Counter()
        for record in records:
            hour = record.finished_at.replace(minute=0, second=0, microsecond=0)
            sums[key_account(record.key_id), hour] += record.cost_nano
            sums[tenant_account(record.tenant), hour] += record.cost_nano
        table = tables.spending
        # In one order, so that two deliveries at once cannot wait for each other.
        for (account, hour), cost in sorted(sums.items()):
            if cost:
                statement = self._db.upsert(table).values(account=account, hour=hour, cost_nano=cost)
                await tx.execute(
                    statement.on_conflict_do_update(
                        index_elements=["account", "hour"], set_={"cost_nano": table.c.cost_nano + cost}
                    )
                )

    async def accounts(self, limited: Sequence[Limited], gateway: str) -> tuple[list[Account], int]:
        """The accounts with what is spent in their present periods, and the number up to which these sums contain the
        gateway's records. One statement, so that both are of one moment."""
        now = self._now()
        spent, cursor = tables.spending, tables.ledger_cursor
        columns: list[Any] = [
            func.coalesce(
                select(cursor.c.accepted_through).where(cursor.c.gateway == gateway).scalar_subquery(), 0
            )
        ]
        for name, limits in limited:
            for budget in limits.budgets or ():
                total = select(func.coalesce(func.sum(spent.c.cost_nano), 0)).where(
                    spent.c.account == name, spent.c.hour >= period_start(budget.period, now)
                )
                columns.append(total.scalar_subquery())
        if len(columns) == 1:
            return [_account(name, limits, (), now) for name, limits in limited], 0
        async with self._db.read() as db:
            through, *sums = (await db.execute(select(*columns))).one()
        left = iter(sums)
        return [
            _account(name, limits, [int(next(left)) for _ in limits.budgets or ()], now)
            for name, limits in limited
        ], int(through)


def _account(name: str, limits: InferenceLimits, spent: Sequence[int], now: datetime) -> Account:
    return Account(
        name=name,
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
        costs=[
            CostAllowance(
                period=budget.period.value,
                started=period_start(budget.period, now),
                ends=period_end(budget.period, now),
                limit_nano=round(budget.cost * NANO),
                spent_nano=so_far,
            )
            for budget, so_far in zip(limits.budgets or (), spent, strict=True)
        ],
    )
