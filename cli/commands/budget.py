"""`busbar budget`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click

from busbar.cli.errors import NotFound
from busbar.cli.output import columns, emit, output_option
from busbar.cli.session import Session, connected

RESOURCES = (
    ("accelerator-hours", "acceleratorHours"),
    ("cost", "cost"),
    ("kWh", "kilowattHours"),
)


@click.command(epilog="\b\nExamples:\n  busbar budget\n  busbar budget research -o json")
@click.argument("tenant", required=False)
@output_option
@connected
def budget(session: Session, tenant: str | None, output: str) -> None:
    """Show what is used and left of the budgets of your tenants, and when they will be spent.

    Budgets are set in the Tenant's spec.budgets and spec.inference.budgets by administrators of the platform.
    """
    found = session.client.tenants()
    if tenant is not None:
        found = [each for each in found if each["metadata"]["name"] == tenant]
        if not found:
            raise NotFound(
                f"There is no tenant {tenant!r} that you may see. `busbar list tenants` shows yours."
            )
    names = [each["metadata"]["name"] for each in found]
    document = {
        "items": [
            {
                "tenant": name,
                "budgets": (each.get("status") or {}).get("budgets") or [],
                "inference": _inference(each),
            }
            for name, each in zip(names, found, strict=True)
        ]
    }
    emit(output, document, lambda: _table(found), names)


def _table(tenants: list[dict[str, Any]]) -> str:
    rows = [row for tenant in tenants for row in _rows(tenant)]
    if not rows:
        return "No tenant that you may see has a budget."
    heads = [
        "tenant",
        "period",
        "of",
        "used",
        "left",
        "percent",
        "state",
        "spent on",
        "p50",
        "p90",
        "next period",
    ]
    return columns(heads, rows)


def _rows(tenant: dict[str, Any]) -> Iterator[list[object]]:
    """One line for each limit; the forecast is that of the limit which is reached first."""
    for use in (tenant.get("status") or {}).get("budgets") or []:
        for title, name in RESOURCES:
            left, used = use.get(f"{name}Left"), use.get(name) or 0.0
            if left is None:
                continue
            limit = used + left
            yield [
                tenant["metadata"]["name"],
                use.get("period"),
                title,
                f"{used:.6g}",
                f"{left:.6g}",
                f"{100 * used / limit:.0f}%" if limit else "100%",
                use.get("state"),
                _moment(use.get("exhausted")),
                _moment(use.get("exhaustedP50")),
                _moment(use.get("exhaustedP90")),
                _moment(use.get("ends")),
            ]

    for use in _inference(tenant):
        used, left = use.get("cost") or 0.0, use.get("costLeft") or 0.0
        limit = used + left
        yield [
            tenant["metadata"]["name"],
            use.get("period"),
            "inference cost",
            f"{used:.6g}",
            f"{left:.6g}",
            f"{100 * used / limit:.0f}%" if limit else "100%",
            use.get("state"),
            None,  # no forecast of these
            None,
            None,
            _moment(use.get("ends")),
        ]


def _inference(tenant: dict[str, Any]) -> list[dict[str, Any]]:
    """What inference has cost in the present periods."""
    found: list[dict[str, Any]] = ((tenant.get("status") or {}).get("inference") or {}).get("budgets") or []
    return found


def _moment(text: str | None) -> str | None:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M}" if text else None
