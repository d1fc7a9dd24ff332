"""Leases of limits in the database: what several gateways hold together, on either database."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import httpx2
from sqlalchemy import func, select
from tests.api.conftest import (
    GATEWAY,
    World,
    database_url,
    postgres_server,
    settings,
    sqlite_template,
    sqlite_url,
    world,
)

from busbar.api.access.budget_leases import BudgetLeases
from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.records.usage_ledger import UsageLedger
from busbar.kube.contracts.budget_leases import PATH, LeaseAnswer, LeaseAsk, LeaseKind, LeaseRequest
from busbar.kube.contracts.usage import UsageRecord

__all__ = ["database_url", "postgres_server", "settings", "sqlite_template", "sqlite_url", "world"]

LIMIT = 1000


def asked(
    gateway: str, number: int, held: int, wanted: int, kind: LeaseKind, through: int = 0
) -> LeaseRequest:
    ask = LeaseAsk(account="key/k", kind=kind, limit=LIMIT, held=held, needed=wanted, wanted=wanted)
    return LeaseRequest(gateway=gateway, number=number, gateways=4, through=through, asks=[ask])


def record(seq: int, cost: int) -> UsageRecord:
    return UsageRecord(
        seq=seq,
        key_id="k",
        tenant="ada",
        namespace="ns",
        service="m",
        model="m",
        prompt_tokens=1,
        completion_tokens=1,
        cost_nano=cost,
        request_id=f"r-{seq}",
        finished_at=datetime.now(UTC),
    )


async def test_questions_and_bookings_at_once_never_exceed_the_limit(database_url: str) -> None:
    """As four gateways would, through several replicas of the API."""
    databases = [Database(database_url) for _ in range(1 if "sqlite" in database_url else 2)]
    spent: dict[str, int] = {}

    async def gateway(index: int) -> None:
        database, name = databases[index % len(databases)], f"g-{index}"
        leases, ledger = BudgetLeases(database), UsageLedger(database)
        held = through = 0
        for turn in range(1, 9):
            answer = await leases.renew(asked(name, turn, held, 400, LeaseKind.DAY, through))
            held, through = answer.grants[0].amount, answer.counted_through
            cost = held // 3
            if cost:  # it spends a third of what it holds, and delivers that
                await ledger.accept(name, [record(turn, cost)])
                spent[name] = spent.get(name, 0) + cost
                held, through = held - cost, turn

    try:
        await asyncio.gather(*(gateway(index) for index in range(4)))
        async with databases[0].read() as db:
            rows = tables.budget_leases.c
            held = (await db.execute(select(func.sum(rows.amount)))).scalar_one()
            booked = (
                await db.execute(
                    select(func.sum(tables.spending.c.cost_nano)).where(tables.spending.c.account == "key/k")
                )
            ).scalar_one()
        assert booked == sum(spent.values())
        assert LIMIT // 2 < held + booked <= LIMIT
    finally:
        for database in databases:
            await database.close()


async def test_a_record_lowers_the_lease_once_and_a_question_that_did_not_know_of_it_counts_it(
    database_url: str,
) -> None:
    database = Database(database_url)
    leases, ledger = BudgetLeases(database), UsageLedger(database)
    (grant,) = (await leases.renew(asked("g", 1, 0, 600, LeaseKind.MONTH))).grants
    assert (grant.amount, grant.reach, grant.spent) == (600, LIMIT, 0)
    for _ in range(2):  # the second delivery is a repetition
        assert await ledger.accept("g", [record(1, 250)]) == 1
    async with database.read() as db:
        assert (await db.execute(select(tables.budget_leases.c.amount))).scalar_one() == 350
    answer = await leases.renew(asked("g", 2, 600, 600, LeaseKind.MONTH, through=0))
    assert answer.counted_through == 1
    assert (answer.grants[0].amount, answer.grants[0].spent) == (350, 250)
    await database.close()


async def test_who_holds_more_than_its_share_is_asked_for_it_and_others_get_it_afterwards(
    database_url: str,
) -> None:
    database = Database(database_url)
    leases = BudgetLeases(database)

    async def ask(gateway: str, number: int, held: int, wanted: int) -> LeaseAnswer:
        return await leases.renew(asked(gateway, number, held, wanted, LeaseKind.TOKENS))

    assert (await ask("a", 1, 0, 1000)).grants[0].amount == 1000
    (grant,) = (await ask("b", 1, 0, 700)).grants
    assert (grant.amount, grant.elsewhere) == (0, 1000)
    (recall,) = (await leases.renew(LeaseRequest(gateway="a", number=2, gateways=2))).recalls
    assert recall.target == 500
    lowered = await ask("a", 3, 500, 1000)
    assert lowered.grants[0].amount == 500
    assert not lowered.recalls
    assert (await ask("b", 2, 0, 700)).grants[0].amount == 500
    await database.close()


async def test_a_gateway_that_asks_no_more_is_forgotten(database_url: str) -> None:
    database, now = Database(database_url), datetime(2026, 5, 4, tzinfo=UTC)
    leases = BudgetLeases(database, lambda: now)
    await leases.renew(asked("gone", 1, 0, 600, LeaseKind.MONTH))

    async def known() -> list[int]:
        await leases.prune()
        async with database.read() as db:
            each = (tables.lease_rounds, tables.budget_leases)
            return [(await db.execute(select(func.count()).select_from(one))).scalar_one() for one in each]

    now += timedelta(hours=23)
    assert await known() == [1, 1]
    now += timedelta(days=5)
    await leases.renew(LeaseRequest(gateway="alive", number=1, gateways=2))
    assert await known() == [2, 0]
    now += timedelta(days=2)
    assert await known() == [1, 0]
    await database.close()


async def test_leases_are_for_the_gateway_alone(world: World) -> None:
    body = asked("g", 1, 0, 10, LeaseKind.REQUESTS).to_wire()
    token = await world.token("alice")
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {token}"}, 403)):
        answer: httpx2.Response = await world.internal.post(PATH, json=body, headers=headers)
        assert answer.status_code == status
    world.kube.users["gw"] = {"username": GATEWAY, "groups": ["system:serviceaccounts"]}
    for wrong in ({"number": 2**63}, {"through": 2**63}, {"asks": [{**body["asks"][0], "wanted": 2**63}]}):
        answer = await world.internal.post(PATH, json=body | wrong, headers={"Authorization": "Bearer gw"})
        assert answer.status_code == 422
    granted = await world.internal.post(PATH, json=body, headers={"Authorization": "Bearer gw"})
    assert granted.status_code == 200
    assert granted.json()["grants"][0]["amount"] == 10
