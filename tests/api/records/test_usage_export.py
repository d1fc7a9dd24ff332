"""Exports of usage: sums by group, rows by day, CSV and FOCUS 1.2, and who sees whose; on SQLite and PostgreSQL."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.api.conftest import NOW

from busbar.api.database import tables
from busbar.api.database.engine import Database
from busbar.api.errors import Invalid
from busbar.api.records import usage_export as module
from busbar.api.records.compute import AMOUNTS
from busbar.api.records.usage_export import Group, Line, ObjectUse, Reach, UsageExport, by_day, whole_days
from busbar.api.records.usage_files import columns_of, csv_of, focus_of
from busbar.api.records.usage_ledger import UsageLedger
from busbar.kube.contracts.usage import UsageRecord

DAY = timedelta(days=1)
TODAY = NOW.replace(hour=0, minute=0, second=0, microsecond=0)
MANDATORY = {
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingAccountType", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart",
    "ContractedCost", "EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit", "ProviderName",
    "PublisherName", "ServiceCategory", "ServiceName",
}  # fmt: skip
"""Columns that FOCUS 1.2 requires in every dataset, by its requirements model (rules CostAndUsage-D-*-M)."""
NULLABLE = {"ChargeClass"}
OPTIONAL = {
    "ChargeFrequency", "ServiceSubcategory", "ConsumedQuantity", "ConsumedUnit", "ResourceId", "ResourceName",
    "ResourceType", "SubAccountId", "SubAccountName", "SubAccountType", "Tags",
}  # fmt: skip
"""Recommended ones, and conditional ones that apply to Busbar."""


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url)
    yield opened
    await opened.close()


async def put(database: Database, uid: str, totals: dict[datetime, float], **fields: Any) -> None:
    """An object whose every running total is this at these hours."""
    base = {
        "uid": uid, "kind": "TrainingJob", "namespace": "ada-lab", "name": uid, "tenant": "ada", "requester": "alice",
        "phase": "Running", "reason": "", "message": "", "pool": "h100", "mode": "", "attempt": 1, "preemptions": 0,
        "restarts": 0, "step": 0, "lost_steps": 0, "created_at": NOW, "seen_at": NOW, "lost_seconds": 0.0,
        "accelerator_seconds": 0.0, "work_units": 0.0, "energy_joules": 0.0, "cost": 0.0,
        "caused_seconds": 0.0, "caused_cost": 0.0,
    }  # fmt: skip
    async with database.write() as tx:
        await tx.execute(tables.jobs.insert().values({**base, **fields}))
        for at, total in totals.items():
            amounts = {
                "accelerator_seconds": 3600 * total,
                "work_units": total,
                "energy_joules": 3.6e6 * total,
                "cost": 2 * total,
                "lost_seconds": 360 * total,
                "caused_seconds": 720 * total if fields.get("kind") == "ModelService" else 0.0,
                "caused_cost": total / 4 if fields.get("kind") == "ModelService" else 0.0,
            }
            await tx.execute(tables.compute.insert().values(uid=uid, at=at, **amounts))


async def serve(database: Database, tokens: int, tenant: str = "ada") -> None:
    record = UsageRecord(
        seq=1, key_id="k", tenant=tenant, namespace=f"{tenant}-lab", service="chat", model="chat",
        prompt_tokens=tokens, completion_tokens=tokens, request_id="r", finished_at=NOW - timedelta(hours=2),
    )  # fmt: skip
    await UsageLedger(database).accept(f"g-{tenant}", [record])


async def test_a_range_has_what_was_used_in_it_by_each_group(database: Database) -> None:
    await put(database, "run", {TODAY - 3 * DAY: 1.0, TODAY - DAY: 4.0})
    await put(database, "other", {TODAY - DAY: 2.0}, requester="adam")
    chat = {"kind": "ModelService", "name": "chat"}
    await put(database, "u-chat", {TODAY - DAY: 0.5}, **chat)
    await put(database, "theirs", {TODAY - DAY: 8.0}, tenant="bob-corp", namespace="bob-lab", requester="bob")
    await serve(database, 500)
    await serve(database, 7, "bob-corp")
    export = UsageExport(database)
    found: dict[Group, list[Line]] = {}
    for by in Group:
        found[by] = await export.lines(by, TODAY - 2 * DAY, NOW, Reach())
    ada, bob = found[Group.TENANT]
    assert (ada.tenant, ada.objects, ada.accelerator_hours, ada.kilowatt_hours) == ("ada", 3, 5.5, 5.5)
    assert (ada.cost, ada.requests, ada.prompt_tokens) == (11.0, 1, 500)
    assert ada.lost_hours == pytest.approx(0.55)
    assert (bob.tenant, bob.accelerator_hours, bob.completion_tokens) == ("bob-corp", 8.0, 7)
    users = [(line.tenant, line.user, line.accelerator_hours) for line in found[Group.USER]]
    assert users == [("ada", "adam", 2.0), ("ada", "alice", 3.5), ("bob-corp", "bob", 8.0)]
    jobs = [(line.namespace, line.name, line.accelerator_hours) for line in found[Group.JOB]]
    assert jobs == [("ada-lab", "other", 2.0), ("ada-lab", "run", 3.0), ("bob-lab", "theirs", 8.0)]
    services = {(line.tenant, line.name): line for line in found[Group.SERVICE]}
    assert services["ada", "chat"].joules_per_token == 1800.0
    assert (services["ada", "chat"].caused_hours, services["ada", "chat"].caused_cost) == (0.1, 0.125)
    assert (ada.caused_hours, bob.caused_hours) == (0.1, 0.0)
    assert services["bob-corp", "chat"].joules_per_token is None
    assert [line.namespace for line in found[Group.NAMESPACE]] == [
        "ada-lab",
        "bob-corp-lab",
        "bob-lab",
    ]


async def test_members_see_their_tenants_and_by_user_only_themselves(database: Database) -> None:
    await put(database, "run", {TODAY - DAY: 1.0})
    await put(database, "other", {TODAY - DAY: 2.0}, requester="adam")
    await put(database, "theirs", {TODAY - DAY: 8.0}, tenant="bob-corp", requester="alice")
    await serve(database, 7, "bob-corp")
    export = UsageExport(database)
    member, admin = Reach({"ada"}, set(), "alice"), Reach({"ada"}, {"ada"}, "adam")
    for reach in (member, admin, Reach(set(), set(), "bob")):
        for by in Group:
            lines = await export.lines(by, TODAY - 2 * DAY, NOW, reach)
            assert {line.tenant for line in lines} <= set(reach.tenants or ())
        days = await export.days(TODAY - 2 * DAY, NOW, reach)
        assert {day.tenant for day in days} <= set(reach.tenants or ())
    by_user = [await export.lines(Group.USER, TODAY - 2 * DAY, NOW, reach) for reach in (member, admin)]
    assert [[line.user for line in lines] for lines in by_user] == [["alice"], ["adam", "alice"]]


async def test_days_add_up_to_the_range_and_to_the_totals(database: Database) -> None:
    hours = {TODAY - 3 * DAY + timedelta(hours=h): 1.0 + h for h in range(60)}
    await put(database, "run", hours)
    await put(database, "old", {TODAY - 9 * DAY: 1.0})
    export = UsageExport(database)
    days = await export.days(TODAY - 2 * DAY, TODAY, Reach())
    assert [(d.uid, d.since, d.until) for d in days] == [
        ("run", TODAY - 2 * DAY, TODAY - DAY),
        ("run", TODAY - DAY, TODAY),
    ]
    assert [d.accelerator_seconds / 3600 for d in days] == [24.0, 12.0]
    [line] = await export.lines(Group.JOB, TODAY - 2 * DAY, TODAY, Reach())
    assert line.accelerator_hours == 36.0
    whole = await export.days(TODAY - 30 * DAY, TODAY, Reach())
    assert sum(d.accelerator_seconds for d in whole if d.uid == "run") == 60 * 3600


async def test_an_export_that_would_be_too_long_is_refused(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uid in ("a", "b", "c"):
        await put(database, uid, {TODAY - DAY: 1.0})
    monkeypatch.setattr(module, "MOST_ROWS", 2)
    export = UsageExport(database)
    with pytest.raises(Invalid, match="shorter"):
        await export.lines(Group.JOB, TODAY - 2 * DAY, NOW, Reach())
    with pytest.raises(Invalid, match="shorter"):
        await export.days(TODAY - 2 * DAY, NOW, Reach())


def test_days_are_whole_and_in_utc() -> None:
    east = datetime.fromisoformat("2026-03-01T23:30:00-05:00")
    assert whole_days(east, east + timedelta(hours=1)) == (
        datetime(2026, 3, 2, tzinfo=UTC),
        datetime(2026, 3, 3, tzinfo=UTC),
    )
    midnight = datetime(2026, 3, 2, tzinfo=UTC)
    assert whole_days(midnight - DAY, midnight) == (midnight - DAY, midnight)


def test_a_total_that_falls_is_never_a_negative_amount() -> None:
    """A restored database may have smaller totals."""
    text = {
        "uid": "u",
        "kind": "k",
        "tenant": "t",
        "namespace": "n",
        "name": "x",
        "requester": "r",
        "pool": "p",
    }
    amounts = AMOUNTS
    rows: list[dict[str, Any]] = [
        {
            **text,
            "day": f"2026-03-0{day}",
            **dict.fromkeys(amounts, total),
            **{f"before_{n}": 5.0 for n in amounts},
        }
        for day, total in ((1, 7.0), (2, 6.0), (3, 9.0))
    ]
    assert [use.cost for use in by_day(rows)] == [2.0, 0.0, 3.0]


def use(**fields: Any) -> ObjectUse:
    base: dict[str, Any] = {
        "uid": "u-1", "kind": "TrainingJob", "tenant": "ada", "namespace": "ada-lab", "name": "run", "user": "alice",
        "pool": "h100", "since": datetime(2026, 12, 31, tzinfo=UTC), "until": datetime(2027, 1, 1, tzinfo=UTC),
        "accelerator_seconds": 5400.0, "work_units": 12.0, "energy_joules": 1.8e6, "cost": 3.75, "lost_seconds": 36.0,
        "caused_seconds": 0.0, "caused_cost": 0.0,
    }  # fmt: skip
    return ObjectUse(**{**base, **fields})


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_focus_has_every_mandatory_column_and_keeps_its_rules() -> None:
    serving = use(
        uid="u-2",
        kind="ModelService",
        name="chat",
        tenant="",
        energy_joules=0.0,
        caused_seconds=1800.0,
        caused_cost=0.25,
    )
    training, inference = rows(focus_of([use(), serving], "EUR"))
    assert set(training) - {name for name in training if name.startswith("x_")} == MANDATORY | OPTIONAL
    for row in (training, inference):
        assert all(row[name] for name in MANDATORY - NULLABLE)
        assert row["BilledCost"] == row["ListCost"] == row["EffectiveCost"] == row["ContractedCost"] == "3.75"
        assert row["ProviderName"] == row["InvoiceIssuerName"], "else the costs would be a reseller's"
        assert (row["ChargeCategory"], row["ChargeClass"], row["BillingCurrency"]) == ("Usage", "", "EUR")
        assert (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == (
            "2026-12-01T00:00:00Z",
            "2027-01-01T00:00:00Z",
        )
        assert (row["ChargePeriodStart"], row["ChargePeriodEnd"]) == (
            "2026-12-31T00:00:00Z",
            "2027-01-01T00:00:00Z",
        )
        assert (row["PricingQuantity"], row["PricingUnit"]) == ("1.5", "Accelerator-Hours")
        assert json.loads(row["Tags"]) == {"namespace": "ada-lab", "pool": "h100"}
    assert (training["SubAccountId"], training["ResourceId"], training["ResourceName"]) == (
        "ada",
        "u-1",
        "ada-lab/run",
    )
    assert (training["x_KilowattHours"], training["x_LostWorkSeconds"], training["x_WorkUnits"]) == (
        "0.5",
        "36",
        "12",
    )
    assert (inference["x_CausedLossAcceleratorHours"], inference["x_CausedLossCost"]) == ("0.5", "0.25")
    assert (inference["SubAccountId"], inference["SubAccountType"], inference["x_KilowattHours"]) == (
        "",
        "",
        "",
    )
    names = {
        (row["ServiceName"], row["ServiceCategory"], row["ServiceSubcategory"])
        for row in (training, inference)
    }
    assert len({name for name, _, _ in names}) == len(names) == 2, "a service has one category"


def test_an_object_that_used_nothing_on_a_day_has_no_row() -> None:
    nothing = use(accelerator_seconds=0.0, energy_joules=0.0, cost=0.0)
    text = focus_of([nothing], "USD")
    assert rows(text) == []
    assert text.startswith("BilledCost,")


def test_csv_has_the_columns_of_its_group_and_no_formulas() -> None:
    line = Line(tenant="ada", user="=cmd|' /C calc'!A0", objects=1, accelerator_hours=1 / 3, cost=0.1 + 0.2)
    [row] = rows(csv_of(Group.USER, [line]))
    assert tuple(row) == columns_of(Group.USER)
    assert row["user"] == "'=cmd|' /C calc'!A0"
    assert (row["accelerator_hours"], row["cost"], row["kilowatt_hours"]) == ("0.333333333", "0.3", "")
    assert "joules_per_token" in columns_of(Group.SERVICE)
    assert "requests" not in columns_of(Group.JOB)
