"""Budgets of tenants: what is used in the present periods, what is left, and whether anything more is admitted. Pure.

Use is counted in `Tenant.status.budgets`, with each write of the status. A limit is compared with it whenever a plan is
made, so a limit that is changed, or a period that begins, counts in the next round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import itemgetter

from busbar.kube.types import Condition, ConditionStatus, Tenant
from busbar.kube.types.budget import (
    LIMITED,
    Budget,
    BudgetPace,
    BudgetState,
    BudgetUse,
    Enforcement,
    Pace,
    period_end,
    period_start,
)
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.kube.types.tenant import TenantStatus
from busbar.operator.accounting.pace import noted, spent_after_h
from busbar.scheduler.explain.service_room import BudgetLeft, Spent

FULL = 100.0
NEVER_MEASURED_H = 0.1
"""Accelerator-hours after which a tenant without any joule is one whose energy nobody measures."""
DONE = {False: "nothing more is started", True: "nothing is started, and what ran is stopped"}
REASONS = {
    BudgetState.WITHIN: Reason.WITHIN_BUDGET,
    BudgetState.WARNING: Reason.BUDGET_WARNING,
    BudgetState.SPENT: Reason.BUDGET_SPENT,
}


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amounts of what budgets limit: used, or used per hour."""

    accelerator_hours: float = 0.0
    cost: float = 0.0
    kilowatt_hours: float = 0.0


@dataclass(frozen=True, slots=True)
class Hold:
    """What a spent budget does to its tenant's work."""

    why: str = ""
    """Until when, and who can change it; empty: it does nothing."""
    stops: bool = False
    """Whether what runs is stopped as well, and not only nothing more started."""


FREE = Hold()


@dataclass(frozen=True, slots=True)
class _Line:
    """One limit."""

    unit: str
    """After the number; with a blank."""
    limit: float
    used: float
    per_hour: float = 0.0
    pace: Pace | None = None

    @property
    def left(self) -> float:
        return max(0.0, self.limit - self.used)

    @property
    def percent(self) -> float:
        return FULL if self.limit == 0 else FULL * self.used / self.limit

    def of(self) -> str:
        return f"{self.used:.4g} of {self.limit:g}{self.unit}"


def counted(
    budgets: Iterable[Budget],
    old: TenantStatus,
    used: Amounts,
    per_hour: Amounts,
    since: datetime,
    now: datetime,
    charged: Amounts | None = None,
) -> list[BudgetUse] | None:
    """The next status of each budget.

    Args:
        used: since the last write of the status, at `since`; the part of it before a period is not counted in it.
        per_hour: what is used now.
        charged: what other tenants' lost work adds, and what is taken off because others are charged for it; the use of a
            period is never below zero, and no pace counts it.
    """
    before = {use.period: use for use in old.budgets or ()}
    moved = charged or Amounts()
    return [_counted(b, before.get(b.period), used, per_hour, since, now, moved) for b in budgets] or None


def hold(tenant: Tenant, now: datetime) -> Hold:
    """What the tenant's budgets do to its work now: the strictest of those that are spent.

    The sentence does not change while the limit does not: it is in the status of every waiting job.
    """
    uses = {use.period: use for use in (tenant.status.budgets if tenant.status is not None else None) or ()}
    found = []
    for budget in tenant.spec.budgets or ():
        if budget.enforcement is Enforcement.WARN:
            continue
        stops = budget.enforcement is Enforcement.PREEMPT
        for line in _lines(budget, _present(budget, uses.get(budget.period), now)):
            if line.percent >= FULL:
                found.append((stops, period_end(budget.period, now), line, budget.period))
    if not found:
        return FREE
    stops, end, line, period = max(found, key=itemgetter(0, 1))
    return Hold(
        f"Nothing is left of the tenant's budget of {line.limit:g}{line.unit} a {period}: {DONE[stops]} until "
        f"{_moment(end)}, unless an administrator of the platform raises the Tenant's spec.budgets.",
        stops,
    )


def budgets_left(tenant: Tenant, now: datetime) -> tuple[BudgetLeft, ...]:
    """What is left of each limit that is enforced. Energy that nobody measures limits nothing."""
    uses = {use.period: use for use in (tenant.status.budgets if tenant.status is not None else None) or ()}
    found = []
    for budget in tenant.spec.budgets or ():
        if budget.enforcement is Enforcement.WARN:
            continue
        use = _present(budget, uses.get(budget.period), now)
        hours = (period_end(budget.period, now) - now) / timedelta(hours=1)
        for line in _lines(budget, use):
            if line.unit != ENERGY or not _unmeasured(budget, use):
                found.append(BudgetLeft(str(budget.period), SPENT[line.unit], line.left, hours))
    return tuple(found)


def condition(
    budgets: Sequence[Budget],
    uses: Sequence[BudgetUse],
    old: Condition | None,
    generation: int,
    now: datetime,
) -> Condition | None:
    """WithinBudget of a tenant; None without budgets. Warnings are True: nothing is over yet."""
    status, reason, message = _told(budgets, uses)
    if not message:
        return None
    return Condition(
        type=ConditionType.WITHIN_BUDGET,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=old.last_transition_time
        if old is not None and old.status is status and old.last_transition_time
        else now.replace(microsecond=0),
        observed_generation=generation,
    )


def changes(budgets: Sequence[Budget], old: TenantStatus, new: Sequence[BudgetUse]) -> list[tuple[str, str]]:
    """Reason and message of an event for each budget that is in another state than before."""
    before = {use.period: use.state for use in old.budgets or ()}
    limits = {budget.period: budget for budget in budgets}
    return [
        (REASONS[use.state], sentence(limits[use.period], use))
        for use in new
        if use.state is not None and use.state is not (before.get(use.period) or BudgetState.WITHIN)
    ]


def sentence(budget: Budget, use: BudgetUse) -> str:
    """`48.2 of 50 kWh used this month; at the present rate it is spent on 2026-11-27 at 14:00 UTC.`"""
    lines = _lines(budget, use)
    if not lines:
        return ""
    worst = max(lines, key=lambda line: line.percent)
    text = f"{worst.of()} used this {budget.period}"
    end = use.ends or period_end(budget.period, use.started)
    if use.state is BudgetState.SPENT:
        warns = budget.enforcement is Enforcement.WARN
        what = "only a warning is given" if warns else DONE[budget.enforcement is Enforcement.PREEMPT]
        return f"{text}: {what} until {_moment(end)}."
    if use.exhausted is not None:
        rate = f"at the present rate it is spent on {_moment(use.exhausted)}"
    else:
        rate = f"at the present rate it lasts until {_moment(end)}"
    return f"{text}; {rate}{_probably(use)}."


def _probably(use: BudgetUse) -> str:
    """By the rates of the last day; empty where these do not spend it."""
    if use.exhausted_p50 is None:
        return ""
    text = f", at that of the last day probably on {_moment(use.exhausted_p50)}"
    return text + (f", and by {_moment(use.exhausted_p90)} with 90 %" if use.exhausted_p90 else "")


def _counted(
    budget: Budget,
    old: BudgetUse | None,
    used: Amounts,
    per_hour: Amounts,
    since: datetime,
    now: datetime,
    charged: Amounts,
) -> BudgetUse:
    use = _present(budget, old, now)
    part = _part_within(use.started, since, now)
    hours = use.accelerator_hours + part * used.accelerator_hours + charged.accelerator_hours
    use = use.model_copy(
        update={
            "accelerator_hours": round(max(0.0, hours), 6),
            "cost": round(max(0.0, use.cost + part * used.cost + charged.cost), 6),
            "kilowatt_hours": round(use.kilowatt_hours + part * used.kilowatt_hours, 9),
        }
    )
    pace = _paced(budget, old, used, (now - since) / timedelta(hours=1))
    lines = _lines(budget, use, per_hour, pace)
    percent = max((line.percent for line in lines), default=None)
    end = period_end(budget.period, now)
    p50, p90 = (_spent_with(lines, probability, end, now) for probability in (0.5, 0.9))
    left = {line.unit: round(line.left, 6) for line in lines}
    return use.model_copy(
        update={
            "ends": end,
            "accelerator_hours_left": left.get(HOURS),
            "cost_left": left.get(MONEY),
            "kilowatt_hours_left": left.get(ENERGY),
            "used_percent": None if percent is None else round(percent, 2),
            "state": None if percent is None else _state(budget, percent),
            "exhausted": _exhausted(lines, end, now),
            "exhausted_p50": p50,
            "exhausted_p90": p90,
            "pace": pace,
        }
    )


HOURS, MONEY, ENERGY = " accelerator-hours", " in cost", " kWh"
SPENT = {HOURS: Spent.ACCELERATOR_HOURS, MONEY: Spent.COST, ENERGY: Spent.KILOWATT_HOURS}


def _lines(
    budget: Budget, use: BudgetUse, per_hour: Amounts | None = None, pace: BudgetPace | None = None
) -> list[_Line]:
    rate, paces = per_hour or Amounts(), pace or BudgetPace()
    every = (
        (HOURS, "accelerator_hours", budget.accelerator_hours),
        (MONEY, "cost", budget.cost),
        (ENERGY, "kilowatt_hours", budget.kilowatt_hours),
    )
    return [
        _Line(unit, limit, getattr(use, name), getattr(rate, name), getattr(paces, name))
        for unit, name, limit in every
        if limit is not None
    ]


def _paced(budget: Budget, old: BudgetUse | None, used: Amounts, hours: float) -> BudgetPace:
    """The paces with this use; they go on over the ends of periods."""
    before = (old.pace if old is not None else None) or BudgetPace()
    return BudgetPace.model_validate(
        {
            name: noted(getattr(before, name), getattr(used, name) / hours if hours > 0 else 0.0, hours)
            for name in LIMITED
            if getattr(budget, name) is not None
        }
    )


def _present(budget: Budget, use: BudgetUse | None, now: datetime) -> BudgetUse:
    """What the status says of the present period; nothing where it is about an earlier one."""
    started = period_start(budget.period, now)
    if use is None or use.started != started:
        return BudgetUse(period=budget.period, started=started)
    return use


def _part_within(start: datetime, since: datetime, now: datetime) -> float:
    """The part of the time from `since` to `now` that is after `start`."""
    if since >= start or now <= since:
        return 1.0
    return (now - start) / (now - since)


def _state(budget: Budget, percent: float) -> BudgetState:
    if percent >= FULL:
        return BudgetState.SPENT
    return BudgetState.WARNING if percent >= budget.warn_at_percent else BudgetState.WITHIN


def _exhausted(lines: Iterable[_Line], end: datetime, now: datetime) -> datetime | None:
    """When the first limit is reached at the present rate; None: not in this period, or it is reached already."""
    if any(line.percent >= FULL for line in lines):
        return None
    hours = min((line.left / line.per_hour for line in lines if line.per_hour > 0), default=float("inf"))
    if hours >= (end - now) / timedelta(hours=1):
        return None
    return (now + timedelta(hours=hours)).replace(microsecond=0)


def _spent_with(lines: Sequence[_Line], probability: float, end: datetime, now: datetime) -> datetime | None:
    """When the first limit is reached with this probability; None as of `_exhausted`."""
    if any(line.percent >= FULL for line in lines):
        return None
    hours = min((spent_after_h(line.pace, line.left, probability) for line in lines), default=float("inf"))
    if hours >= (end - now) / timedelta(hours=1):
        return None
    return (now + timedelta(hours=hours)).replace(microsecond=0)


def _told(budgets: Sequence[Budget], uses: Sequence[BudgetUse]) -> tuple[ConditionStatus, str, str]:
    limits = {budget.period: budget for budget in budgets}
    known = [use for use in uses if use.period in limits and use.used_percent is not None]
    if not known:
        return ConditionStatus.TRUE, Reason.WITHIN_BUDGET, ""
    worst = max(known, key=lambda use: use.used_percent or 0.0)
    state = worst.state or BudgetState.WITHIN
    if state is not BudgetState.SPENT and any(_unmeasured(limits[use.period], use) for use in known):
        text = "No node reports what the tenant's pods draw, so its limit of energy counts nothing."
        return ConditionStatus.UNKNOWN, Reason.NOT_MEASURED, text
    status = ConditionStatus.FALSE if state is BudgetState.SPENT else ConditionStatus.TRUE
    return status, REASONS[state], sentence(limits[worst.period], worst)


def _unmeasured(budget: Budget, use: BudgetUse) -> bool:
    return (
        budget.kilowatt_hours is not None
        and use.kilowatt_hours == 0
        and use.accelerator_hours > NEVER_MEASURED_H
    )


def _moment(when: datetime) -> str:
    return f"{when:%Y-%m-%d} at {when:%H:%M} UTC"
