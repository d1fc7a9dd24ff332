"""Files of an export: CSV of our own, and FOCUS 1.2. Pure.

FOCUS (the FinOps Open Cost and Usage Specification) is what cost tools read. A row is one object on one day. All four
costs are the same: the pools' prices are list, contracted and billed prices in one. The conditional columns of what
Busbar does not have (regions, commitments, reservations, price lists, invoices) are left out, as the specification asks.
Own columns begin with `x_`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from busbar.api.records.usage_export import JOULES_PER_KWH, Group, Line, ObjectUse
from busbar.kube.resources import MODEL_SERVICES

TEXTS = {
    Group.TENANT: ("tenant",),
    Group.NAMESPACE: ("tenant", "namespace"),
    Group.USER: ("tenant", "user"),
    Group.JOB: ("tenant", "namespace", "name"),
    Group.SERVICE: ("tenant", "namespace", "name"),
}
NUMBERS = (
    "objects",
    "accelerator_hours",
    "work_units",
    "kilowatt_hours",
    "cost",
    "lost_hours",
    "caused_hours",
    "caused_cost",
)
TOKENS = ("requests", "prompt_tokens", "completion_tokens")
PROVIDER = "Busbar"
ACCOUNT = "busbar"
UNIT = "Accelerator-Hours"
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def columns_of(by: Group) -> tuple[str, ...]:
    """The columns of a group's CSV."""
    found = (*TEXTS[by], *NUMBERS)
    if by in (Group.TENANT, Group.NAMESPACE):
        return (*found, *TOKENS)
    return (*found, *TOKENS, "joules_per_token") if by is Group.SERVICE else found


def csv_of(by: Group, lines: Iterable[Line]) -> str:
    """A header and a row for each line; what is not known is empty."""
    names = columns_of(by)
    return _csv(names, ([_cell(getattr(line, name)) for name in names] for line in lines))


def focus_of(days: Iterable[ObjectUse], currency: str) -> str:
    """FOCUS 1.2; objects that used nothing on a day have no row."""
    rows = [_focus(use, currency) for use in days if use.accelerator_seconds or use.energy_joules or use.cost]
    names = list(_focus(_NOTHING, currency))
    return _csv(names, ([_cell(row[name]) for name in names] for row in rows))


def _focus(use: ObjectUse, currency: str) -> Mapping[str, object]:
    hours = use.accelerator_seconds / 3600
    serves = use.kind == MODEL_SERVICES.kind
    month = use.since.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return {
        "BilledCost": use.cost,
        "BillingAccountId": ACCOUNT,
        "BillingAccountName": PROVIDER,
        "BillingAccountType": "Platform",
        "BillingCurrency": currency,
        "BillingPeriodEnd": _moment((month + timedelta(days=31)).replace(day=1)),
        "BillingPeriodStart": _moment(month),
        "ChargeCategory": "Usage",
        "ChargeClass": None,
        "ChargeDescription": f"{use.kind} {use.namespace}/{use.name}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": _moment(use.until),
        "ChargePeriodStart": _moment(use.since),
        "ConsumedQuantity": hours,
        "ConsumedUnit": UNIT,
        "ContractedCost": use.cost,
        "EffectiveCost": use.cost,
        "InvoiceIssuerName": PROVIDER,
        "ListCost": use.cost,
        "PricingQuantity": hours,
        "PricingUnit": UNIT,
        "ProviderName": PROVIDER,
        "PublisherName": PROVIDER,
        "ResourceId": use.uid,
        "ResourceName": f"{use.namespace}/{use.name}",
        "ResourceType": use.kind,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Busbar Serving" if serves else "Busbar Training",
        "ServiceSubcategory": "Generative AI" if serves else "Machine Learning",
        "SubAccountId": use.tenant or None,
        "SubAccountName": use.tenant or None,
        "SubAccountType": "Tenant" if use.tenant else None,
        "Tags": json.dumps({"namespace": use.namespace, "pool": use.pool}, sort_keys=True),
        "x_AcceleratorHours": hours,
        "x_CausedLossAcceleratorHours": use.caused_seconds / 3600,
        "x_CausedLossCost": use.caused_cost,
        "x_KilowattHours": use.energy_joules / JOULES_PER_KWH or None,
        "x_LostWorkSeconds": use.lost_seconds,
        "x_WorkUnits": use.work_units,
    }


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NOTHING = ObjectUse("", "", "", "", "", "", "", _EPOCH, _EPOCH, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _csv(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(names)
    writer.writerows(rows)
    return out.getvalue()


def _cell(value: object) -> str:
    """A number as a number; a text that a spreadsheet would take for a formula gets a quote before it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0").rstrip(".")
    text = str(value)
    return f"'{text}" if isinstance(value, str) and text.startswith(FORMULA) else text


def _moment(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
