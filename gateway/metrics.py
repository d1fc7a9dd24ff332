"""Metrics of the gateway, named `busbar_gateway_*`.

Two sets: totals, which anybody who reaches the internal port may read and which name no tenant, and one
line per service, which only a caller with an allowed token gets (see `internal`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.contracts.routes import ServiceRoute

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_SERVICE = ("tenant", "namespace", "service")


class Metrics:
    """All metrics of one gateway."""

    def __init__(self) -> None:
        self.totals = CollectorRegistry()
        self.per_service = CollectorRegistry()
        self.requests = Counter(
            "busbar_gateway_requests", "Requests answered, by HTTP status", ["code"], registry=self.totals
        )
        self.in_hand = Gauge(
            "busbar_gateway_requests_in_hand", "Requests waiting or running", registry=self.totals
        )
        self.hold = Histogram(
            "busbar_gateway_hold_seconds",
            "Time a request waited for a replica",
            buckets=_SECONDS,
            registry=self.totals,
        )
        self.first_byte = Histogram(
            "busbar_gateway_time_to_first_byte_seconds",
            "Time from arrival to the first byte for the client",
            buckets=_SECONDS,
            registry=self.totals,
        )
        self.retries = Counter(
            "busbar_gateway_retries",
            "Attempts that failed before the first byte and were repeated",
            ["reason"],
            registry=self.totals,
        )
        self.broken = Counter(
            "busbar_gateway_streams_broken", "Streams that ended with an error event", registry=self.totals
        )
        self.resumed = Counter(
            "busbar_gateway_streams_resumed",
            "Streams that went on at another replica after theirs had failed",
            registry=self.totals,
        )
        self.moved = Counter(
            "busbar_gateway_streams_moved",
            "Streams that went on at the replica to which theirs had moved them",
            registry=self.totals,
        )
        self.limited = Counter(
            "busbar_gateway_requests_limited",
            "Requests refused because a key or a tenant has reached a limit, by kind (requests, tokens or money)",
            ["kind"],
            registry=self.totals,
        )
        self.undelivered = Gauge(
            "busbar_gateway_usage_undelivered_records",
            "Usage records the API has not taken yet",
            registry=self.totals,
        )
        self.oldest_usage = Gauge(
            "busbar_gateway_usage_oldest_seconds",
            "Age of the oldest usage record that the API has not taken yet; 0: there is none",
            registry=self.totals,
        )
        self.spool_bytes = Gauge(
            "busbar_gateway_usage_spool_bytes", "Size of the usage spool on disk", registry=self.totals
        )
        self.routes_connected = Gauge(
            "busbar_gateway_routes_connected", "1 while the operator's stream is open", registry=self.totals
        )
        self.leases_renewed = Gauge(
            "busbar_gateway_leases_renewed",
            "1 while the API answers what this gateway may use of limits that several share; 1 where there is one gateway",
            registry=self.totals,
        )
        self.services = Gauge("busbar_gateway_services", "Services in the routes", registry=self.totals)
        self.service_requests = Counter(
            "busbar_gateway_service_requests",
            "Requests answered, by service and HTTP status",
            [*_SERVICE, "code"],
            registry=self.per_service,
        )
        self.service_tokens = Counter(
            "busbar_gateway_service_tokens",
            "Tokens counted, by service and kind (prompt or completion)",
            [*_SERVICE, "kind"],
            registry=self.per_service,
        )

    def watch_demand(self, demand: Callable[[], list[ServiceDemand]]) -> None:
        """Show the endpoint picker's demand as gauges per service."""
        self.per_service.register(_Demand(demand))

    def served(self, service: ServiceRoute, code: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Note one finished request of a service."""
        labels = (service.tenant, service.namespace, service.name)
        self.service_requests.labels(*labels, str(code)).inc()
        self.service_tokens.labels(*labels, "prompt").inc(prompt_tokens)
        self.service_tokens.labels(*labels, "completion").inc(completion_tokens)

    def text(self, *, per_service: bool) -> bytes:
        text = generate_latest(self.totals)
        return text + generate_latest(self.per_service) if per_service else text


class _Demand(Collector):
    def __init__(self, demand: Callable[[], list[ServiceDemand]]) -> None:
        self._demand = demand

    def collect(self) -> Iterable[Metric]:
        waiting = GaugeMetricFamily(
            "busbar_gateway_service_waiting", "Requests waiting for a replica", labels=_SERVICE[1:]
        )
        in_flight = GaugeMetricFamily(
            "busbar_gateway_service_in_flight", "Requests at replicas", labels=_SERVICE[1:]
        )
        for service in self._demand():
            waiting.add_metric([service.namespace, service.name], service.waiting)
            in_flight.add_metric([service.namespace, service.name], service.in_flight)
        return [waiting, in_flight]

    def describe(self) -> Iterable[Metric]:
        return []
