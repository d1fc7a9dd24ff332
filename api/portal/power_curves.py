"""The draw of a feed over time as a curve of SVG, beside its budget. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from busbar.api.portal.curve_paths import line_path, y_of
from busbar.api.portal.power_views import kilowatts
from busbar.kube.contracts.power_view import Resolution

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
    """In a box of `curve_paths.WIDTH` x `HEIGHT`; gaps where nothing was measured."""

    path: str
    budget_y: float
    label: str
    leased: str = ""
    """Path of what the nodes might draw by their leases; empty where nothing was leased."""
    forecast: str = ""
    """Path of what they were expected to draw at most."""


def curve(
    name: str,
    watts: Sequence[float | None],
    budget_w: float,
    span: Span,
    leased: Sequence[float | None] = (),
    forecast: Sequence[float | None] = (),
) -> Curve | None:
    """None: nothing was measured in this time."""
    groups, *beside = (_joined(list(each)[-span.periods :]) for each in (watts, leased, forecast))
    known = [value for value in groups if value is not None]
    if not known:
        return None
    promised = [value for value in beside[0] if value is not None]
    most_w = 1.05 * max(budget_w, *known, *promised, *(value or 0.0 for value in beside[1]))
    label = (
        f"Draw of {name}, the last {span.value}: {kilowatts(min(known))} to {kilowatts(max(known))}, "
        f"of a budget of {kilowatts(budget_w)}"
    )
    if promised:
        label += f"; by leases at most {kilowatts(max(promised))}"
    path, *more = (line_path(each, most_w) for each in (groups, *beside))
    return Curve(path, round(y_of(budget_w, most_w), 1), label, *more)


def _joined(watts: Sequence[float | None]) -> list[float | None]:
    size = -(-len(watts) // POINTS) or 1
    groups = (watts[i : i + size] for i in range(0, len(watts), size))
    return [max((value for value in group if value is not None), default=None) for group in groups]
