"""What tenants use of inference, as the gateway counts it: the status, and events when a budget is spent. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from busbar.kube.contracts.allowances import NANO
from busbar.kube.contracts.demand import AccountUse
from busbar.kube.types.budget import BudgetState, Period
from busbar.kube.types.inference import CostUse, InferenceLimits, InferenceUse
from busbar.operator.accounting.budgets import REASONS

WARN_AT = 0.8


def use_of(
    limits: InferenceLimits | None, told: AccountUse | None, before: InferenceUse | None, now: datetime
) -> InferenceUse | None:
    """The status; what it said before where the gateway tells nothing."""
    if limits is None:
        return None
    if told is None:
        return before
    return InferenceUse(
        requests_last_minute=told.requests if limits.requests_per_minute is not None else None,
        tokens_last_minute=told.tokens if limits.tokens_per_minute is not None else None,
        budgets=[
            CostUse(
                period=Period(cost.period),
                started=cost.started,
                ends=cost.ends,
                cost=cost.spent_nano / NANO,
                cost_left=max(0, cost.limit_nano - cost.spent_nano) / NANO,
                state=_state(cost.spent_nano, cost.limit_nano),
            )
            for cost in told.costs
            if cost.period in set(Period)
        ]
        or None,
        as_of=now,
    )


def states(use: InferenceUse | None) -> list[tuple[object, ...]]:
    """What is written at once when it changes."""
    return [(cost.period, cost.started, cost.state) for cost in (use.budgets if use else None) or ()]


def changes(old: InferenceUse | None, new: InferenceUse | None) -> list[tuple[str, str]]:
    """Reason and message of an event for each budget that is in another state than before."""
    before = {cost.period: cost.state for cost in (old.budgets if old else None) or ()}
    return [
        (REASONS[cost.state], sentence(cost))
        for cost in (new.budgets if new else None) or ()
        if cost.state is not before.get(cost.period, BudgetState.WITHIN)
    ]


def sentence(cost: CostUse) -> str:
    """`Inference cost 18.2 of 20 this month.`"""
    text = f"Inference cost {cost.cost:.4g} of {cost.cost + cost.cost_left:.4g} this {cost.period}"
    if cost.state is BudgetState.SPENT:
        return f"{text}: requests are refused until {cost.ends:%Y-%m-%d} at {cost.ends:%H:%M} UTC."
    return f"{text}."


def same(first: InferenceUse | None, second: InferenceUse | None) -> bool:
    """Whether two statuses differ in nothing but their time."""
    return _values(first) == _values(second)


def _values(use: InferenceUse | None) -> Sequence[object]:
    return () if use is None else (use.requests_last_minute, use.tokens_last_minute, tuple(use.budgets or ()))


def _state(spent: int, limit: int) -> BudgetState:
    if spent >= limit:
        return BudgetState.SPENT
    return BudgetState.WARNING if spent >= WARN_AT * limit else BudgetState.WITHIN
