"""Charts of a service's load: demand against what its replicas carry, by pool, and how its answers keep the target. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from busbar.api.portal.curve_paths import Numbers, area_path, line_path, y_of
from busbar.api.portal.formatting import number
from busbar.kube.contracts.service_series import PoolSeries, ServiceSeries
from busbar.kube.types.model_service import ServiceLevel

COLOURS = 6
"""Of so many pools, those with the most replicas, each has a colour; with more than these the last is for all others."""
FAR = 4.0
"""A target this many times above everything measured would flatten the lines: it is told, but not drawn."""


@dataclass(frozen=True)
class Chart:
    """Paths in a box of `curve_paths.WIDTH` x `HEIGHT`; the first of each pair is a class of CSS."""

    title: str
    scale: str
    """The highest value, or what the chart goes from and to."""
    label: str
    """The same as a sentence, for who does not see it."""
    areas: tuple[tuple[str, str], ...] = ()
    lines: tuple[tuple[str, str], ...] = ()
    limit_y: float | None = None
    keys: tuple[tuple[str, str], ...] = ()
    """What the classes mean."""


@dataclass(frozen=True)
class _Band:
    """One pool, or several."""

    name: str
    ready: Numbers
    capacity: Numbers


def charts(series: ServiceSeries, slo: ServiceLevel | None) -> list[Chart]:
    """Those of which something is known."""
    bands = _bands(series.pools)
    target = (slo.ttft_milliseconds, slo.tpot_milliseconds) if slo is not None else (None, None)
    ttft, tpot = (
        (series.ttft_milliseconds, series.ttft_median_milliseconds),
        (series.tpot_milliseconds, series.tpot_median_milliseconds),
    )
    made = (
        _load(series, bands),
        _replicas(series, bands),
        _attainment(series) if slo is not None else None,
        _tokens(series),
        _times("Time to first token", series, *ttft, target[0]),
        _times("Time per later token", series, *tpot, target[1]),
    )
    return [chart for chart in made if chart is not None]


def _load(series: ServiceSeries, bands: Sequence[_Band]) -> Chart | None:
    demand, capacity = series.requests_per_second, series.capacity_per_second
    most = _highest(demand, capacity)
    if most is None:
        return None
    areas = _stacked([band.capacity for band in bands], _top(most))
    keys = [("line", "demand")]
    said = [_said("demand", demand, "requests/s")]
    if any(areas):
        keys += [(f"swatch s{i}", f"capacity on {b.name}") for i, b in enumerate(bands) if areas[i]]
        said += [_said("capacity", capacity, "requests/s")]
    else:
        said.append("how much the replicas carry is not known")
    title = "Demand and capacity" if any(areas) else "Demand"
    return Chart(
        title=title,
        scale=f"up to {_short(most)} requests/s",
        label=_label(title, series, said),
        areas=_coloured(areas),
        lines=(("", line_path(demand, _top(most))),),
        keys=tuple(keys),
    )


def _replicas(series: ServiceSeries, bands: Sequence[_Band]) -> Chart | None:
    totals = _sums([band.ready for band in bands])
    most = _highest(totals)
    if most is None:
        return None
    areas = _stacked([band.ready for band in bands], _top(most))
    title = "Ready replicas"
    said = [_said(band.name, band.ready, "") for band in bands] or ["none"]
    return Chart(
        title=title,
        scale=f"up to {_short(most)}",
        label=_label(title, series, said),
        areas=_coloured(areas),
        keys=tuple((f"swatch s{i}", band.name) for i, band in enumerate(bands) if areas[i]),
    )


def _attainment(series: ServiceSeries) -> Chart | None:
    known = [value for value in series.attainment if value is not None]
    if not known:
        return None
    limit = series.percentile / 100
    least = min(0.9, int(10 * min(*known, limit)) / 10)
    title = "Answers within the target"
    percent = [None if value is None else 100 * value for value in series.attainment]
    said = [_said("share", percent, "%"), f"wanted {number(series.percentile, 2)} %"]
    return Chart(
        title=title,
        scale=f"{100 * least:.0f} to 100 %",
        label=_label(title, series, said),
        lines=(("", line_path(series.attainment, 1.0, least)),),
        limit_y=round(y_of(limit, 1.0, least), 1),
        keys=(("line", "share"), ("line budget", f"{number(series.percentile, 2)} %")),
    )


def _tokens(series: ServiceSeries) -> Chart | None:
    most = _highest(series.tokens_per_second)
    if most is None:
        return None
    title = "Output tokens"
    return Chart(
        title=title,
        scale=f"up to {_short(most)} tokens/s",
        label=_label(title, series, [_said("", series.tokens_per_second, "tokens/s")]),
        lines=(("", line_path(series.tokens_per_second, _top(most))),),
    )


def _times(
    title: str, series: ServiceSeries, tail: Numbers, median: Numbers, target_ms: float | None
) -> Chart | None:
    most = _highest(tail, median)
    if most is None:
        return None
    named = f"{number(series.percentile, 2)} %"
    said = [_said("median", median, "ms"), _said(f"{named} within", tail, "ms")]
    keys = [("line", f"{named} within"), ("line forecast", "median")]
    top, limit_y = _top(most), None
    if target_ms is not None:
        said.append(f"target {_short(target_ms)} ms")
        keys.append(("line budget", f"target {_short(target_ms)} ms"))
        if target_ms <= FAR * most:
            top = max(top, _top(target_ms))
            limit_y = round(y_of(target_ms, top), 1)
        else:
            keys[-1] = ("", f"target {_short(target_ms)} ms, far above")
    return Chart(
        title=title,
        scale=f"up to {_short(most)} ms",
        label=_label(title, series, said),
        lines=(("", line_path(tail, top)), ("forecast", line_path(median, top))),
        limit_y=limit_y,
        keys=tuple(keys),
    )


# -- pools ---------------------------------------------------------------------------------------------


def _bands(pools: Sequence[PoolSeries]) -> list[_Band]:
    """The pools by name; the smallest of many are one."""
    largest = sorted(pools, key=lambda pool: (-sum(value or 0 for value in pool.ready_replicas), pool.pool))
    own = largest if len(pools) <= COLOURS else largest[: COLOURS - 1]
    others = largest[len(own) :]
    bands = [
        _Band(_named(pool), pool.ready_replicas, pool.capacity_per_second)
        for pool in sorted(own, key=lambda pool: pool.pool)
    ]
    if others:
        ready, capacity = (
            _sums([each.ready_replicas for each in others]),
            _sums([each.capacity_per_second for each in others]),
        )
        bands.append(_Band(f"{len(others)} others", ready, capacity))
    return bands


def _named(pool: PoolSeries) -> str:
    same = pool.accelerator.lower() in ("", pool.pool.lower())
    return pool.pool if same else f"{pool.pool} ({pool.accelerator})"


def _sums(rows: Sequence[Numbers]) -> list[float | None]:
    """By period; a gap where nothing is known of any of them."""
    return [
        sum(value or 0.0 for value in values) if any(value is not None for value in values) else None
        for values in zip(*rows, strict=True)
    ]


def _stacked(rows: Sequence[Numbers], most: float) -> list[str]:
    """The area of each, the first at the bottom."""
    total = _sums(rows)
    below: list[float | None] = [None if value is None else 0.0 for value in total]
    paths = []
    for row in rows:
        above = [
            None if under is None else under + (value or 0.0) for under, value in zip(below, row, strict=True)
        ]
        paths.append(area_path(below, above, most))
        below = above
    return paths


def _coloured(areas: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"s{i}", path) for i, path in enumerate(areas) if path)


# -- words ---------------------------------------------------------------------------------------------


def _highest(*rows: Numbers) -> float | None:
    """None: nothing is known."""
    return max(_known(*rows), default=None)


def _top(highest: float) -> float:
    """What is at the top of the chart."""
    return 1.05 * highest or 1.0


def _known(*rows: Numbers) -> Iterator[float]:
    return (value for row in rows for value in row if value is not None)


def _label(title: str, series: ServiceSeries, said: Sequence[str]) -> str:
    return f"{title}, the last {series.span.value}: {'; '.join(said)}"


def _said(name: str, values: Numbers, unit: str) -> str:
    known = list(_known(values))
    if not known:
        return f"{name} not known".strip()
    words = f"{name} {_short(min(known))} to {_short(max(known))} {unit}, last {_short(known[-1])}"
    return " ".join(words.split()).replace(" ,", ",")


def _short(value: float) -> str:
    """Three digits."""
    return number(float(f"{value:.3g}"), 3)
