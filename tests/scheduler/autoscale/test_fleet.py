"""Decisions over time: forecast, panic, removal, switches, and what holds for all of them."""

from __future__ import annotations

import pytest

from busbar.scheduler.autoscale.fleet import Cause, Decision, Fleet, FleetSettings, Observation
from busbar.scheduler.autoscale.mix import Column, LimitKind, Limits, Row, capacity
from busbar.scheduler.autoscale.step_model import Slo
from busbar.scheduler.errors import ServingModelError

SMALL = Column("small", "small", 1.0, (1.0,))
BIG = Column("big", "big", 6.0, (10.0,))


def seen(
    now: float, rate: float, ready: dict[str, int], starting: dict[str, int] | None = None, overdue: int = 0
) -> Observation:
    return Observation(now, (rate,), overdue, ready, starting or {})


def fleet(*columns: Column, **limits: object) -> Fleet:
    return Fleet(columns or (SMALL, BIG), Limits(**limits), Slo(), FleetSettings())  # type: ignore[arg-type]


def driven(
    item: Fleet, rates: list[float], live: dict[str, int], start: int = 0
) -> list[tuple[int, Decision]]:
    """Feed rates second by second; replicas are there at once."""
    found = []
    for second, rate in enumerate(rates, start + 1):
        decision = item.decide(seen(float(second), rate, dict(live)))
        if decision is not None:
            found.append((second, decision))
            live.clear()
            live.update(decision.target)
    return found


def test_a_steady_load_decides_nothing_after_the_margin_is_known() -> None:
    item = fleet()
    live = item.begin((3.0,))
    driven(item, [3.0] * 900, live)
    assert driven(item, [3.0] * 1800, live, 900) == []
    assert live == {"small": 3, "big": 0}


@pytest.mark.parametrize(("carried", "wanted"), [(1.0, 5), (1.14, 5), (1.15, 4), (1.3, 4)])
def test_a_small_excess_of_the_forecast_adds_nothing(carried: float, wanted: int) -> None:
    """A new fleet's margin is 1.2: 4 requests/s are 4.8 at the quantile, which may exceed what four replicas carry by 5 %."""
    item = fleet(Column("small", "small", 1.0, (carried,)))
    item.begin((4.0,))
    live = {"small": 4}
    driven(item, [4.0] * 40, live)
    assert live == {"small": wanted}


def test_panic_acts_within_a_second_on_ten_seconds_of_load() -> None:
    item = fleet()
    decision = item.decide(seen(1.0, 8.0, {"small": 2, "big": 0}))
    assert decision is not None
    assert decision.cause is Cause.PANIC
    assert decision.target["small"] + 10 * decision.target["big"] >= 8


def test_starting_replicas_count_against_panic() -> None:
    assert fleet().decide(seen(1.0, 7.0, {"small": 2}, {"big": 1})) is None


def test_a_queue_without_overload_adds_once_it_lasts_and_nothing_starts() -> None:
    item = fleet()
    item.begin((3.0,))
    live = {"small": 4, "big": 0}
    decisions = [item.decide(seen(float(t), 3.0, live, overdue=5)) for t in range(1, 5)]
    assert [d is not None for d in decisions[:3]] == [False, False, True]
    assert decisions[2] is not None
    assert decisions[2].target["small"] == 5
    waiting = fleet()
    waiting.begin((3.0,))
    assert all(waiting.decide(seen(float(t), 3.0, live, {"big": 1}, 5)) is None for t in range(1, 5))


def panics(item: Fleet, now_s: float, rate: float, live: dict[str, int], starting: int = 0) -> int:
    """Small replicas wanted at that second, 5 requests being overdue; 0: nothing changes."""
    decision = item.decide(seen(now_s, rate, dict(live), {"small": starting}, overdue=5))
    assert decision is None or decision.cause is Cause.PANIC
    return 0 if decision is None else decision.target["small"]


@pytest.mark.parametrize(("start_s", "wanted"), [(0.0, 8), (30.0, 10), (60.0, 12), (600.0, 12)])
def test_an_overload_counts_the_queue_that_grows_until_more_is_ready(start_s: float, wanted: int) -> None:
    """8 requests/s on what carries 4: a start leaves 4 for each of its seconds, worked off in a minute or another start."""
    settings = FleetSettings(start_s=start_s, down_after_s=600.0)
    item = Fleet((SMALL,), Limits(), Slo(), settings)
    item.begin((4.0,))
    assert panics(item, 1.0, 8.0, {"small": 4}) == wanted
    assert panics(item, 2.0, 8.0, {"small": 4}, starting=wanted - 4) == 0, "what starts counts"


@pytest.mark.parametrize(("ready", "wanted"), [(0, 8), (2, 6), (4, 4)])
def test_what_starts_anew_leaves_a_queue_that_is_added_for(ready: int, wanted: int) -> None:
    """4 requests/s on four replicas, some of which have failed and start again: what those miss in a minute is worked off in
    another."""
    item = fleet(SMALL)
    item.begin((4.0,))
    decision = item.decide(seen(1.0, 4.0, {"small": ready}, {"small": 4 - ready}))
    assert (4 if decision is None else decision.target["small"]) == wanted


def test_a_part_of_the_load_that_nothing_ready_serves_leaves_a_queue() -> None:
    """A third of 6 requests/s has long prompts, which only the large type serves; the large one starts, and its queue needs another."""
    short, long = Column("short", "short", 1.0, (2.0, 0.0)), Column("long", "long", 6.0, (2.0, 2.0))
    item = fleet(short, long)
    item.begin((4.0, 2.0))
    nothing = Observation(1.0, (4.0, 2.0), 0, {"short": 2, "long": 1}, {"long": 0})
    assert item.decide(nothing) is None
    decision = item.decide(Observation(2.0, (4.0, 2.0), 0, {"short": 2}, {"long": 1}))
    assert decision is not None
    assert decision.target == {"short": 2, "long": 2}


def test_the_queue_of_an_overload_is_not_added_for_twice() -> None:
    item = fleet(SMALL)
    item.begin((4.0,))
    assert panics(item, 1.0, 8.0, {"small": 4}) == 12
    until = range(61, 121)
    assert not any(panics(item, float(t), 8.0, {"small": 12}) for t in until), "nor does any leave"
    assert panics(item, 121.0, 8.0, {"small": 12}) == 13, "it should have been worked off"


@pytest.mark.parametrize(("overdue", "most"), [(5, 8), (120, 11)])
def test_a_queue_that_more_replicas_do_not_shorten_buys_no_more_than_works_it_off(
    overdue: int, most: int
) -> None:
    """Twice 3 requests/s and the queue within a minute, rounded up, and one more; the stock is far more."""
    item = fleet(SMALL, stock={"small": 200})
    item.begin((3.0,))
    live = {"small": 4}
    for second in range(1, 1800):
        decision = item.decide(seen(float(second), 3.0, dict(live), overdue=overdue))
        live = dict(decision.target) if decision is not None else live
        assert live["small"] <= most
    assert live["small"] == most


def test_what_the_window_did_not_need_leaves_one_type_at_a_time() -> None:
    item = fleet()
    item.begin((12.0,))
    live = {"small": 2, "big": 1}
    driven(item, [12.0] * 1200, live)
    assert live == {"small": 2, "big": 1}
    before = dict(live)
    idle = driven(item, [0.5] * 900, live, 1200)
    assert idle[0][0] >= 1500
    for _, decision in idle:
        assert decision.cause in (Cause.IDLE, Cause.SWITCH)
        assert sum(decision.target[key] != before[key] for key in before) == 1
        before = dict(decision.target)
    assert live == {"small": 1, "big": 0}


@pytest.mark.parametrize(
    ("rate", "causes", "end"),
    [
        (8.0, [Cause.IDLE], {"large": 1}),
        (12.0, [Cause.SWITCH, Cause.IDLE], {"large": 1, "small": 1}),
    ],
)
def test_nothing_is_started_for_a_load_that_only_the_window_remembers(
    rate: float, causes: list[Cause], end: dict[str, int]
) -> None:
    """Twelve per second cost less on a large and a small one than on two large ones; eight do not."""
    large, small = Column("large", "large", 6.0, (10.0,)), Column("small", "small", 2.5, (2.0,))
    item = fleet(large)
    live = item.begin((12.0,))
    assert driven(item, [12.0] * 900 + [rate] * 60, live) == []
    item.adopt((large, small), item.limits, item.settings, (1.0,))
    found = driven(item, [rate] * 900, live, 960)
    assert ([decision.cause for _, decision in found], live) == (causes, end)


@pytest.mark.parametrize(("price", "end"), [(5.9, {"dear": 1}), (2.0, {"other": 1, "dear": 0})])
def test_what_is_not_needed_leaves_although_a_cheaper_type_has_no_replica(
    price: float, end: dict[str, int]
) -> None:
    """The operator names only the pools that have replicas or shall have some."""
    item = fleet(Column("other", "other", price, (10.0,)), Column("dear", "dear", 6.0, (10.0,)))
    live = {"dear": 3}
    driven(item, [9.0] * 3600, live)
    assert {key: live.get(key, 0) for key in end} == end
    assert sum(live.values()) == 1


def test_what_may_still_start_does_not_leave_although_less_is_enough_by_new_speeds() -> None:
    item = fleet(SMALL)
    item.begin((3.0,))
    live = {"small": 3}
    driven(item, [3.0] * 900 + [6.0] * 20, live)
    assert live["small"] >= 6
    faster = Column("small", "small", 1.0, (4.0,))
    item.adopt([faster], item.limits, item.settings, (1.0,))
    changes = driven(item, [6.0] * 1200, live, 920)
    assert changes
    assert min(second for second, _ in changes) >= 901 + item.settings.forecast.horizon_s
    assert live["small"] == 2


def test_nothing_leaves_before_its_successor_is_ready() -> None:
    item = fleet()
    item.begin((3.0,))
    ready = {"small": 0, "big": 1}
    for second in range(1, 1500):
        decision = item.decide(Observation(float(second), (3.0,), 0, ready, {"small": 3}))
        assert decision is None or decision.target["big"] == 1


def test_a_growing_load_moves_to_the_type_that_is_cheaper_for_it() -> None:
    """Ten small ones cost 10, one big one 6: the whole is chosen anew, and the small ones leave afterwards."""
    item = fleet()
    live = item.begin((3.0,))
    driven(item, [3.0 + t / 100 for t in range(600)] + [9.0] * 1200, live)
    assert live == {"small": 0, "big": 1}


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"stock": {"small": 3, "big": 1}}, {"small": 3, "big": 1}),
        ({"quota": 2}, {"small": 2, "big": 2}),
        ({"budget_per_h": 7.0}, {"small": 7, "big": 1}),
    ],
)
def test_limits_hold_in_every_decision(limits: dict[str, object], most: dict[str, int]) -> None:
    item = fleet(**limits)
    live = item.begin((2.0,))
    found = driven(item, [2.0] * 100 + [40.0] * 400 + [5.0] * 800, live)
    assert found
    for _, decision in found:
        assert all(decision.target[key] <= most[key] for key in most)
        if "quota" in limits:
            assert sum(decision.target.values()) <= 2
        if "budget_per_h" in limits:
            assert decision.target["small"] + 6 * decision.target["big"] <= 7


def test_the_first_request_wakes_an_empty_fleet() -> None:
    decision = fleet().decide(seen(1.0, 0.1, {}))
    assert decision is not None
    assert decision.target == {"small": 1, "big": 0}


def test_a_window_shorter_than_a_start_is_refused() -> None:
    assert FleetSettings(start_s=300, down_after_s=300).start_s == 300
    with pytest.raises(ServingModelError, match="shorter than a start"):
        FleetSettings(start_s=301, down_after_s=300)
    with pytest.raises(ServingModelError, match="start time"):
        FleetSettings(start_s=-1)


def test_whoever_takes_over_running_replicas_lets_none_leave_before_a_window_has_passed() -> None:
    item = Fleet((SMALL, BIG), Limits(), Slo(), FleetSettings(), rest_until_s=300.0)
    item.adopt(item.columns, item.limits, item.settings, (1.0,))
    live = {"small": 3, "big": 0}
    idle = driven(item, [0.0] * 900, live)
    assert idle[0][0] >= 300
    assert live == {"small": 0, "big": 0}


def test_a_gap_in_the_observations_is_one_observation_and_not_many() -> None:
    item = fleet()
    live = item.begin((3.0,))
    driven(item, [3.0] * 60, live)
    for second in range(660, 669):
        item.decide(seen(float(second), 9.0, {"small": 9}))
    assert item.forecast.forecast(669.0).now < 4.0, "one bin of nine per second, not a minute of them"


def test_adopted_columns_and_limits_decide_from_then_on_and_a_full_fleet_is_asked_again() -> None:
    item = fleet(SMALL, stock={"small": 2})
    live = {"small": 2}
    assert item.decide(seen(1.0, 8.0, live)) is None, "there is nothing to add"
    item.adopt((SMALL, BIG), Limits(), item.settings, (1.0,))
    decision = item.decide(seen(2.0, 8.0, live))
    assert decision is not None
    assert decision.target["big"] == 1


def test_capacity_is_the_rate_at_which_the_fullest_column_is_full() -> None:
    both = Column("both", "both", 1.0, (4.0, 2.0))
    short = Column("short", "short", 1.0, (8.0, 0.0))
    assert capacity((both,), (1.0, 0.0), {"both": 3}) == pytest.approx(12.0)
    assert capacity((both,), (0.5, 0.5), {"both": 3}) == pytest.approx(8.0)
    assert capacity((both, short), (0.5, 0.5), {"both": 1, "short": 1}) == pytest.approx(4.0)
    assert capacity((both,), (0.5, 0.5), {}) == 0.0


def test_the_kind_of_limit_that_keeps_an_addition_small_is_told_until_the_load_fits() -> None:
    row = Row("the quota", {"small": 1.0, "big": 1.0}, 3.0, LimitKind.QUOTA)
    item = fleet(SMALL, rows=(row,))
    live = item.begin((2.0,))
    driven(item, [8.0] * 60, live)
    assert live == {"small": 3}
    assert (item.limited, item.wanted_rps >= 8.0) == (LimitKind.QUOTA, True)
    driven(item, [1.0] * 600, live, 60)
    assert item.limited is None


def test_replicas_in_one_failure_domain_are_joined_by_one_in_another_or_make_room_for_it() -> None:
    near = Column("near", "near", 1.0, (1.0,), failure_domain="a")
    far = Column("far", "far", 3.0, (1.0,), failure_domain="b")
    for most, after in ((9, {"near": 3, "far": 1}), (3, {"near": 2, "far": 1})):
        item = fleet(near, far, min_domains=2, quota=most)
        live = {"near": 3, "far": 0}
        [(_, first), *_] = driven(item, [2.0] * 60, live)
        assert (first.cause, first.target) == (Cause.DOMAINS, after)
        driven(item, [2.0] * 700, live, 60)
        assert live["far"] >= 1, "the last one of a domain does not leave"


def test_what_is_added_in_a_panic_counts_as_late_and_for_a_day() -> None:
    item = fleet(SMALL)
    live = item.begin((3.0,))
    assert item.late_share == 1.0, "nothing is known"
    for second in range(1, 1200):
        decision = item.decide(seen(float(second), 3.0 + second / 100, dict(live)))
        live = dict(decision.target) if decision is not None else live
    assert item.late_share < 0.25, "a ramp is foreseen"
    before = item.late_share
    assert panics(item, 1200.0, 60.0, live) > 0
    assert item.late_share > before
    driven(item, [60.0] * 3, live, 1200 + 86_400)
    driven(item, [200.0] * 20, live, 1300 + 86_400)
    assert item.late_share == 1.0, "what was added a day ago is forgotten"
