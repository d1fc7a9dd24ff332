"""The metrics of power: what the domains and the nodes' readings say now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from busbar.operator.metrics import Metrics
from busbar.operator.power.draw import Draw
from busbar.operator.power.readings import Reading


def show(
    metrics: Metrics, domains: Mapping[str, tuple[float, Draw]], readings: Iterable[Reading], now_s: float
) -> None:
    """Sets the gauges.

    Args:
        domains: budget in watts and draw, by name.
        now_s: the clock of `Reading.at_s`.
    """
    for gauge in (metrics.power_domains, metrics.power_boards, metrics.power_age, metrics.power_nodes):
        gauge.clear()
    for name, (budget_w, draw) in domains.items():
        kinds = {"budget": budget_w}
        if draw.fresh:
            kinds["draw"] = draw.watts
        if draw.unknown < draw.nodes:
            kinds["floor"] = draw.floor_w
        for kind, watts in kinds.items():
            metrics.power_domains.labels(name, kind).set(watts)
    for reading in readings:
        metrics.power_nodes.labels(reading.boards_from.value).inc()
        metrics.power_age.labels(reading.node).set(now_s - reading.at_s)
        for uuid, meter in reading.boards.items():
            metrics.power_boards.labels(reading.node, uuid).set(meter.watts)
