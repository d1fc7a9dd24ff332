"""Metrics of services with a latency target or with replicas that may sleep, and of all changes of a service's replicas."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from busbar.kube.informer import Key
from busbar.operator.serving.fleets import Change, Plan
from busbar.operator.watch.projections import Pod, Sleep

_SERVICE = ["namespace", "service"]
_KINDS = ("now", "forecast", "p90")
_TIMES = ("5m", "1h")
_STATES = ("ready", "starting", "sleeping")
"""The others leave."""


class ScalingMetrics:
    """Their names never change: dashboards and tests depend on them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.demand = Gauge(
            "busbar_service_demand_rps",
            "Requests per second: now, expected when a replica asked for now would be ready, and its 90 % quantile",
            [*_SERVICE, "kind"],
            registry=registry,
        )
        self.capacity = Gauge(
            "busbar_service_capacity_rps",
            "Requests per second that the ready replicas sustain within the latency target",
            _SERVICE,
            registry=registry,
        )
        self.kept = Gauge(
            "busbar_service_slo_ratio",
            "Answers within the latency target over all requests, of five minutes and of an hour",
            [*_SERVICE, "over"],
            registry=registry,
        )
        self.decisions = Counter(
            "busbar_service_scale_decisions_total",
            "Changes of the desired replicas by cause",
            ["cause"],
            registry=registry,
        )

        self.solving = Histogram(
            "busbar_mix_solve_seconds",
            "One decision about a service with a latency target, solver included",
            buckets=(0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0),
            registry=registry,
        )
        self.replicas = Gauge(
            "busbar_service_replicas",
            "Replicas that take requests, that start or wake, and that sleep",
            [*_SERVICE, "state"],
            registry=registry,
        )

    def show(self, key: Key, plan: Plan | None, scaled: Change | None, pods: Iterable[Pod] = ()) -> None:
        """After a reconcile of the service.

        Args:
            pods: its replicas; none where it has neither a latency target nor replicas that may sleep.
        """
        self._show_replicas(key, pods)
        if scaled is not None:
            self.decisions.labels(scaled.cause.value).inc()
        if plan is None:
            self.forget(key)
            return
        name = (key.namespace, key.name)
        if plan.ahead is not None:
            numbers = (plan.ahead.now, plan.ahead.at_ready, plan.ahead.upper)
            for kind, rps in zip(_KINDS, numbers, strict=True):
                self.demand.labels(*name, kind).set(rps)
        else:
            self._drop(self.demand, name, _KINDS)
        if plan.capacity_rps is not None:
            self.capacity.labels(*name).set(plan.capacity_rps)
        else:
            self._drop(self.capacity, name, ())
        for over, (share, _) in zip(_TIMES, (plan.attainment, plan.attainment_hour), strict=True):
            if share is not None:
                self.kept.labels(*name, over).set(share)
            else:
                self._drop(self.kept, name, (over,))

    def gone(self, key: Key) -> None:
        """The service is deleted."""
        self.forget(key)
        self._show_replicas(key, [])

    def _show_replicas(self, key: Key, pods: Iterable[Pod]) -> None:
        name, here = (key.namespace, key.name), [pod for pod in pods if not pod.leaving]
        if not here:
            self._drop(self.replicas, name, _STATES)
            return
        ready, parked = sum(p.takes_requests for p in here), sum(p.parked for p in here)
        sleeping = sum(p.sleep is Sleep.ASLEEP for p in here)
        for state, count in zip(_STATES, (ready, len(here) - ready - parked, sleeping), strict=True):
            self.replicas.labels(*name, state).set(count)

    def forget(self, key: Key) -> None:
        """The service has no latency target."""
        name = (key.namespace, key.name)
        self._drop(self.demand, name, _KINDS)
        self._drop(self.kept, name, _TIMES)
        self._drop(self.capacity, name, ())

    def _drop(self, gauge: Gauge, name: tuple[str, str], last: tuple[str, ...]) -> None:
        for labels in ((*name, value) for value in last) if last else (name,):
            with suppress(KeyError):
                gauge.remove(*labels)
