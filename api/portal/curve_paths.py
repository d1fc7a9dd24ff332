"""Paths of SVG for numbers over time, in a box of WIDTH x HEIGHT; None is a gap. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

WIDTH, HEIGHT = 360, 72
Numbers = Sequence[float | None]


def y_of(value: float, most: float, least: float = 0.0) -> float:
    """`most` is at the top of the box, `least` at its bottom."""
    return HEIGHT * (1 - (value - least) / (most - least))


def line_path(values: Numbers, most: float, least: float = 0.0) -> str:
    """A line through the values; empty where there are none."""
    step = WIDTH / max(len(values) - 1, 1)
    parts, pen = [], "M"
    for index, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        parts.append(f"{pen}{index * step:.1f} {y_of(value, most, least):.1f}")
        if pen == "M":
            parts.append("h0.1")  # a point between two gaps is seen, too
        pen = "L"
    return "".join(parts)


def area_path(lower: Numbers, upper: Numbers, most: float) -> str:
    """The area between two lines with the same gaps; empty where they are the same."""
    step = WIDTH / max(len(upper) - 1, 1)
    parts = []
    for run in _runs(lower, upper):
        if all(low == high for _, low, high in run):
            continue
        first, last = run[0][0] * step, max(run[-1][0] * step, run[0][0] * step + 0.5)
        top = [(index * step, high) for index, _, high in run]
        bottom = [(index * step, low) for index, low, _ in run]
        if len(run) == 1:  # a period between two gaps is seen, too
            top, bottom = [(first, run[0][2]), (last, run[0][2])], [(first, run[0][1]), (last, run[0][1])]
        points = [f"{x:.1f} {y_of(value, most):.1f}" for x, value in (*top, *reversed(bottom))]
        parts.append("M" + "L".join(points) + "Z")
    return "".join(parts)


def _runs(lower: Numbers, upper: Numbers) -> Iterator[list[tuple[int, float, float]]]:
    run: list[tuple[int, float, float]] = []
    for index, (low, high) in enumerate(zip(lower, upper, strict=True)):
        if low is not None and high is not None:
            run.append((index, low, high))
        elif run:
            yield run
            run = []
    if run:
        yield run
