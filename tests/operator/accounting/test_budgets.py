"""Budgets: periods, what is left, states, forecasts, and when nothing more is admitted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.builders import NOW, tenant

from busbar.kube.types import ConditionStatus, Tenant
from busbar.kube.types.budget import (
    Budget,
    BudgetState,
    BudgetUse,
    Period,
    period_end,
    period_start,
    used_ratios,
)
from busbar.kube.types.tenant import TenantStatus
from busbar.operator.accounting.budgets import (
    FREE,
    Amounts,
    budgets_left,
    changes,
    condition,
    counted,
    hold,
    sentence,
)
from busbar.scheduler.explain.service_room import BudgetLeft, Spent

HOUR = timedelta(hours=1)


def of(*budgets: dict[str, Any], **used: float) -> Tenant:
    """A tenant with these budgets, and so much used in the present periods."""
    made = tenant("a", ["ns"], budgets=list(budgets))
    uses = [
        BudgetUse(period=b.period, started=period_start(b.period, NOW), **used)
        for b in made.spec.budgets or ()
    ]
    return made.model_copy(update={"status": TenantStatus(budgets=uses)})


def counted_of(
    made: Tenant,
    used: Amounts | None = None,
    per_hour: Amounts | None = None,
    since: datetime | None = None,
    now: datetime = NOW,
) -> BudgetUse:
    [use] = (
        counted(
            made.spec.budgets or (),
            made.status or TenantStatus(),
            used or Amounts(),
            per_hour or Amounts(),
            since or now,
            now,
        )
        or []
    )
    return use


@pytest.mark.parametrize(
    ("period", "start", "end"),
    [(Period.DAY, (11, 21), (11, 22)), (Period.WEEK, (11, 16), (11, 23)), (Period.MONTH, (11, 1), (12, 1))],
)
def test_periods_begin_in_utc(period: Period, start: tuple[int, int], end: tuple[int, int]) -> None:
    assert period_start(period, NOW) == datetime(2026, *start, tzinfo=UTC)
    assert period_end(period, NOW) == datetime(2026, *end, tzinfo=UTC)


def test_the_end_of_every_period_is_the_beginning_of_the_next() -> None:
    for day in range(800):
        now = datetime(2027, 1, 1, 23, 59, 59, tzinfo=UTC) + timedelta(days=day)
        for period in Period:
            end = period_end(period, now)
            assert period_start(period, now) <= now < end
            assert period_start(period, end) == end
            assert period_start(period, end - timedelta(seconds=1)) == period_start(period, now)


def test_what_is_left_and_when_it_will_be_gone() -> None:
    made = of({"period": "month", "kilowattHours": 50, "cost": 1000}, kilowatt_hours=38.0, cost=100.0)
    use = counted_of(
        made, Amounts(cost=1.0, kilowatt_hours=0.2), Amounts(cost=1.0, kilowatt_hours=0.1), NOW - HOUR
    )
    assert (use.kilowatt_hours, use.kilowatt_hours_left) == (38.2, 11.8)
    assert (use.cost_left, use.accelerator_hours_left) == (899.0, None)
    assert (use.used_percent, use.state) == (76.4, BudgetState.WITHIN)
    assert use.exhausted == NOW + 118 * HOUR
    assert use.ends == datetime(2026, 12, 1, tzinfo=UTC)
    budget = (made.spec.budgets or [])[0]
    assert sentence(budget, use) == (
        "38.2 of 50 kWh used this month; at the present rate it is spent on 2026-11-26 at 10:00 UTC, at that of the last "
        "day probably on 2026-11-23 at 23:00 UTC, and by 2026-11-23 at 23:00 UTC with 90 %."
    )
    new = use.model_copy(update={"exhausted_p50": None, "exhausted_p90": None})
    assert sentence(budget, new).endswith("at the present rate it is spent on 2026-11-26 at 10:00 UTC.")
    slow = counted_of(made, per_hour=Amounts(kilowatt_hours=0.01))
    assert slow.exhausted is None
    assert sentence(budget, slow).endswith("it lasts until 2026-12-01 at 00:00 UTC.")


def test_rates_of_late_go_on_over_the_ends_of_periods_and_nothing_is_forecast_from_minutes() -> None:
    made = of({"period": "day", "kilowattHours": 50})
    minutes = counted_of(made, Amounts(kilowatt_hours=9.0), since=NOW - HOUR / 4)
    assert (minutes.exhausted_p50, minutes.exhausted_p90) == (None, None)
    later = NOW + timedelta(days=1)
    again = made.model_copy(update={"status": TenantStatus(budgets=[minutes])})
    use = counted_of(again, Amounts(kilowatt_hours=36.0), since=later - HOUR, now=later)
    assert use.pace is not None
    assert use.pace.kilowatt_hours is not None
    assert (use.pace.kilowatt_hours.hours, use.pace.kilowatt_hours.mean) == (1.25, 36.0)
    assert use.exhausted_p50 == later + (50 - use.kilowatt_hours) / 36 * HOUR


def test_a_warning_comes_at_the_percentage_and_the_limit_at_the_limit() -> None:
    budget = {"period": "day", "cost": 10, "warnAtPercent": 90}
    states = [counted_of(of(budget, cost=used)).state for used in (8.99, 9.0, 9.99, 10.0, 11.0)]
    assert [str(state) for state in states] == ["Within", "Warning", "Warning", "Spent", "Spent"]
    assert counted_of(of({"period": "day", "cost": 0})).state is BudgetState.SPENT


def test_another_period_begins_with_nothing_and_takes_only_what_is_its_own() -> None:
    made = of(
        {"period": "day", "acceleratorHours": 10, "enforcement": "StopAdmitting"}, accelerator_hours=10.0
    )
    assert hold(made, NOW).why
    midnight = datetime(2026, 11, 22, tzinfo=UTC)
    assert hold(made, midnight - timedelta(seconds=1)).why
    assert hold(made, midnight) == FREE
    use = counted_of(made, Amounts(accelerator_hours=4.0), since=midnight - 3 * HOUR, now=midnight + HOUR)
    assert (use.started, use.accelerator_hours) == (midnight, 1.0)


def test_only_a_budget_that_is_enforced_stops_anything() -> None:
    for enforcement, stops in (("Warn", False), ("StopAdmitting", True)):
        budget = {"period": "month", "kilowattHours": 50, "enforcement": enforcement}
        assert hold(of(budget, kilowatt_hours=49.999), NOW) == FREE
        text = hold(of(budget, kilowatt_hours=50.1), NOW).why
        assert bool(text) is stops
    assert text == (
        "Nothing is left of the tenant's budget of 50 kWh a month: nothing more is started until 2026-12-01 at 00:00 "
        "UTC, unless an administrator of the platform raises the Tenant's spec.budgets."
    )


def test_of_several_spent_budgets_the_one_that_lasts_longest_is_told() -> None:
    stop = {"enforcement": "StopAdmitting", "cost": 1}
    text = hold(of({"period": "day", **stop}, {"period": "month", **stop}, cost=2.0), NOW).why
    assert "a month" in text


def test_of_several_spent_budgets_the_strictest_counts() -> None:
    stop = {"period": "day", "cost": 1, "enforcement": "Preempt"}
    wait = {"period": "month", "cost": 1, "enforcement": "StopAdmitting"}
    found = hold(of(stop, wait, cost=2.0), NOW)
    assert found.stops
    assert found.why == (
        "Nothing is left of the tenant's budget of 1 in cost a day: nothing is started, and what ran is stopped until "
        "2026-11-22 at 00:00 UTC, unless an administrator of the platform raises the Tenant's spec.budgets."
    )
    assert not hold(of({**stop, "cost": 3}, wait, cost=2.0), NOW).stops
    use = counted_of(of(stop, cost=2.0))
    assert sentence(Budget.model_validate(stop), use).endswith(
        "nothing is started, and what ran is stopped until 2026-11-22 at 00:00 UTC."
    )


def test_a_limit_that_is_changed_counts_at_once() -> None:
    budget = {"period": "month", "cost": 10, "enforcement": "StopAdmitting"}
    made = of(budget, cost=12.0)
    assert hold(made, NOW).why
    raised = tenant("a", ["ns"], budgets=[{**budget, "cost": 20}])
    assert hold(raised.model_copy(update={"status": made.status}), NOW) == FREE
    assert hold(tenant("a", ["ns"], budgets=[budget]), NOW) == FREE, "nothing is known to be used"


def test_the_condition_tells_the_worst_budget_and_keeps_its_time() -> None:
    made = of({"period": "day", "cost": 10}, {"period": "month", "cost": 100}, cost=9.0)
    told = []
    old = None
    for used, minutes in ((0.0, 0), (0.5, 5), (1.5, 10)):
        now = NOW + timedelta(minutes=minutes)
        status = made.status or TenantStatus()
        uses = counted(made.spec.budgets or (), status, Amounts(cost=used), Amounts(), now, now)
        old = condition(made.spec.budgets or (), uses or (), old, 1, now)
        assert old is not None
        told.append((old.status, old.reason, old.last_transition_time))
    assert told == [
        (ConditionStatus.TRUE, "BudgetWarning", NOW),
        (ConditionStatus.TRUE, "BudgetWarning", NOW),
        (ConditionStatus.FALSE, "BudgetSpent", NOW + timedelta(minutes=10)),
    ]
    assert old is not None
    assert "10.5 of 10 in cost used this day: only a warning is given" in (old.message or "")
    assert condition((), (), None, 1, NOW) is None


def test_an_energy_budget_that_nobody_measures_says_so() -> None:
    made = of({"period": "day", "kilowattHours": 10}, accelerator_hours=5.0)
    found = condition(made.spec.budgets or (), [counted_of(made)], None, 1, NOW)
    assert found is not None
    assert (found.status, found.reason) == (ConditionStatus.UNKNOWN, "NotMeasured")


def test_there_is_one_event_for_each_change_of_a_state() -> None:
    made = of({"period": "day", "cost": 10}, cost=9.0)
    use = counted_of(made)
    budgets = made.spec.budgets or ()
    assert [reason for reason, _ in changes(budgets, made.status or TenantStatus(), [use])] == [
        "BudgetWarning"
    ]
    assert changes(budgets, TenantStatus(budgets=[use]), [use]) == []
    over = counted_of(made, Amounts(cost=1.0))
    assert [reason for reason, _ in changes(budgets, TenantStatus(budgets=[use]), [over])] == ["BudgetSpent"]
    assert changes(budgets, TenantStatus(), [counted_of(of({"period": "day", "cost": 10}))]) == []


def test_the_metric_has_the_period_in_which_most_is_used() -> None:
    made = of({"period": "day", "cost": 10}, {"period": "month", "cost": 100, "kilowattHours": 5}, cost=5.0)
    assert made.status is not None
    assert used_ratios(made.spec.budgets or (), made.status.budgets or ()) == {
        "cost": 0.5,
        "kilowattHours": 0.0,
    }


@settings(max_examples=30, derandomize=True)
@given(st.lists(st.floats(0, 100), max_size=20), st.floats(0.001, 1000))
def test_used_and_left_add_up_to_the_limit(steps: list[float], limit: float) -> None:
    made = of({"period": "month", "acceleratorHours": limit})
    for step in steps:
        use = counted_of(made, Amounts(accelerator_hours=step))
        made = made.model_copy(update={"status": TenantStatus(budgets=[use])})
        left = use.accelerator_hours_left or 0.0
        assert left == pytest.approx(max(0.0, limit - use.accelerator_hours), abs=1e-5)
        assert (use.state is BudgetState.SPENT) == (use.accelerator_hours >= limit)
    assert made.status is not None


def test_what_is_left_is_told_of_each_limit_that_is_enforced_until_its_period_ends() -> None:
    stop = {"enforcement": "StopAdmitting"}
    made = of(
        {"period": "day", "cost": 10.0, "kilowattHours": 2.0} | stop,
        {"period": "week", "acceleratorHours": 4.0} | stop,
        {"period": "month", "cost": 50.0},
        cost=4.0, kilowatt_hours=0.5, accelerator_hours=6.0,
    )  # fmt: skip
    assert budgets_left(made, NOW) == (
        BudgetLeft("day", Spent.COST, 6.0, 12.0),
        BudgetLeft("day", Spent.KILOWATT_HOURS, 1.5, 12.0),
        BudgetLeft("week", Spent.ACCELERATOR_HOURS, 0.0, 36.0),
    )
    [money, _, _] = budgets_left(made, NOW + 12 * HOUR)
    assert (money.left, money.hours) == (10.0, 24.0), "a new day"
    assert budgets_left(tenant("a", ["ns"]), NOW) == ()


def test_energy_that_nobody_measures_limits_nothing() -> None:
    budget = {"period": "day", "kilowattHours": 2.0, "enforcement": "Preempt"}
    assert len(budgets_left(of(budget), NOW)) == 1
    assert budgets_left(of(budget, accelerator_hours=1.0), NOW) == ()
