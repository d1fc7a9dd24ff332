"""Values as people read them: times, numbers, money."""

import math
from datetime import datetime

from busbar.kube.contracts.preview import span


def ago(then: datetime | None, now: datetime) -> str:
    """How long ago, in words; empty when there is no time."""
    return span(max(0.0, (now - then).total_seconds())) if then is not None else ""


def number(value: float | None, digits: int) -> str:
    """A number without useless zeros; empty when there is none."""
    if value is None or not math.isfinite(value):
        return ""
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def money(value: float) -> str:
    """An amount in the currency that pools' prices are in."""
    return f"{value:,.2f}"


def as_number(value: object) -> float | None:
    """The number that a JSON value stands for; None for anything else."""
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def kilowatt_hours(joules: float | None) -> str:
    """Energy; empty where none was measured."""
    return f"{number(joules / 3.6e6, 3)} kWh" if joules else ""
