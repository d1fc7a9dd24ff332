"""The draw of a feed over time as a curve of SVG, beside its budget. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from busbar.api.portal.power_views import kilowatts
from busbar.kube.contracts.power_view import Resolution

WIDTH, HEIGHT = 360, 72
POINTS = 180
"""More are joined: of each group the highest counts, so that no peak is lost."""


class Span(StrEnum):
    """How far back a curve goes."""

    QUARTER = "15m"
    HOUR = "1h"
    DAY = "24h"

    @property
    def resolution(self) -> Resolution:
        return Resolution.SECOND if self is Span.QUARTER else Resolution.MINUTE

    @property
    def periods(self) -> int:
        return {Span.QUARTER: 15 * 60, Span.HOUR: 60, Span.DAY: 24 * 60}[self]


@dataclass(frozen=True)
class Curve:
    """In a box of WIDTH x HEIGHT; gaps where nothing was measured."""

    path: str
    budget_y: float
    label: str


def curve(name: str, watts: Sequence[float | None], budget_w: float, span: Span) -> Curve | None:
    """None: nothing was measured in this time."""
    groups = _joined(list(watts)[-span.periods :])
    known = [value for value in groups if value is not None]
    if not known:
        return None
    most_w = 1.05 * max(budget_w, *known)
    step = WIDTH / max(len(groups) - 1, 1)
    parts, pen = [], "M"
    for index, value in enumerate(groups):
        if value is None:
            pen = "M"
            continue
        parts.append(f"{pen}{index * step:.1f} {_y(value, most_w):.1f}")
        if pen == "M":
            parts.append("h0.1")  # a point between two gaps is seen, too
        pen = "L"
    label = (
        f"Draw of {name}, the last {span.value}: {kilowatts(min(known))} to {kilowatts(max(known))}, "
        f"of a budget of {kilowatts(budget_w)}"
    )
    return Curve("".join(parts), round(_y(budget_w, most_w), 1), label)


def _y(value: float, most_w: float) -> float:
    return HEIGHT * (1 - value / most_w)


def _joined(watts: Sequence[float | None]) -> list[float | None]:
    size = -(-len(watts) // POINTS) or 1
    groups = (watts[i : i + size] for i in range(0, len(watts), size))
    return [max((value for value in group if value is not None), default=None) for group in groups]
