"""What a Tenant's status says of its inference, and the events when its budgets change their state."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.operator.builders import NOW, tenant
from tests.operator.tenancy.test_reconcile import view

from busbar.kube.contracts.allowances import NANO, CostAllowance
from busbar.kube.contracts.demand import AccountUse
from busbar.kube.types import Tenant
from busbar.operator.tenancy.reconcile import TenantUpdate, reconcile

MONTH = {"budgets": [{"period": "month", "cost": 20}], "tokensPerMinute": 1000}


def told(cost: float, tokens: int = 0) -> AccountUse:
    spent = CostAllowance(
        period="month",
        started=NOW.replace(day=1),
        ends=NOW + timedelta(days=9),
        limit_nano=20 * NANO,
        spent_nano=round(cost * NANO),
    )
    return AccountUse(tenant="ada", requests=3, tokens=tokens, costs=[spent])


def step(of: Tenant, use: AccountUse | None, seconds: float = 0) -> tuple[TenantUpdate, Tenant]:
    update = reconcile(view(of, inference=use, now=NOW + timedelta(seconds=seconds)))
    return update, of.model_copy(update={"status": update.status or of.status})


def limited(**inference: Any) -> Tenant:
    return tenant("ada", ["ns"], inference=inference)


def test_the_status_says_what_the_gateway_counts() -> None:
    update, _ = step(limited(**MONTH), told(5, tokens=70))
    assert update.status is not None
    use = update.status.inference
    assert use is not None
    assert (use.requests_last_minute, use.tokens_last_minute) == (None, 70), "only what is limited"
    assert use.budgets is not None
    (cost,) = use.budgets
    assert (cost.cost, cost.cost_left, cost.state) == (5.0, 15.0, "Within")
    assert update.notices == ()


def test_a_budget_that_is_spent_is_told_at_once_and_once() -> None:
    _, of = step(limited(**MONTH), told(5))
    near, of = step(of, told(16), seconds=1)
    assert [reason for reason, _ in near.notices] == ["BudgetWarning"]
    spent, of = step(of, told(20), seconds=2)
    assert [reason for reason, _ in spent.notices] == ["BudgetSpent"]
    assert "requests are refused until" in spent.notices[0][1]
    still, _ = step(of, told(20), seconds=3)
    assert still.status is None


def test_small_changes_are_written_with_the_period_of_use(tmp_path: object) -> None:
    _, of = step(limited(**MONTH), told(5))
    early, _ = step(of, told(6), seconds=10)
    late, _ = step(of, told(6), seconds=61)
    assert early.status is None
    assert late.status is not None


def test_a_gateway_that_is_away_changes_nothing_and_a_limit_that_is_gone_leaves_nothing() -> None:
    _, of = step(limited(**MONTH), told(5))
    kept, _ = step(of, None, seconds=100)
    assert kept.status is None
    free = of.model_copy(update={"spec": tenant("ada", ["ns"]).spec})
    gone, _ = step(free, None, seconds=100)
    assert gone.status is not None
    assert gone.status.inference is None
