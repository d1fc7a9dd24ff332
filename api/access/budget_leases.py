"""Leases of limits: several gateways share the limits of keys and tenants, and together never use more than them.

The protocol is in `busbar.kube.contracts.budget_leases`, who gets how much in `lease_shares`. A lease is counted for a
minute longer than its holder uses it, because what was accepted at its end counts for a minute. Money is counted for a
day, because a gateway that died keeps usage on its disk that is in no ledger yet.

On PostgreSQL two replicas of the API may answer at once: each account has an advisory lock. Usage is booked without
that lock. So leases are read before the sums of the ledger: a record that is booked in between counts twice for this
one answer, never not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from busbar.api.access.lease_shares import Holding, Outcome, decide
from busbar.api.clock import Clock, utc_now
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.kube.contracts.allowances import key_account, tenant_account
from busbar.kube.contracts.budget_leases import (
    FALLBACK_PART,
    FALLBACK_S,
    LEASE_S,
    MONEY_LOCK_S,
    LeaseAnswer,
    LeaseAsk,
    LeaseGrant,
    LeaseKind,
    LeaseRecall,
    LeaseRequest,
)
from busbar.kube.contracts.usage import UsageRecord
from busbar.kube.types.budget import Period, period_start

WINDOW_S = 62.0
"""What a gateway accepted as its lease ended counts for so long: a minute, the second in which it was accepted, and one
for clocks that run differently."""
ROUNDS_KEPT = timedelta(days=7)
"""No request of a gateway is under way for so long that its number has to be known still."""
MONEY = tuple(kind.value for kind in LeaseKind if kind.is_money)
_Place = tuple[str, str]
"""Account and kind."""


@dataclass(frozen=True)
class _Row:
    amount: int
    used: int
    needed: int
    wanted: int
    fallback: int
    told_at: datetime
    until: datetime
    fallback_until: datetime

    def holding(self, now: datetime) -> Holding:
        """What counts at this moment. All that a silent gateway holds counts as used: it gives nothing back."""
        if now < self.told_at + timedelta(seconds=LEASE_S):
            return Holding(self.amount, self.used, self.needed, self.wanted)
        amount = self.amount
        if now >= self.until:
            amount = self.fallback if now < self.fallback_until else 0
        return Holding(amount, amount, 0, amount)


class BudgetLeases:
    """Grants leases, and lowers those of money with the ledger."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._db = database
        self._now = clock

    async def renew(self, asked: LeaseRequest) -> LeaseAnswer:
        """Take in what a gateway holds, and answer with what it holds from now on."""
        now = self._now()
        async with self._db.write() as tx:
            newest = await self._number(tx, asked, now)
            if newest > asked.number:
                return LeaseAnswer(number=newest)
            await self._lock(tx, {ask.account for ask in asked.asks})
            through, booked = await _booked(tx, asked)
            rows = await _rows(tx, [ask.account for ask in asked.asks])  # before the sums: see above
            spent = await _spent(tx, asked.asks, now)
            grants = []
            for ask in sorted(asked.asks, key=lambda each: (each.account, each.kind)):
                place = (ask.account, ask.kind.value)
                behind = booked[ask.account] if ask.kind.is_money else 0
                grants.append(
                    await self._grant(tx, asked, ask, rows[place], behind, spent.get(place, 0), now)
                )
            recalls = await _recalls(tx, asked.gateway)
        return LeaseAnswer(number=asked.number, counted_through=through, grants=grants, recalls=recalls)

    async def book(self, tx: AsyncConnection, gateway: str, records: Iterable[UsageRecord]) -> None:
        """Lower a gateway's leases of money by its records, in the transaction that adds them to the ledger."""
        sums: dict[str, int] = defaultdict(int)
        for record in records:
            sums[key_account(record.key_id)] += record.cost_nano
            sums[tenant_account(record.tenant)] += record.cost_nano
        table = tables.budget_leases
        mine = table.c.gateway == gateway
        held = await tx.execute(select(table.c.account, table.c.kind).where(mine, table.c.kind.in_(MONEY)))
        most = func.max if self._db.is_sqlite else func.greatest
        # In the order of `renew`, so that neither waits for the other.
        for account, kind in sorted((row[0], row[1]) for row in held if row[0] in sums):
            rest = {name: most(table.c[name] - sums[account], 0) for name in ("amount", "used")}
            await tx.execute(
                update(table).where(mine, table.c.account == account, table.c.kind == kind).values(rest)
            )

    async def prune(self) -> None:
        """Forget leases that no longer count, and gateways that ask no more: a new folder is a new gateway."""
        table, rounds, now = tables.budget_leases, tables.lease_rounds, self._now()
        async with self._db.write() as tx:
            await tx.execute(delete(table).where(table.c.until < now, table.c.fallback_until < now))
            await tx.execute(delete(rounds).where(rounds.c.seen_at < now - ROUNDS_KEPT))

    async def _number(self, tx: AsyncConnection, asked: LeaseRequest, now: datetime) -> int:
        """The gateway's highest number. Writing it first lets its requests wait for each other."""
        table = tables.lease_rounds
        statement = self._db.upsert(table).values(gateway=asked.gateway, number=asked.number, seen_at=now)
        await tx.execute(
            statement.on_conflict_do_update(
                index_elements=["gateway"],
                set_={"number": asked.number, "seen_at": now},
                where=table.c.number < asked.number,
            )
        )
        return int(
            (await tx.execute(select(table.c.number).where(table.c.gateway == asked.gateway))).scalar_one()
        )

    async def _lock(self, tx: AsyncConnection, accounts: Iterable[str]) -> None:
        if not self._db.is_sqlite:
            for account in sorted(accounts):
                await tx.execute(
                    text("SELECT pg_advisory_xact_lock(hashtextextended(:a, 0))"), {"a": account}
                )

    async def _grant(
        self,
        tx: AsyncConnection,
        asked: LeaseRequest,
        ask: LeaseAsk,
        rows: Mapping[str, _Row],
        booked: int,
        spent: int,
        now: datetime,
    ) -> LeaseGrant:
        mine = _held(ask, rows.get(asked.gateway), booked, now)
        others = {name: row.holding(now) for name, row in rows.items() if name != asked.gateway}
        outcome = decide(ask.limit - spent, mine, asked.gateway, others)
        fallback = (
            0 if ask.kind.is_money else min(outcome.amount, ask.limit // (FALLBACK_PART * asked.gateways))
        )
        await self._write(tx, asked.gateway, ask, outcome, mine.used, max(fallback, ask.fallback), now)
        table = tables.budget_leases
        for name, target in sorted(outcome.targets.items()):
            await tx.execute(
                update(table)
                .where(
                    table.c.account == ask.account, table.c.kind == ask.kind.value, table.c.gateway == name
                )
                .values(target=target)
            )
        return LeaseGrant(
            account=ask.account,
            kind=ask.kind,
            amount=outcome.amount,
            fallback=fallback,
            reach=outcome.reach,
            elsewhere=outcome.elsewhere,
            spent=spent,
        )

    async def _write(
        self,
        tx: AsyncConnection,
        gateway: str,
        ask: LeaseAsk,
        outcome: Outcome,
        used: int,
        fallback: int,
        now: datetime,
    ) -> None:
        table = tables.budget_leases
        key = {"account": ask.account, "kind": ask.kind.value, "gateway": gateway}
        if not outcome.amount and not ask.wanted:
            await tx.execute(delete(table).where(*(table.c[name] == value for name, value in key.items())))
            return
        lasts = MONEY_LOCK_S if ask.kind.is_money else LEASE_S + WINDOW_S
        values = {
            "amount": outcome.amount,
            "used": used,
            "needed": ask.needed,
            "wanted": ask.wanted,
            "fallback": fallback,
            "until": now + timedelta(seconds=lasts),
            "fallback_until": now + timedelta(seconds=FALLBACK_S + WINDOW_S),
            "target": outcome.target,
            "told_at": now,
        }
        statement = self._db.upsert(table).values(**key, **values)
        await tx.execute(statement.on_conflict_do_update(index_elements=list(key), set_=values))


def _held(ask: LeaseAsk, row: _Row | None, booked: int, now: datetime) -> Holding:
    """What the asking gateway holds. Of a minute it is at most what it was given and may still use; of money its own word
    counts, because it has spent it."""
    used = max(0, ask.used - booked)
    if ask.kind.is_money:
        needed, wanted = max(0, ask.needed - booked), max(0, ask.wanted - booked)
        return Holding(max(0, ask.held - booked, used), used, needed, wanted)
    given = row.holding(now).amount if row is not None else 0
    return Holding(min(ask.held, given), used, ask.needed, ask.wanted)


async def _rows(tx: AsyncConnection, accounts: Sequence[str]) -> dict[_Place, dict[str, _Row]]:
    table = tables.budget_leases
    found: dict[_Place, dict[str, _Row]] = defaultdict(dict)
    if accounts:
        for row in await tx.execute(select(table).where(table.c.account.in_(sorted(set(accounts))))):
            found[row.account, row.kind][row.gateway] = _Row(
                **{each: getattr(row, each) for each in _Row.__dataclass_fields__}
            )
    return found


async def _booked(tx: AsyncConnection, asked: LeaseRequest) -> tuple[int, dict[str, int]]:
    """The number up to which the ledger has the gateway's records, and what those behind `asked.through` cost by account."""
    cursor, ledger = tables.ledger_cursor, tables.ledger
    reached = select(cursor.c.accepted_through).where(cursor.c.gateway == asked.gateway)
    through = int((await tx.execute(reached)).scalar_one_or_none() or 0)
    sums: dict[str, int] = defaultdict(int)
    if any(ask.kind.is_money for ask in asked.asks) and through > asked.through:
        query = (
            select(ledger.c.key_id, ledger.c.tenant, func.sum(ledger.c.cost_nano))
            .where(ledger.c.gateway == asked.gateway, ledger.c.seq > asked.through, ledger.c.seq <= through)
            .group_by(ledger.c.key_id, ledger.c.tenant)
        )
        for key_id, tenant, cost in await tx.execute(query):
            sums[key_account(key_id)] += int(cost)
            sums[tenant_account(tenant)] += int(cost)
    return through, sums


async def _spent(tx: AsyncConnection, asks: Iterable[LeaseAsk], now: datetime) -> dict[_Place, int]:
    """What the ledger has of each budget's present period."""
    places = [(ask.account, ask.kind.value) for ask in asks if ask.kind.is_money]
    if not places:
        return {}
    spent = tables.spending
    columns: list[Any] = [
        select(func.coalesce(func.sum(spent.c.cost_nano), 0))
        .where(spent.c.account == account, spent.c.hour >= period_start(Period(kind), now))
        .scalar_subquery()
        for account, kind in places
    ]
    sums = (await tx.execute(select(*columns))).one()
    return {place: int(total) for place, total in zip(places, sums, strict=True)}


async def _recalls(tx: AsyncConnection, gateway: str) -> list[LeaseRecall]:
    table = tables.budget_leases
    query = select(table.c.account, table.c.kind, table.c.target).where(
        table.c.gateway == gateway, table.c.target.is_not(None), table.c.target < table.c.amount
    )
    return [
        LeaseRecall(account=account, kind=LeaseKind(kind), target=target)
        for account, kind, target in await tx.execute(query)
    ]
