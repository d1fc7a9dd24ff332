"""Usage and budgets as the command shows and exports them, against the real API."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from tests.cli.conftest import Site

from busbar.kube.resources import TENANTS, TRAINING_JOBS


async def test_usage_is_shown_and_understands_how_long_ago(site: Site) -> None:
    site.world.clock.now = datetime.now(UTC)
    done = await site.busbar("usage", "--since", "7d")
    assert done.code == 0
    found = json.loads((await site.busbar("usage", "--by", "model", "-o", "json")).out)
    assert found["by"] == "model"
    for wrong in ("yesterday", "99999999999999d", "9999999d", "²d", "9" * 5000 + "h"):
        done = await site.busbar("usage", "--since", wrong)
        assert (done.code, "is not a time; write" in done.err) == (2, True), done.err


async def test_times_of_other_zones_are_shown_in_utc_and_those_out_of_range_are_refused(site: Site) -> None:
    span = ("--since", "2026-02-28T23:30:00-02:00", "--until", "2026-03-01T14:00:00+09:00")
    for by in ("tenant", "job"):
        assert (await site.busbar("usage", "--by", by, *span)).lines[0] == (
            f"2026-03-01 01:30 to 2026-03-01 05:00 UTC, by {by}"
        )
    for far in ("9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"):
        done = await site.busbar("usage", "--since", far)
        assert (done.code, "since" in done.err) == (1, True), done.err


async def test_usage_is_exported_as_a_file_and_by_user_and_job(site: Site) -> None:
    usage = {"acceleratorSeconds": 7200.0, "energyJoules": 7.2e6, "cost": 5.0}
    for namespace, name in (("ada-lab", "ada-run"), ("bob-lab", "bob-run")):
        site.world.kube.status(TRAINING_JOBS, namespace, name, usage=usage)
    await site.world.settle()
    await site.world.services.history.flush()
    span = ("--since", (site.world.clock.now - timedelta(days=2)).isoformat(), "--until", (site.world.clock.now + timedelta(days=1)).isoformat())  # fmt: skip
    assert "Energy:" in (await site.busbar("describe", "job/ada-run")).out
    rows = [line.split() for line in (await site.busbar("usage", "--by", "job", *span)).lines]
    assert rows[2] == [
        "TENANT",
        "NAMESPACE",
        "NAME",
        "OBJECTS",
        "ACCELERATOR",
        "HOURS",
        "KWH",
        "COST",
        "LOST",
        "HOURS",
        "CAUSED",
        "HOURS",
    ]
    assert rows[3:] == [["ada", "ada-lab", "ada-run", "1", "2.00", "2.000", "5.00", "0.00", "0.00"]]
    found = json.loads((await site.busbar("usage", "--by", "user", "-o", "json", *span)).out)
    assert {item["tenant"] for item in found["items"]} <= {"ada"}
    told = (await site.busbar("usage", "--by", "job", "-o", "csv", *span)).lines
    assert told[0].startswith("tenant,namespace,name,objects,accelerator_hours")
    assert told[1].startswith("ada,ada-lab,ada-run,1,2,")
    focus = (await site.busbar("usage", "-o", "focus", "--currency", "EUR", *span)).lines
    assert focus[0].startswith("BilledCost,BillingAccountId")
    assert len(focus) == 2
    assert (await site.busbar("usage", "-o", "focus")).code == 2
    assert (await site.busbar("usage", "--by", "day", "-o", "csv")).code == 2
    assert "2.000" in (await site.busbar("usage", *span)).out


BUDGETS = [
    {
        "period": "month",
        "started": "2026-11-01T00:00:00Z",
        "ends": "2026-12-01T00:00:00Z",
        "acceleratorHours": 75.0,
        "acceleratorHoursLeft": 25.0,
        "cost": 3.0,
        "kilowattHours": 48.2,
        "kilowattHoursLeft": 1.8,
        "usedPercent": 96.4,
        "state": "Warning",
        "exhausted": "2026-11-27T14:30:00Z",
        "exhaustedP50": "2026-11-27T16:00:00Z",
        "exhaustedP90": "2026-11-28T08:15:00Z",
    }
]


SPENT = ["2026-11-27", "14:30", "2026-11-27", "16:00", "2026-11-28", "08:15"]


async def test_budgets_are_shown_by_limit_and_only_those_of_own_tenants(site: Site) -> None:
    assert (await site.busbar("budget")).out == "No tenant that you may see has a budget.\n"
    for tenant in ("ada", "bob-corp"):
        site.world.kube.status(TENANTS, "", tenant, budgets=BUDGETS)
    await site.world.settle()
    lines = [line.split() for line in (await site.busbar("budget")).lines]
    assert lines[1:] == [
        ["ada", "month", "accelerator-hours", "75", "25", "75%", "Warning", *SPENT, "2026-12-01", "00:00"],
        ["ada", "month", "kWh", "48.2", "1.8", "96%", "Warning", *SPENT, "2026-12-01", "00:00"],
    ]  # fmt: skip
    spent: dict[str, object] = {
        "period": "day",
        "started": "2026-11-24T00:00:00Z",
        "ends": "2026-11-25T00:00:00Z",
    }
    spent |= {"cost": 4.0, "costLeft": 0.0, "state": "Spent"}
    site.world.kube.status(TENANTS, "", "ada", inference={"budgets": [spent]})
    await site.world.settle()
    (line,) = [line.split() for line in (await site.busbar("budget")).lines if "inference" in line]
    assert line[:6] == ["ada", "day", "inference", "cost", "4", "0"]
    found = json.loads((await site.busbar("budget", "ada", "-o", "json")).out)
    assert found["items"][0]["inference"] == [spent]
    assert [item["tenant"] for item in found["items"]] == ["ada"]
    assert found["items"][0]["budgets"][0]["kilowattHoursLeft"] == 1.8
    refused = await site.busbar("budget", "bob-corp")
    assert (refused.code, "no tenant 'bob-corp' that you may see" in refused.err) == (3, True)
