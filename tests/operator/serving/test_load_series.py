"""A service's load over time: what is counted into a period, what is a gap, and what each pool could carry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError
from tests.operator.builders import pool, replica, service

from busbar.kube.contracts.demand import ServiceDemand, Totals
from busbar.kube.contracts.service_series import SeriesSpan, ServiceSeries
from busbar.kube.informer import Key
from busbar.operator.serving.fleet_plan import Plan
from busbar.operator.serving.load_series import KeptSeries, LoadSeries, Sample
from busbar.operator.serving.series_keeper import SeriesKeeper
from busbar.operator.watch.caches import Caches

NOON = 1_800_000_000.0
"""A whole number of five minutes."""
HOUR, DAY = SeriesSpan.HOUR, SeriesSpan.DAY


def demand(arrivals: int, answered: int | None = None, **more: Any) -> ServiceDemand:
    answered = arrivals if answered is None else answered
    totals = Totals(**{"answered": answered, "within": answered, "output_tokens": 20 * answered} | more)
    return ServiceDemand(namespace="team", name="web", arrivals=arrivals, totals=totals)


def told(series: LoadSeries, span: SeriesSpan = HOUR, at_s: float = NOON) -> ServiceSeries:
    return series.answer("team", "web", span, at_s, str.upper)


def test_a_period_has_the_rates_and_means_of_its_samples_and_the_rest_are_gaps() -> None:
    series = LoadSeries()
    for number in range(7):  # a minute of samples, each ten seconds
        ready, capacity = ({"l4": 1}, 4.0) if number < 3 else ({"l4": 3, "h100": 1}, 20.0)
        sample = Sample(demand(30 * number), ready, {"l4": 2.0, "h100": 4.0}, capacity)
        series.take(sample, NOON + 10 * number - 1)
    found = told(series, at_s=NOON + 59)
    assert found.requests_per_second[-2:] == (None, 3.0)
    assert found.tokens_per_second[-1] == 60.0
    assert found.attainment[-1] == 1.0
    assert found.capacity_per_second[-2] == 4.0
    assert found.capacity_per_second[-1] == pytest.approx((2 * 4 + 4 * 20) / 6, rel=1e-3)
    h100, l4 = found.pools
    assert (h100.pool, h100.accelerator, l4.accelerator) == ("h100", "H100", "L4")
    assert l4.ready_replicas[-1] == pytest.approx(14 / 6, rel=1e-3)
    assert h100.ready_replicas[-1] == pytest.approx(4 / 6, rel=1e-3)
    # Of 20 requests/s three L4 with 6 alone have 12, and one H100 with 4 alone has 8: in four of six samples.
    assert h100.capacity_per_second[-1] == pytest.approx(4 * 8 / 6, rel=1e-3)
    assert l4.capacity_per_second[-1] == pytest.approx((2 * 4 + 4 * 12) / 6, rel=1e-3)
    assert len(found.requests_per_second) == 60
    assert set(found.requests_per_second[:-2]) == {None}
    assert found.begins.timestamp() == NOON - 59 * 60


def test_the_day_has_periods_of_five_minutes_over_the_same_samples() -> None:
    series = LoadSeries()
    for minute in range(11):
        series.take(Sample(demand(60 * minute + 60 * max(0, minute - 5))), NOON + 60 * minute)
    found = told(series, DAY, NOON + 600)
    assert len(found.requests_per_second) == 288
    # One request/s until the reading of the fifth minute, which is counted in the second period, and then two.
    assert found.requests_per_second[-3:] == (1.0, 1.8, 2.0)
    assert told(series, HOUR, NOON + 600).requests_per_second[-2:] == (2.0, 2.0)
    later = told(series, DAY, NOON + 600 + 24 * 3600)
    assert set(later.requests_per_second) == {None}


def test_a_restarted_gateway_counts_from_zero_and_a_silent_one_is_a_gap() -> None:
    series = LoadSeries()
    series.take(Sample(demand(1000)), NOON)
    series.take(Sample(None, {"l4": 1}), NOON + 70)
    series.take(Sample(demand(6)), NOON + 120)
    found = told(series, at_s=NOON + 120)
    assert found.requests_per_second[-3:] == (None, None, 0.05)
    assert found.pools[0].ready_replicas[-3:] == (None, 1.0, 0.0)


def test_times_are_percentiles_of_the_periods_streams_and_late_ones_lower_the_attainment() -> None:
    series = LoadSeries()
    series.take(Sample(demand(0), percentile=90.0), NOON)
    streams = {"first_token": {40: 80, 48: 20}, "per_token": {20: 100}}
    series.take(Sample(demand(100, 100, within=75, **streams), percentile=90.0), NOON + 10)
    found = told(series, at_s=NOON + 10)
    assert (found.percentile, found.attainment[-1]) == (90.0, 0.75)
    median, tail = found.ttft_median_milliseconds[-1], found.ttft_milliseconds[-1]
    assert median is not None
    assert tail is not None
    assert 860 < median <= 1024 < 3444 < tail <= 4096
    assert found.tpot_milliseconds[-1] == pytest.approx(32, rel=0.2)


def test_a_pool_without_replicas_is_zero_and_is_forgotten_with_the_last_period_that_had_some() -> None:
    series = LoadSeries()
    series.take(Sample(None, {"l4": 2}), NOON)
    series.take(Sample(None, {"h100": 1}), NOON + 60)
    assert [each.ready_replicas[-2:] for each in told(series, at_s=NOON + 60).pools] == [
        (None, 1.0),
        (2.0, 0.0),
    ]
    series.take(Sample(None, {"h100": 1}), NOON + 61 * 60)
    assert [each.pool for each in told(series, at_s=NOON + 61 * 60).pools] == ["h100"]
    assert [each.pool for each in told(series, DAY, NOON + 61 * 60).pools] == ["h100", "l4"]


def test_without_speeds_nothing_is_said_of_the_capacity() -> None:
    series = LoadSeries()
    series.take(Sample(None, {"l4": 2}), NOON)
    found = told(series)
    assert set(found.capacity_per_second) == set(found.pools[0].capacity_per_second) == {None}


def taken(begin_s: float, seconds: int, *, per_s: int = 2) -> LoadSeries:
    """Samples every ten seconds of a service with constant load."""
    series = LoadSeries()
    for at in range(0, seconds + 1, 10):
        sample = Sample(demand(per_s * at), {"l4": 2}, {"l4": 3.0}, 6.0)
        series.take(sample, begin_s + at)
    return series


def kept_of(series: LoadSeries) -> KeptSeries:
    kept = series.copied().kept()
    assert kept is not None
    return KeptSeries.model_validate_json(kept.model_dump_json(exclude_defaults=True))


def test_another_process_goes_on_with_the_same_series_and_the_time_between_is_a_gap() -> None:
    first = taken(NOON, 660)
    second = LoadSeries.of(kept_of(first), NOON + 660)
    for span in SeriesSpan:
        assert told(second, span, NOON + 660) == told(first, span, NOON + 660)
    for at in (900, 910, 920):
        second.take(Sample(demand(5 * at), {"h100": 1}), NOON + at)
    found = told(second, at_s=NOON + 920)
    assert found.requests_per_second[-6:] == (2.0, 2.0, None, None, None, 5.0)
    assert found.capacity_per_second[-6:] == (6.0, 6.0, None, None, None, None)
    h100, l4 = found.pools
    assert l4.ready_replicas[-6:] == (2.0, 2.0, None, None, None, 0.0)
    assert h100.ready_replicas[-6:] == (None, None, None, None, None, 1.0)


def test_what_is_kept_changes_only_with_what_is_counted_and_nothing_known_is_not_kept() -> None:
    series = taken(NOON, 300)
    before = kept_of(series)
    series.take(Sample(None), NOON + 310)
    assert kept_of(LoadSeries.of(before, NOON + 310)) == before
    series = LoadSeries()
    for at in (0, 60):
        series.take(Sample(None), NOON + at)
    assert series.kept() is None
    series.take(Sample(demand(7)), NOON + 120)
    series.take(Sample(demand(7)), NOON + 130)
    kept = kept_of(series)
    assert [columns.columns["demand"] for columns in kept.spans.values()] == [[0.0], [0.0]], "an idle hour"


def test_of_what_was_kept_periods_that_are_too_old_or_to_come_are_left_out() -> None:
    kept = kept_of(taken(NOON, 660))
    later = told(LoadSeries.of(kept, NOON + 3600), HOUR, NOON + 3600)
    assert [later.requests_per_second.count(value) for value in (2.0, None)] == [11, 49]
    back = LoadSeries.of(kept, NOON + 120)  # the other process' clock was ahead
    back.take(Sample(demand(0)), NOON + 180)
    back.take(Sample(demand(90)), NOON + 190)
    assert told(back, at_s=NOON + 190).requests_per_second[-5:] == (None, 2.0, 2.0, 2.0, 9.0)


@pytest.mark.parametrize(
    "columns",
    [
        {"first": -1},
        {"first": 1, "columns": {"demand": [-1.0]}},
        {"first": 1, "columns": {"demand": ["NaN"]}},
        {"first": 1, "columns": {"demand": [1.0] * 289}},
        {"first": 1, "columns": {"d" * 301: [1.0]}},
        {"first": 1, "other": 1},
    ],
)
def test_a_series_that_nobody_wrote_is_refused(columns: dict[str, Any]) -> None:
    KeptSeries.model_validate({"spans": {"1h": {"first": 1, "columns": {"demand": [1.0, None]}}}})
    with pytest.raises(ValidationError):
        KeptSeries.model_validate({"spans": {"1h": columns}})


async def test_all_services_are_sampled_and_those_that_are_gone_are_forgotten() -> None:
    services = {Key("team", name): service(name) for name in ("web", "chat")}
    caches: Any = SimpleNamespace(
        services=SimpleNamespace(items=services),
        pools=SimpleNamespace(items={Key("", "cpu"): pool("cpu")}),
        owned_pods=lambda kind, owner: (
            (replica(0), replica(1, ready=False)) if owner.metadata.name == "web" else ()
        ),
    )
    plan = Plan(rates={"cpu": 2.5}, capacity_rps=2.5)
    moment = [NOON]
    keeper = SeriesKeeper(
        cast("Caches", caches),
        lambda key: None,
        lambda uid: plan if "web" in uid else None,
        lambda: moment[0],
    )
    await keeper.sample()
    [mine] = keeper.of(Key("team", "web"), HOUR).pools
    assert (mine.pool, mine.accelerator, mine.ready_replicas[-1]) == ("cpu", "cpu", 1.0)
    assert mine.capacity_per_second[-1] == 2.5
    assert keeper.of(Key("team", "chat"), HOUR).pools == ()
    del services[Key("team", "web")]
    await keeper.sample()
    assert keeper.of(Key("team", "web"), HOUR).pools == ()
    services[Key("team", "web")] = service("web")
    assert keeper.of(Key("team", "web"), HOUR).pools == ()
