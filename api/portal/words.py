"""Values in people's words: times, numbers, money."""

from datetime import datetime

from busbar.api.clock import parse_time
from busbar.api.preview import span
from busbar.api.projection import as_number


def ago(text: object, now: datetime) -> str:
    """How long ago, in words; empty when there is no time."""
    then = parse_time(text)
    return span(max(0.0, (now - then).total_seconds())) if then is not None else ""


def number(value: object, digits: int) -> str:
    """A number without useless zeros; empty when there is none."""
    found = as_number(value)
    if found is None:
        return ""
    text = f"{found:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def whole(value: object) -> int:
    """A count; 0 when it is none."""
    return int(as_number(value) or 0)


def grouped(value: object) -> str:
    found = as_number(value)
    return f"{found:,.0f}" if found is not None else ""


def money(value: object) -> str:
    """An amount in the currency that pools' prices are in."""
    return f"{as_number(value) or 0:,.2f}"
