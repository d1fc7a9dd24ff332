"""Views of pools, nodes, tenants, budgets, power and profiles; times and numbers; and the vendored files."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import pytest
from tests.api.portal.objects import NOW

from busbar.api.objects.budgets import budget_lines
from busbar.api.portal.formatting import ago, number
from busbar.api.portal.pool_views import node_view, pool_view, profile_view, tenant_view
from busbar.api.portal.power_views import JobPower, feed_views, job_power
from busbar.api.portal.render import STATIC, static_files, templates
from busbar.kube.contracts.power import Backend
from busbar.kube.contracts.power_view import FeedPower, NodePower
from busbar.kube.contracts.preview import NodeLoad
from busbar.kube.types import AcceleratorPool, PerformanceProfile, Tenant


def test_a_profile_shows_predicted_and_measured_side_by_side() -> None:
    cell = {
        "accelerator": "L4", "accelerators": 1, "mode": "resident", "tokensPerSecond": 4100.4, "predicted": 5200.0,
        "memoryGib": 11.25, "measuredMemoryGib": 10.5, "source": "Measured", "reports": 9, "note": "seen",
    }  # fmt: skip
    [row] = profile_view(_profile(cell)).rows
    assert (row["speed"], row["predicted"]) == ("4,100", "5,200")
    assert (row["memory"], row["measured_memory"], row["note"]) == ("11.2 GiB", "10.5 GiB", "seen")
    del cell["predicted"], cell["measuredMemoryGib"]
    [row] = profile_view(_profile(cell)).rows
    assert (row["predicted"], row["measured_memory"]) == ("", "")


def test_a_profile_shows_watts_by_phase_and_under_caps() -> None:
    cell = {
        "accelerator": "A100", "accelerators": 1, "mode": "resident", "tokensPerSecond": 800.0, "source": "Ratio",
        "powerCapPercent": 60, "watts": 200.4, "phaseWatts": {"prefill": 230.0, "idle": 61.0},
    }  # fmt: skip
    [row] = profile_view(_profile(cell)).rows
    assert row["mode"] == "resident, at 60 % of watts"
    assert row["watts"] == "200 W each: 230 W reading prompts, 61 W idle"
    del cell["phaseWatts"], cell["powerCapPercent"]
    [row] = profile_view(_profile(cell)).rows
    assert (row["mode"], row["watts"]) == ("resident", "200 W each")


def _profile(cell: dict[str, Any]) -> PerformanceProfile:
    document = {"metadata": {"name": "c"}, "spec": {"workloadClass": "c"}, "status": {"cells": [cell]}}
    return PerformanceProfile.model_validate(document)


def load(ready: bool, capacity: float, allocated: float) -> NodeLoad:
    return NodeLoad(
        name="n", pool="p", accelerator="H100", ready=ready, capacity=capacity, allocated=allocated
    )


@pytest.mark.parametrize(("held", "heat"), [(0, 0), (0.3, 0), (4, 5), (8, 10), (9, 10)])
def test_heat_runs_from_0_to_10(held: float, heat: int) -> None:
    assert node_view(load(True, 8, held)).heat == heat
    assert node_view(load(False, 0, 0)).label.endswith("not ready")


def test_times_and_numbers_are_plain() -> None:
    assert ago(NOW + timedelta(seconds=5), NOW) == "0 s"
    assert ago(None, NOW) == ""
    assert (number(8.0, 1), number(1234.5, 1), number(None, 1), number(100, 0)) == ("8", "1,234.5", "", "100")


def test_vendored_files_are_the_published_ones() -> None:
    folder = STATIC / "vendor"
    lines = [line.split() for line in (folder / "SHA256SUMS.txt").read_text().splitlines()]
    listed = {name: digest for digest, name in lines}
    present = {path.name for path in folder.iterdir()} - {"SHA256SUMS.txt"}
    assert set(listed) == present
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    for library in ("htmx", "pico", "uplot"):
        assert f"{library}-LICENSE.txt" in present


def test_our_pages_carry_no_inline_script_or_style() -> None:
    templates = STATIC.parent / "templates"
    for path in templates.glob("*.html"):
        text = path.read_text()
        assert "<style" not in text, path
        assert " style=" not in text, path
        assert " onclick" not in text, path
        assert all("src=" in part.split(">")[0] for part in text.split("<script")[1:]), path


def test_browsers_may_keep_static_files_for_ever_under_their_digest() -> None:
    total = sum(len(content) for content, _, _ in static_files().values())
    assert total < 300_000


def test_a_feed_shows_its_draw_its_problem_and_what_is_known_of_it() -> None:
    def feed(name: str, parent: str = "", **more: Any) -> FeedPower:
        base = {
            "name": name,
            "parent": parent,
            "budget_watts": 2000.0,
            "ready": True,
            "reason": "Observing",
            "nodes": 2,
        }
        return FeedPower.model_validate(base | more)

    nodes = [
        NodePower(name="n1", feeds=("rack", "row"), watts=900.0, nameplate_watts=1000.0, age_seconds=0.5,
                  boards_from=Backend.SIMULATED, silent=False, capped=True, why="raised", conflicting_boards=1),
        NodePower(name="n2", feeds=("rack", "row"), watts=500.0, nameplate_watts=1000.0, age_seconds=9.0),
        NodePower(name="n3", feeds=("rack", "row")),
    ]  # fmt: skip
    half = feed("rack", "row", draw_watts=900.0, assumed_watts=1000.0, silent_nodes=2, simulated_nodes=1)
    half = half.model_copy(
        update={"leased_watts": 1980.0, "capped_nodes": 1, "work_per_kilowatt_hour": 1.42857}
    )
    rack, row = feed_views([half, feed("row", ready=False, reason="NoNodes")], nodes)[::-1]
    assert (row.name, row.draw, row.percent, row.nodes) == ("row", "not measured", None, [])
    assert row.problem == "Not ready: NoNodes."
    assert (rack.above, rack.draw, rack.budget, rack.headroom) == ("row", "900 W", "2 kW", "")
    assert (rack.percent, rack.problem) == (95.0, "")
    assert rack.told == "2 nodes, 1 capped, 2 silent (1 kW assumed), 1 simulated"
    assert (rack.leased, row.leased) == ("2 kW", "")
    assert (rack.price, row.price) == ("1.43", "")
    assert (rack.meter, row.meter) == ("", "")
    meters = feed_views(
        [
            feed("below", metered=True, meter_error=-0.0312),
            feed("fresh", metered=True),
            feed("lost", metered=True, meter_problem="It is away."),
        ],
        [],
    )
    assert [(view.meter, view.problem) for view in meters] == [
        ("in the last whole hour the ledger is 3.1% below its meter", ""),
        ("its meter: no whole hour yet", ""),
        ("", "It is away."),
    ]
    assert [(n.heat, n.ready, n.label) for n in rack.nodes] == [
        (9, True, "n1: 900 W of 1 kW, capped (raised), 1 board with another's limit, simulated"),
        (5, False, "n2: 500 W of 1 kW, silent for 9 s"),
        (0, False, "n3: has never reported"),
    ]
    (over,) = feed_views([feed("over", draw_watts=2001.0)], [])
    assert (over.percent, over.problem) == (100.0, "The draw is above the budget.")
    assert {view.name for view in feed_views([feed("a", "b"), feed("b", "a")], [])} == {"a", "b"}


def test_a_tenant_shows_its_use_of_each_limit() -> None:
    spec = {"namespaces": ["b", "a"], "limits": {"pods": 8, "storageGib": 100, "waitingJobs": 5}}
    use = [{"namespace": "a", "pods": 8, "storageGib": 1.5}]
    of = {"metadata": {"name": "t"}, "spec": spec, "status": {"limitUse": use, "waitingJobs": 2}}
    shown = tenant_view(Tenant.model_validate(of))
    assert [
        (row["namespace"], row["what"], row["used"], row["limit"], row["full"]) for row in shown.limits
    ] == [
        ("all", "waiting jobs", "2", "5", ""),
        ("a", "pods", "8", "8", "yes"),
        ("a", "storage, GiB", "1.5", "100", ""),
        ("b", "pods", "not counted yet", "8", ""),
        ("b", "storage, GiB", "not counted yet", "100", ""),
    ]
    page = (
        templates().get_template("pools_list.html").render(tenants=[shown], pools=[], profiles=[], problem="")
    )
    assert "<strong>8</strong><small>reached</small>" in page
    assert "not counted yet" in page
    unlimited = tenant_view(Tenant.model_validate({"metadata": {"name": "t"}, "spec": {}}))
    assert unlimited.limits == []


def test_a_pool_shows_what_others_hold_of_it_only_while_they_do() -> None:
    def shown(status: str) -> str:
        held = {
            "type": "CapacityHeldElsewhere", "status": status, "reason": "ForeignPods",
            "message": "4 accelerators are held.", "lastTransitionTime": NOW.isoformat(),
        }  # fmt: skip
        spec = {"accelerator": "H100", "resourceName": "nvidia.com/gpu", "nodeSelector": {"pool": "h100"}}
        of = {"metadata": {"name": "h100"}, "spec": spec, "status": {"conditions": [held]}}
        return pool_view(AcceleratorPool.model_validate(of), []).elsewhere

    assert (shown("True"), shown("False")) == ("4 accelerators are held.", "")


def test_a_tenants_budgets_are_a_line_for_each_limit() -> None:
    use = {
        "period": "day",
        "started": "2026-11-21T00:00:00Z",
        "ends": "2026-11-22T00:00:00Z",
        "state": "Within",
    }
    amounts = {
        "cost": 9.0,
        "acceleratorHours": 2.0,
        "acceleratorHoursLeft": 6.0,
        "kilowattHours": 1.0,
        "kilowattHoursLeft": 0.0,
    }
    of = Tenant.model_validate(
        {
            "metadata": {"name": "ada"},
            "kind": "Tenant",
            "spec": {},
            "status": {"budgets": [{**use, **amounts}]},
        }
    )
    hours, energy = budget_lines([of])
    assert (hours.tenant, hours.period, hours.resource) == ("ada", "day", "accelerator-hours")
    assert (hours.used, hours.left, hours.percent) == (2.0, 6.0, 25.0)
    assert (energy.resource, energy.percent) == ("kWh", 100.0)
    page = templates().get_template("usage_budgets.html").render(budgets=[hours, energy], number=number)
    assert "kWh" in page
    assert "2026-11-22 00:00" in page
    assert templates().get_template("usage_budgets.html").render(budgets=[], number=number).strip() == ""


def test_a_job_draws_its_part_of_its_nodes_as_far_as_they_report() -> None:
    def node(name: str, watts: float | None, **more: Any) -> NodePower:
        return NodePower(name=name, watts=watts, boards=8, silent=watts is None, **more)

    nodes = [
        node("a", 6000.0),
        node("b", 4000.0, capped=True, boards_from=Backend.SIMULATED),
        node("c", None),
    ]
    assert job_power(("a",), 4, nodes) == JobPower("3 kW", "with its part of the hosts")
    whole = job_power(("a", "b"), 8, nodes)
    assert whole == JobPower("10 kW", "with its part of the hosts, boards limited on 1 node, simulated")
    assert job_power(("a", "a", "c"), 4, nodes) == JobPower(
        "6 kW", "with its part of the hosts, 2 of 3 pods are on nodes that report"
    )
    assert job_power(("c",), 8, nodes) is None
    assert job_power((), 8, nodes) is None
