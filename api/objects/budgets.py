"""Budgets of tenants, a line for each limit. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from busbar.kube.types import Tenant
from busbar.kube.types.budget import BudgetUse
from busbar.kube.types.inference import InferenceUse

RESOURCES = (
    ("accelerator-hours", "accelerator_hours"),
    ("cost", "cost"),
    ("kWh", "kilowatt_hours"),
)


@dataclass(frozen=True)
class BudgetLine:
    """What is used and left of one limit."""

    tenant: str
    period: str
    resource: str
    used: float
    left: float
    state: str
    exhausted: datetime | None
    """When the budget's first limit is reached at the present rate."""
    ends: datetime | None
    p50: datetime | None = None
    """When it is reached with a probability of one half, by the rates of the last day."""
    p90: datetime | None = None

    @property
    def percent(self) -> float:
        limit = self.used + self.left
        return 100 * self.used / limit if limit else 100.0


def budget_lines(tenants: Iterable[Tenant]) -> list[BudgetLine]:
    """The lines of these tenants, as far as their statuses have counted."""
    return [
        line
        for tenant in tenants
        if tenant.status is not None
        for line in (
            *(one for use in tenant.status.budgets or () for one in _lines(tenant.metadata.name, use)),
            *_inference_lines(tenant.metadata.name, tenant.status.inference),
        )
    ]


def _inference_lines(tenant: str, use: InferenceUse | None) -> list[BudgetLine]:
    return [
        BudgetLine(tenant, c.period.value, "inference cost", c.cost, c.cost_left, c.state.value, None, c.ends)
        for c in (use.budgets if use is not None else None) or ()
    ]


def _lines(tenant: str, use: BudgetUse) -> list[BudgetLine]:
    state = use.state.value if use.state is not None else ""
    return [
        BudgetLine(
            tenant,
            use.period.value,
            title,
            getattr(use, name),
            left,
            state,
            use.exhausted,
            use.ends,
            use.exhausted_p50,
            use.exhausted_p90,
        )
        for title, name in RESOURCES
        if (left := getattr(use, f"{name}_left")) is not None
    ]
