"""The usage ledger: no token is counted twice, and sums cover the requested period, on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from tests.api.conftest import NOW, Clock

from busbar.api.database.engine import Database
from busbar.api.records.usage_ledger import By, UsageLedger
from busbar.kube.contracts.usage import UsageRecord


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url)
    yield opened
    await opened.close()


def record(seq: int, tenant: str = "ada", tokens: int = 10, hours_ago: float = 1) -> UsageRecord:
    return UsageRecord(
        seq=seq,
        key_id="k",
        tenant=tenant,
        namespace=f"{tenant}-lab",
        service="chat",
        model="chat",
        prompt_tokens=tokens,
        completion_tokens=2 * tokens,
        request_id=f"r{seq}",
        finished_at=NOW - timedelta(hours=hours_ago),
    )


async def test_no_token_is_counted_twice_however_often_a_batch_arrives(database: Database) -> None:
    ledger = UsageLedger(database, Clock())
    assert await ledger.accept("g1", [record(1), record(2)]) == 2
    assert await ledger.accept("g1", [record(1), record(2), record(3)]) == 3
    assert await ledger.accept("g1", []) == 3
    assert await ledger.accept("g2", [record(1)]) == 1
    (total,) = await ledger.usage(By.TENANT, since=NOW - timedelta(days=1), until=NOW, tenants=None)
    assert (total.requests, total.prompt_tokens, total.completion_tokens) == (4, 40, 80)


async def test_usage_is_summed_by_each_group_within_the_range_and_the_tenants_asked_for(
    database: Database,
) -> None:
    ledger = UsageLedger(database, Clock())
    await ledger.accept(
        "g", [record(1), record(2, "bob-corp", 5), record(3, hours_ago=30), record(4, hours_ago=1000)]
    )
    since = NOW - timedelta(days=2)
    by_tenant = await ledger.usage(By.TENANT, since=since, until=NOW, tenants=None)
    assert [(s.group, s.requests) for s in by_tenant] == [("ada", 2), ("bob-corp", 1)]
    by_day = await ledger.usage(By.DAY, since=since, until=NOW, tenants={"ada"})
    assert [(s.group, s.requests) for s in by_day] == [("2026-02-28", 1), ("2026-03-01", 1)]
    for by in By:
        assert await ledger.usage(by, since=since, until=NOW, tenants=set()) == []
        assert sum(s.requests for s in await ledger.usage(by, since=since, until=NOW, tenants=None)) == 3
    foreign = record(5, "bob-corp", 1).model_copy(update={"namespace": "ada-lab"})
    await ledger.accept("h", [foreign])
    shared = await ledger.usage(By.SERVICE, since=since, until=NOW, tenants={"ada"}, namespaces={"ada-lab"})
    assert [s.requests for s in shared] == [3], "those of another tenant too"
