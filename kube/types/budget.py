"""Budgets of a Tenant: limits per period, and what is used of them."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import SpecModel, StatusModel
from busbar.kube.types.rules import Rule
from busbar.kube.types.training_status import Amount

LIMITED = ("accelerator_hours", "cost", "kilowatt_hours")
"""What a budget limits: the fields of Budget and BudgetUse."""


class Period(StrEnum):
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


def period_start(period: Period, now: datetime) -> datetime:
    """When the present period began, in UTC."""
    day = datetime(now.year, now.month, now.day, tzinfo=UTC)
    if period is Period.WEEK:
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if period is Period.MONTH else day


def period_end(period: Period, now: datetime) -> datetime:
    """When the next period begins, in UTC."""
    start = period_start(period, now)
    if period is Period.MONTH:
        return (start + timedelta(days=31)).replace(day=1)
    return start + timedelta(days=7 if period is Period.WEEK else 1)


class Enforcement(StrEnum):
    """What happens when a budget is spent."""

    WARN = "Warn"
    STOP_ADMITTING = "StopAdmitting"
    PREEMPT = "Preempt"


class BudgetState(StrEnum):
    """How a budget stands."""

    WITHIN = "Within"
    WARNING = "Warning"
    SPENT = "Spent"


class Budget(SpecModel):
    """A limit per period; at least one of the three."""

    rules = (
        Rule(
            cel="has(self.acceleratorHours) || has(self.cost) || has(self.kilowattHours)",
            message="a budget needs at least one of acceleratorHours, cost and kilowattHours",
            holds=lambda budget: (
                budget.accelerator_hours is not None
                or budget.cost is not None
                or budget.kilowatt_hours is not None
            ),
        ),
    )

    period: Period = Field(description="day, week (from Monday) or month, in UTC.")
    accelerator_hours: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Accelerator-hours."
    )
    cost: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Money, at the pools' prices."
    )
    kilowatt_hours: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Energy of the tenant's pods, where nodes report what they draw."
    )
    enforcement: Enforcement = Field(
        default=Enforcement.WARN,
        description="When a limit is reached. Warn: a condition and an event. StopAdmitting: besides, nothing more of the "
        "tenant is started before the next period, except for services that have fewer than minReplicas. "
        "Preempt: besides, running jobs save their state and wait, except for those with preemptible: false, and all "
        "replicas of services finish their requests and leave, until the next period.",
    )
    warn_at_percent: Annotated[float, Field(gt=0, le=100)] = Field(
        default=80.0, description="At so many per cent of a limit there is a warning."
    )


class Pace(StatusModel):
    """What was used per hour of late."""

    hours: Amount = Field(default=0.0, description="So much time is known.")
    mean: Amount = Field(default=0.0, description="Per hour, of the last day in the main.")
    variance: Amount = Field(default=0.0, description="Of what is used per hour.")


class BudgetPace(StatusModel):
    """Paces of what the budget limits."""

    accelerator_hours: Pace | None = Field(default=None, description="Of accelerator-hours.")
    cost: Pace | None = Field(default=None, description="Of money.")
    kilowatt_hours: Pace | None = Field(default=None, description="Of energy.")


class BudgetUse(StatusModel):
    """Use in the current period."""

    period: Period = Field(description="Which period.")
    started: datetime = Field(description="When it began.")
    ends: datetime | None = Field(default=None, description="When the next one begins.")
    accelerator_hours: Amount = Field(default=0.0, description="Accelerator-hours used.")
    cost: Amount = Field(default=0.0, description="Money used.")
    kilowatt_hours: Amount = Field(default=0.0, description="Energy used.")
    used_percent: Amount | None = Field(
        default=None,
        description="Use of the limit that is closest to exhaustion, in per cent; above 100 it is exceeded.",
    )
    accelerator_hours_left: Amount | None = Field(default=None, description="Accelerator-hours left.")
    cost_left: Amount | None = Field(default=None, description="Money left.")
    kilowatt_hours_left: Amount | None = Field(default=None, description="Energy left.")
    state: BudgetState | None = Field(
        default=None, description="Within, Warning (warnAtPercent is reached) or Spent (a limit is reached)."
    )
    exhausted: datetime | None = Field(
        default=None,
        description="When the first limit is reached at the present rate; absent: not in this period, or it is reached.",
    )
    exhausted_p50: datetime | None = Field(
        default=None,
        description="By then a limit is reached with a probability of one half, by what was used per hour of late; absent: "
        "not in this period, it is reached, or less than an hour is known.",
    )
    exhausted_p90: datetime | None = Field(
        default=None, description="The same with a probability of 90 per cent."
    )
    pace: BudgetPace | None = Field(default=None, description="What was used per hour of late.")


def used_ratios(budgets: Iterable[Budget], uses: Iterable[BudgetUse]) -> dict[str, float]:
    """By what is limited, as manifests call it: the part of the limit that is used, in the period in which it is most."""
    used = {use.period: use for use in uses}
    found: dict[str, float] = {}
    for budget in budgets:
        use = used.get(budget.period)
        for name in LIMITED:
            limit = getattr(budget, name)
            if use is None or limit is None:
                continue
            ratio = float(getattr(use, name)) / limit if limit else 1.0
            alias = Budget.model_fields[name].alias or name
            found[alias] = max(found.get(alias, 0.0), ratio)
    return found
