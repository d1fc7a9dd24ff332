"""Which replica of the API writes the history: a row of `leases`, checked in the transaction that writes.

    replica                      leases: name, holder, term, until
    flush ─► BEGIN ─► take ──────► free, or mine: until = now + LEASE_S; a new holder begins a new term
                      │            somebody else's: nothing is written
                      └► write ─► COMMIT     until then nobody else can take the row, so no two replicas write at once

Times are the database's, so the replicas' clocks do not matter. A replica that stops within such a transaction loses it
(`IDLE_IN_TRANSACTION_S`), and its lease ends by itself. SQLite has one process: it always leads, in term 0.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from sqlalchemy import ColumnElement, case, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from busbar.api.database import tables
from busbar.api.database.engine import Database

LEASE_S = 6.0
"""After so long without a renewal another replica writes the history."""
RENEW_S = LEASE_S / 3
"""A leader that has nothing to write renews its lease this often."""
KEPT_S = 60.0
"""For so long a replica that does not lead keeps what it has seen, in case the leader did not write it: longer than a
leader can be gone before another one has noticed."""


class Leadership:
    """One replica's view of one lease."""

    def __init__(self, database: Database, name: str) -> None:
        self._db = database
        self._name = name
        self._holder = secrets.token_hex(8)
        self._asked_at = float("-inf")

    @property
    def due(self) -> bool:
        """Whether to `take` it although there is nothing to write: to keep it, or because it may be free."""
        return not self._db.is_sqlite and time.monotonic() - self._asked_at >= RENEW_S

    async def take(self, tx: AsyncConnection) -> int | None:
        """The term in which this replica leads until `tx` ends; None where another one leads."""
        if self._db.is_sqlite:
            return 0
        leases, now = tables.leases, func.clock_timestamp()
        query = select(leases.c.holder, (leases.c.until > now).label("is_held")).where(
            leases.c.name == self._name
        )
        found = (await tx.execute(query)).one_or_none()
        if found is not None and found.is_held and found.holder != self._holder:
            self._asked_at = time.monotonic()
            return None
        until = now + timedelta(seconds=LEASE_S)
        statement = self._db.upsert(leases).values(name=self._name, holder=self._holder, term=1, until=until)
        statement = statement.on_conflict_do_update(
            index_elements=["name"],
            set_={
                "holder": self._holder,
                "term": leases.c.term + case((leases.c.holder == self._holder, 0), else_=1),
                "until": until,
            },
            where=or_(leases.c.holder == self._holder, leases.c.until <= now),
        ).returning(leases.c.term)
        term: int | None = (await tx.execute(statement)).scalar_one_or_none()
        self._asked_at = time.monotonic()
        return term

    async def depose(self) -> None:
        """End the present term, whoever leads: the next one writes everything anew."""
        await self._end()

    async def resign(self) -> None:
        """Give it back, so that another replica need not wait for its end."""
        await self._end(tables.leases.c.holder == self._holder)

    async def _end(self, *where: ColumnElement[bool]) -> None:
        if self._db.is_sqlite:
            return
        leases = tables.leases
        ended = update(leases).where(leases.c.name == self._name, *where)
        async with self._db.write() as tx:
            await tx.execute(ended.values(holder="", until=func.clock_timestamp()))
