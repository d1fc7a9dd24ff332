"""Kubernetes events as they are shown: newest first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from busbar.api.kubernetes.client import Object

MAX_EVENTS = 200


@dataclass(frozen=True)
class Event:
    """A Kubernetes event."""

    type: str
    reason: str
    message: str
    object: str
    """Kind and name of what it is about."""
    count: int
    last_seen: str | None


def newest(found: Iterable[Object]) -> list[Event]:
    """The last `MAX_EVENTS` of them, newest first."""
    rows = [_event(event) for event in found]
    rows.sort(key=lambda row: row.last_seen or "", reverse=True)
    return rows[:MAX_EVENTS]


def _event(event: Object) -> Event:
    about, series = event.get("involvedObject") or {}, event.get("series") or {}
    return Event(
        type=event.get("type", "Normal"),
        reason=event.get("reason", ""),
        message=event.get("message", ""),
        object=f"{about.get('kind', '')}/{about.get('name', '')}",
        count=event.get("count") or series.get("count") or 1,
        last_seen=event.get("lastTimestamp")
        or series.get("lastObservedTime")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp"),
    )
