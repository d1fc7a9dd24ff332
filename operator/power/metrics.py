"""The metrics of power: what the domains and the nodes' readings say now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from busbar.operator.power.draw import Draw
from busbar.operator.power.readings import Reading


class PowerMetrics:
    """They stand in the operator's registry. Their names never change: dashboards and tests depend on them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.domains = Gauge(
            "busbar_power_domain_watts",
            "Of each PowerDomain: draw (mean of the last second of the nodes that report), budget, and floor (its nodes "
            "with all boards at their lowest limit)",
            ["domain", "kind"],
            registry=registry,
        )
        self.overrun = Counter(
            "busbar_power_overrun_seconds",
            "Time in which the measured draw of a PowerDomain was above its budget",
            ["domain"],
            registry=registry,
        )
        self.boards = Gauge(
            "busbar_power_board_watts",
            "Mean draw of each board since its last report; simulated boards say so in their uuid",
            ["node", "uuid"],
            registry=registry,
        )
        self.age = Gauge(
            "busbar_power_telemetry_age_seconds",
            "Time since a node's last believed report of what it draws",
            ["node"],
            registry=registry,
        )
        self.nodes = Gauge(
            "busbar_power_nodes",
            "Nodes that have reported what they draw, by the source of their boards' watts: nvml, simulated, none",
            ["backend"],
            registry=registry,
        )
        self.energy = Counter(
            "busbar_energy_joules",
            "Energy by who used it (tenant; kind: job, service, pod, unassigned) and by how it is known (counter, rapl, "
            "estimated, simulated)",
            ["tenant", "kind", "source"],
            registry=registry,
        )

    def show(
        self, domains: Mapping[str, tuple[float, Draw]], readings: Iterable[Reading], now_s: float
    ) -> None:
        """Sets the gauges.

        Args:
            domains: budget in watts and draw, by name.
            now_s: the clock of `Reading.at_s`.
        """
        for gauge in (self.domains, self.boards, self.age, self.nodes):
            gauge.clear()
        for name, (budget_w, draw) in domains.items():
            kinds = {"budget": budget_w}
            if draw.fresh:
                kinds["draw"] = draw.watts
            if draw.unknown < draw.nodes:
                kinds["floor"] = draw.floor_w
            for kind, watts in kinds.items():
                self.domains.labels(name, kind).set(watts)
        for reading in readings:
            self.nodes.labels(reading.boards_from.value).inc()
            self.age.labels(reading.node).set(now_s - reading.at_s)
            for uuid, meter in reading.boards.items():
                self.boards.labels(reading.node, uuid).set(meter.watts)
