"""The metrics of power: what the domains and the nodes' readings say now."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from busbar.kube.contracts.power import LeaseState
from busbar.operator.power.draw import Draw
from busbar.operator.power.leasing import FeedLeases
from busbar.operator.power.meters import Metered
from busbar.operator.power.readings import Reading

ELSEWHERE = "Elsewhere"
"""The reason of a limit that our agent has not set."""


class PowerMetrics:
    """They stand in the operator's registry. Their names never change: dashboards and tests depend on them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.domains = Gauge(
            "busbar_power_domain_watts",
            "Of each PowerDomain: draw (mean of the last second of the nodes that report), budget, floor (its nodes "
            "with all boards at their lowest limit), leased (the most that its nodes may draw by their leases), and forecast "
            "(what they are expected to draw at most)",
            ["domain", "kind"],
            registry=registry,
        )
        self.overrun = Counter(
            "busbar_power_overrun_seconds",
            "Time in which the measured draw of a PowerDomain was above its budget",
            ["domain"],
            registry=registry,
        )
        self.preemptions = Counter(
            "busbar_power_preemptions",
            "Jobs and replicas of services that were stopped for the budget of a PowerDomain (enforcement Preempt)",
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
        self.unlimited = Gauge(
            "busbar_power_unlimited_nodes",
            "Of each PowerDomain with leases, the nodes whose agent sets no limits or that have a board that takes none",
            ["domain"],
            registry=registry,
        )
        self.leases = Gauge(
            "busbar_power_lease_watts",
            "The lease in force on each node, as it says",
            ["node"],
            registry=registry,
        )
        self.limits = Gauge(
            "busbar_power_board_limit_watts",
            "The limit in force on each board, as its agent read it back",
            ["node", "uuid"],
            registry=registry,
        )
        self.capped = Counter(
            "busbar_power_capped_seconds",
            "Time in which a board of the node had a limit below the most that it can draw, by reason: Leased, Standing "
            "(no lease: the lowest limits), Elsewhere (not by our agent)",
            ["node", "reason"],
            registry=registry,
        )
        self.actuation = Histogram(
            "busbar_power_actuation_seconds",
            "From the arrival of a lease at an agent to its limits being read back",
            buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
            registry=registry,
        )
        self.meters = Gauge(
            "busbar_power_meter_error_ratio",
            "By how much the energy ledger of a PowerDomain is above its own meter (spec.meter) in the last whole hour, as a "
            "part of the meter; absent while no hour can be compared",
            ["domain"],
            registry=registry,
        )
        self.slowdown = Gauge(
            "busbar_power_slowdown_ratio",
            "What power limits have cost the running training jobs of a tenant and a priority: mean over the jobs of the time "
            "for the same work since the start of their pods, over that without limits",
            ["tenant", "priority"],
            registry=registry,
        )
        self.energy = Counter(
            "busbar_energy_joules",
            "Energy by who used it (tenant; kind: job, service, pod, unassigned) and by how it is known (counter, rapl, "
            "estimated, simulated)",
            ["tenant", "kind", "source"],
            registry=registry,
        )

    def show_slowdowns(self, jobs: Iterable[tuple[str, int, float]]) -> None:
        """Sets the means.

        Args:
            jobs: tenant, priority and slowdown of each.
        """
        found: dict[tuple[str, int], list[float]] = {}
        for tenant, priority, slowdown in jobs:
            found.setdefault((tenant, priority), []).append(slowdown)
        self.slowdown.clear()
        for (tenant, priority), slow in found.items():
            self.slowdown.labels(tenant, str(priority)).set(math.fsum(slow) / len(slow))

    def show(
        self,
        domains: Mapping[str, tuple[float, Draw]],
        leases: Mapping[str, FeedLeases],
        readings: Iterable[Reading],
        now_s: float,
    ) -> None:
        """Sets the gauges.

        Args:
            domains: budget in watts and draw, by name.
            now_s: the clock of `Reading.at_s`.
        """
        for gauge in (
            self.domains,
            self.boards,
            self.age,
            self.nodes,
            self.unlimited,
            self.leases,
            self.limits,
        ):
            gauge.clear()
        for name, (budget_w, draw) in domains.items():
            kinds = {"budget": budget_w}
            if draw.fresh:
                kinds["draw"] = draw.watts
            if draw.unknown < draw.nodes:
                kinds["floor"] = draw.floor_w
            if name in leases:
                kinds["leased"] = leases[name].leased_w
                kinds["forecast"] = leases[name].forecast_w
                self.unlimited.labels(name).set(len(draw.refusing))
            for kind, watts in kinds.items():
                self.domains.labels(name, kind).set(watts)
        for reading in readings:
            self.nodes.labels(reading.boards_from.value).inc()
            self.age.labels(reading.node).set(now_s - reading.at_s)
            for uuid, meter in reading.boards.items():
                self.boards.labels(reading.node, uuid).set(meter.watts)
                if meter.limit_w is not None:
                    self.limits.labels(reading.node, uuid).set(meter.limit_w)
            if reading.limits is not None and reading.limits.lease_watts is not None:
                self.leases.labels(reading.node).set(reading.limits.lease_watts)

    def show_meters(self, meters: Mapping[str, Metered]) -> None:
        """Sets what the feeds' own meters say, by domain."""
        self.meters.clear()
        for name, metered in meters.items():
            whole = metered.book.last_whole()
            if whole is not None and whole.error is not None:
                self.meters.labels(name).set(whole.error)

    def count_capped(self, readings: Iterable[Reading], passed_s: float) -> None:
        """Counts the time in which boards were limited."""
        for reading in readings:
            if reading.is_capped:
                state = reading.limits.state if reading.limits is not None else None
                reason = ELSEWHERE if state in (None, LeaseState.RELEASED) else str(state)
                self.capped.labels(reading.node, reason).inc(passed_s)
