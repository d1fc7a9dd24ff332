"""The curve of a feed: its scale, its gaps and its peaks."""

from __future__ import annotations

import re

from busbar.api.portal.curve_paths import HEIGHT
from busbar.api.portal.power_curves import POINTS, Curve, Span, curve


def _curve(watts: list[float | None], span: Span = Span.HOUR) -> Curve:
    found = curve("row", watts, 2000.0, span)
    assert found is not None
    return found


def _points(path: str) -> list[tuple[str, float, float]]:
    return [(pen, float(x), float(y)) for pen, x, y in re.findall(r"([ML])([\d.]+) ([\d.]+)", path)]


def test_the_budget_and_the_draw_have_one_scale() -> None:
    found = _curve([1000.0, 2000.0])
    assert [y for _, _, y in _points(found.path)] == [round(HEIGHT * (1 - 1 / 2.1), 1), found.budget_y]
    assert found.label == "Draw of row, the last 1h: 1 kW to 2 kW, of a budget of 2 kW"
    assert 0 <= _points(_curve([4000.0]).path)[0][2] < _curve([4000.0]).budget_y


def test_gaps_stay_gaps_and_nothing_measured_is_no_curve() -> None:
    assert [pen for pen, _, _ in _points(_curve([1.0, None, 2.0, 3.0]).path)] == ["M", "M", "L"]
    assert curve("row", [None, None], 2000.0, Span.DAY) is None
    assert curve("row", [], 2000.0, Span.DAY) is None


def test_only_the_span_is_shown_and_no_peak_of_it_is_lost() -> None:
    watts: list[float | None] = [100.0] * 900
    watts[700] = 1900.0
    found = _curve(watts, Span.QUARTER)
    assert len(_points(found.path)) == POINTS
    assert "1.9 kW" in found.label
    assert "1.9 kW" not in _curve(watts, Span.HOUR).label


def test_leases_and_forecasts_stand_beside_the_draw_on_its_scale() -> None:
    found = curve("row", [1000.0, 1200.0], 2000.0, Span.HOUR, [None, 4000.0], [1500.0, 1600.0])
    assert found is not None
    assert found.budget_y == round(HEIGHT * (1 - 1 / 2.1), 1)
    assert [pen for pen, _, _ in _points(found.leased)] == ["M"]
    [(_, _, leased_y)] = _points(found.leased)
    assert (
        leased_y < min(y for _, _, y in _points(found.forecast)) < min(y for _, _, y in _points(found.path))
    )
    assert found.label.endswith("; by leases at most 4 kW")
    assert (_curve([1.0]).leased, _curve([1.0]).forecast) == ("", "")
