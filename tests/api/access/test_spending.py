"""Limits of inference: what the look-up of a key says of its account and its tenant's, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from tests.api.conftest import BASE, NOW, Clock, World

from busbar.api.access.spending import Spending
from busbar.api.database.engine import Database
from busbar.api.records.usage_ledger import By, UsageLedger
from busbar.kube.contracts.allowances import NANO, Account
from busbar.kube.contracts.keys import digest_of
from busbar.kube.contracts.usage import UsageRecord
from busbar.kube.resources import TENANTS
from busbar.kube.types.budget import Period
from busbar.kube.types.inference import CostLimit, InferenceLimits

DAY_AND_MONTH = InferenceLimits(
    tokens_per_minute=1000,
    budgets=[CostLimit(period=Period.DAY, cost=2.5), CostLimit(period=Period.MONTH, cost=40)],
)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url)
    yield opened
    await opened.close()


def record(
    seq: int, cost_nano: int, *, days_ago: float = 0, key: str = "k", tenant: str = "ada"
) -> UsageRecord:
    return UsageRecord(
        seq=seq,
        key_id=key,
        tenant=tenant,
        namespace="ada-lab",
        service="chat",
        model="chat",
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=2,
        cost_nano=cost_nano,
        request_id=f"r{seq}",
        finished_at=NOW - timedelta(days=days_ago),
    )


async def spent(spending: Spending, name: str, gateway: str = "g") -> tuple[list[int], int]:
    accounts, through = await spending.accounts([(name, DAY_AND_MONTH)], gateway)
    return [each.spent_nano for each in accounts[0].costs], through


async def test_the_costs_of_a_period_are_summed_once_for_the_key_and_for_its_tenant(
    database: Database,
) -> None:
    ledger, spending = UsageLedger(database, Clock()), Spending(database, Clock())
    records = [
        record(1, 100),
        record(2, 30, key="other"),
        record(3, 7, tenant="bob-corp"),
        record(4, 5000, days_ago=400),
    ]
    await asyncio.gather(*(ledger.accept("g", records) for _ in range(4)))
    await ledger.accept("g", [*records, record(5, 1)])
    assert await spent(spending, "key/k") == ([108, 108], 5)
    assert await spent(spending, "tenant/ada") == ([131, 131], 5)
    assert await spent(spending, "tenant/bob-corp", "another") == ([7, 7], 0)


async def test_an_account_says_its_limits_and_its_periods(database: Database) -> None:
    accounts, _ = await Spending(database, Clock()).accounts([("tenant/ada", DAY_AND_MONTH)], "g")
    (account,) = accounts
    assert isinstance(account, Account)
    assert (account.requests_per_minute, account.tokens_per_minute) == (None, 1000)
    day, month = account.costs
    assert (day.period, day.limit_nano, month.limit_nano) == ("day", 5 * NANO // 2, 40 * NANO)
    assert day.started <= NOW < day.ends == day.started + timedelta(days=1)
    assert (month.started.day, month.ends.day) == (1, 1)


async def test_the_report_says_what_tokens_cost_and_how_many_were_cached(database: Database) -> None:
    ledger = UsageLedger(database, Clock())
    await ledger.accept("g", [record(1, NANO // 4), record(2, NANO)])
    (total,) = await ledger.usage(
        By.KEY, since=NOW - timedelta(days=1), until=NOW + timedelta(days=1), tenants=None
    )
    assert (total.cached_tokens, total.cost) == (8, 1.25)


async def test_a_key_is_looked_up_with_its_own_limits_and_its_tenants(world: World) -> None:
    alice = await world.as_("alice")
    limits = {"requestsPerMinute": 3, "budgets": [{"period": "day", "cost": 0.5}]}
    made = await alice.post(
        f"{BASE}/tokens", json={"scopes": ["inference"], "tenant": "ada", "limits": limits}
    )
    assert made.json()["info"]["limits"] == {**limits, "tokensPerMinute": None}
    tenant = world.kube.objects["tenants", "", "ada"]
    tenant["spec"]["inference"] = {"tokensPerMinute": 70}
    world.kube.put(TENANTS, tenant)
    await world.settle()
    found = await world.services.keys.lookup(digest_of(made.json()["token"]), "g")
    assert [each.name for each in found.accounts] == [f"key/{made.json()['info']['id']}", "tenant/ada"]
    assert (found.accounts[0].requests_per_minute, found.accounts[1].tokens_per_minute) == (3, 70)


@pytest.mark.parametrize(
    ("limits", "scopes", "status"),
    [
        ({"tokensPerMinute": 1}, ["inference"], 201),
        ({"tokensPerMinute": 0}, ["inference"], 422),
        ({}, ["inference"], 422),
        ({"budgets": []}, ["inference"], 422),
        ({"budgets": [{"period": "hour", "cost": 1}]}, ["inference"], 422),
        ({"budgets": [{"period": "day", "cost": 1}]}, ["inference"], 201),
        ({"tokensPerMinute": 1}, ["rest"], 422),
        ({"tokensPerHour": 1}, ["inference"], 422),
    ],
)
async def test_limits_of_a_token_are_checked(
    world: World, limits: dict[str, object], scopes: list[str], status: int
) -> None:
    alice = await world.as_("alice")
    answer = await alice.post(f"{BASE}/tokens", json={"scopes": scopes, "tenant": "ada", "limits": limits})
    assert answer.status_code == status, answer.text
