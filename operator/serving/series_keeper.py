"""Samples the load of all services every few seconds, and tells their series; `series_store.py` keeps these over restarts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.contracts.service_series import SeriesSpan, ServiceSeries
from busbar.kube.informer import Key
from busbar.kube.types import ModelService
from busbar.operator.pods.manifests import KIND_SERVICE
from busbar.operator.serving.fleet_plan import Plan
from busbar.operator.serving.load_series import KeptSeries, LoadSeries, Sample
from busbar.operator.serving.replica_speed import PERCENTILE
from busbar.operator.steady_clock import CLOCK
from busbar.operator.watch.caches import Caches

SAMPLE_S = 10.0
"""Six samples in the shortest period."""
AT_A_TIME = 20
"""After so many services others have their turn."""


class SeriesKeeper:
    """`run`, and `of` for one service."""

    def __init__(
        self,
        caches: Caches,
        demand: Callable[[Key], ServiceDemand | None],
        plan_of: Callable[[str], Plan | None],
        now_s: Callable[[], float] = CLOCK.now_s,
    ) -> None:
        """
        Args:
            demand: what the gateway last told of a service; None: nothing, or nothing lately.
            plan_of: what the latency target said last, by the service's uid.
        """
        self._caches, self._demand, self._plan_of = caches, demand, plan_of
        self.now_s = now_s
        """Seconds since 1970; another clock in tests."""
        self._series: dict[str, LoadSeries] = {}
        """By the services' uids."""

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_S)

    async def sample(self) -> None:
        """One sample of every service."""
        services = list(self._caches.services.items.items())
        known = {service.metadata.uid for _, service in services}
        self._series = {uid: series for uid, series in self._series.items() if uid in known}
        for number, (key, service) in enumerate(services):
            series = self._series.setdefault(service.metadata.uid, LoadSeries())
            series.take(self._sampled(key, service), self.now_s())
            if number % AT_A_TIME == AT_A_TIME - 1:
                await asyncio.sleep(0)

    def go_on(self, kept: Mapping[str, KeptSeries]) -> None:
        """From what another process had of services, by uid; before the first sample."""
        self._series |= {uid: LoadSeries.of(series, self.now_s()) for uid, series in kept.items()}

    def copies(self, wanted: Callable[[str], bool]) -> dict[str, LoadSeries]:
        """Of the services that are wanted, by uid, for another thread to read."""
        return {uid: series.copied() for uid, series in self._series.items() if wanted(uid)}

    def of(self, key: Key, span: SeriesSpan) -> ServiceSeries:
        """The service's series; gaps only where nothing is known of it."""
        service = self._caches.services.items.get(key)
        series = self._series.get(service.metadata.uid) if service is not None else None
        return (series or LoadSeries()).answer(key.namespace, key.name, span, self.now_s(), self._type_of)

    def _sampled(self, key: Key, service: ModelService) -> Sample:
        plan, slo = self._plan_of(service.metadata.uid), service.spec.slo
        pods = self._caches.owned_pods(KIND_SERVICE, service)
        return Sample(
            demand=self._demand(key),
            ready=Counter(pod.pool for pod in pods if pod.takes_requests),
            rates=plan.rates if plan is not None else {},
            capacity_rps=plan.capacity_rps if plan is not None else None,
            percentile=slo.percentile if slo is not None and slo.percentile is not None else PERCENTILE,
        )

    def _type_of(self, pool: str) -> str:
        found = self._caches.pools.items.get(Key("", pool))
        return found.spec.accelerator if found is not None else ""
