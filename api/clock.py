"""The clock, as an argument: tests pass one that stands still."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """Now, with its zone."""
    return datetime.now(UTC)


def parse_time(text: object) -> datetime | None:
    """A Kubernetes timestamp; None when absent or malformed."""
    if not isinstance(text, str) or not text:
        return None
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        return None
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
