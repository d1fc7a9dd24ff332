"""The charts of a service's load: their scales, their stacks, and what is said where something is not known."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.api.conftest import World, settings, sqlite_template, sqlite_url, world

from busbar.api.portal.curve_paths import HEIGHT, WIDTH, area_path
from busbar.api.portal.service_charts import COLOURS, Chart, charts
from busbar.kube.contracts.service_series import PoolSeries, SeriesSpan, ServiceSeries
from busbar.kube.types.model_service import ServiceLevel

__all__ = ["settings", "sqlite_template", "sqlite_url", "world"]

AT = "/api/v1alpha1/namespaces/ada-lab/modelservices/ada-chat/series"
PAGE = "/services/ada-lab/ada-chat"
SLO = ServiceLevel.model_validate({"ttftMilliseconds": 1000, "tpotMilliseconds": 50})


def pool(name: str, *ready: float | None, capacity: tuple[float | None, ...] = ()) -> PoolSeries:
    return PoolSeries(
        pool=name,
        accelerator=name.upper(),
        ready_replicas=ready,
        capacity_per_second=capacity or (None,) * len(ready),
    )


def found(slo: ServiceLevel | None = None, **fields: Any) -> dict[str, Chart]:
    made = ServiceSeries(
        namespace="team",
        name="web",
        span=SeriesSpan.HOUR,
        begins=datetime(2026, 11, 29, tzinfo=UTC),
        percentile=99.0,
        **fields,
    )
    return {chart.title: chart for chart in charts(made, slo)}


def corners(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def test_the_capacity_of_pools_is_stacked_under_the_demand_on_one_scale() -> None:
    pools = (
        pool("a100", 1, 1, capacity=(4.0, 4.0)),
        pool("l4", None, 2, capacity=(None, 6.0)),
    )
    chart = found(requests_per_second=(2.0, 8.0), capacity_per_second=(4.0, 10.0), pools=pools)[
        "Demand and capacity"
    ]
    (_, lower), (_, upper) = chart.areas
    assert [y for _, y in corners(lower)] == pytest.approx(
        [HEIGHT * (1 - 4 / 10.5)] * 2 + [HEIGHT] * 2, abs=0.1
    )
    assert min(y for _, y in corners(upper)) == pytest.approx(HEIGHT * (1 - 10 / 10.5), abs=0.1)
    assert corners(chart.lines[0][1])[1][1] == pytest.approx(HEIGHT * (1 - 8 / 10.5), abs=0.1)
    assert chart.keys == (
        ("line", "demand"),
        ("swatch s0", "capacity on a100"),
        ("swatch s1", "capacity on l4"),
    )
    assert chart.label == (
        "Demand and capacity, the last 1h: demand 2 to 8 requests/s, last 8; capacity 4 to 10 requests/s, last 10"
    )


def test_without_speeds_the_demand_stands_alone_and_says_so() -> None:
    made = found(requests_per_second=(2.0,), capacity_per_second=(None,), pools=(pool("l4", 3.0),))
    assert "how much the replicas carry is not known" in made["Demand"].label
    assert made["Ready replicas"].label == "Ready replicas, the last 1h: l4 3 to 3, last 3"
    assert set(made) == {"Demand", "Ready replicas"}
    assert found(requests_per_second=(None,), pools=(pool("l4", None),)) == {}


def test_of_many_pools_the_smallest_share_a_colour() -> None:
    pools = tuple(pool(f"p{i}", float(9 - i)) for i in range(9))
    chart = found(pools=pools)["Ready replicas"]
    assert [words for _, words in chart.keys] == ["p0", "p1", "p2", "p3", "p4", "4 others"]
    assert len(chart.areas) == COLOURS


def test_the_attainment_has_room_for_its_lowest_value_and_none_where_nothing_is_promised() -> None:
    chart = found(SLO, attainment=(1.0, 0.83))["Answers within the target"]
    assert chart.scale == "80 to 100 %"
    assert chart.limit_y == pytest.approx(HEIGHT * (1 - 0.19 / 0.2), abs=0.1)
    assert found(SLO, attainment=(1.0, None))["Answers within the target"].scale == "90 to 100 %"
    assert found(attainment=(1.0, 0.83)) == {}


@pytest.mark.parametrize(("slowest", "is_drawn"), [(900.0, True), (230.0, False)])
def test_a_target_far_above_the_times_is_told_and_not_drawn(slowest: float, is_drawn: bool) -> None:
    chart = found(SLO, ttft_milliseconds=(100.0, slowest), ttft_median_milliseconds=(50.0, 60.0))[
        "Time to first token"
    ]
    assert (chart.limit_y is not None) is is_drawn
    assert "target 1,000 ms" in chart.label
    assert len(chart.lines) == 2


def test_gaps_stay_gaps_and_a_period_between_two_of_them_is_seen() -> None:
    low: list[float | None] = [0.0] * 5
    path = area_path(low, [1.0, None, 2.0, None, 1.0], 2.0)
    assert path.count("M") == 3
    runs = [corners("M" + part) for part in path.split("M")[1:]]
    assert all(run[0][0] < max(x for x, _ in run) <= WIDTH + 0.5 for run in runs)
    assert area_path(low, low, 1.0) == ""


async def test_the_series_are_told_to_who_may_read_the_service(world: World) -> None:
    alice, bob = await world.as_("alice"), await world.as_("bob")
    answer = (await alice.get(AT, params={"span": "24h"})).json()
    assert (answer["span"], answer["periodSeconds"], len(answer["requestsPerSecond"])) == ("24h", 300, 288)
    assert [each["pool"] for each in answer["pools"]] == ["h100", "old"]
    assert answer["pools"][0]["readyReplicas"][-3:] == [2.0, 1.0, 2.0]
    assert (await alice.get(AT)).json()["periodSeconds"] == 60
    assert (await alice.get(AT, params={"span": "1w"})).status_code == 422
    assert (await bob.get(AT)).status_code == 404
    world.operator.away = True
    assert (await alice.get(AT)).status_code == 503


async def test_the_page_has_the_charts_of_the_span_that_is_asked_for(world: World) -> None:
    alice, bob = await world.as_("alice"), await world.as_("bob")
    assert f'hx-get="{PAGE}/load?span=24h"' in (await alice.get(PAGE, params={"span": "24h"})).text
    part = (await alice.get(f"{PAGE}/load")).text
    assert "Demand and capacity, the last 1h: demand 2 to 9 requests/s" in part
    assert "capacity on old (V100)" in part
    assert (await bob.get(f"{PAGE}/load")).status_code == 404
    world.operator.away = True
    assert "does not answer" in (await alice.get(f"{PAGE}/load")).text
