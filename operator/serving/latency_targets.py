"""What the latency targets of services say, on live data, and what came of their load so far.

    gateway's demand, pods, pools, profiles, last round ──► Seen ──► Fleets.plan      how many replicas, and where
                                                            │
                                                            └──► service_plan         the same for a stated load

The solver and the look at every job run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from dataclasses import replace

from busbar.kube.contracts.service_plan import ServicePlanAnswer, ServicePlanRequest
from busbar.kube.informer import Key
from busbar.kube.types import ModelService
from busbar.operator.accounting.budgets import budgets_left
from busbar.operator.errors import Busy
from busbar.operator.profiles.table import Workload
from busbar.operator.serving.demand import DemandReader
from busbar.operator.serving.fleet_input import Seen, usable_pools
from busbar.operator.serving.fleet_plan import Plan
from busbar.operator.serving.fleets import Fleets
from busbar.operator.serving.history import Counts, History, Spent
from busbar.operator.serving.metrics import ScalingMetrics
from busbar.operator.serving.room import RoomReader
from busbar.operator.serving.service_plan import refused, service_plan
from busbar.operator.serving.shares import Shares
from busbar.operator.serving.view import model_uri
from busbar.operator.serving.warm_worth import WarmWorth
from busbar.operator.steady_clock import CLOCK, utc_now
from busbar.operator.watch.caches import Caches
from busbar.operator.watch.projections import Pod
from busbar.scheduler import Snapshot
from busbar.scheduler.autoscale.warmth import Warmth

MOST_PLANS = 4
"""Plans for stated loads that are computed at a time."""


class LatencyTargets:
    """Of all services."""

    def __init__(
        self,
        caches: Caches,
        demand: DemandReader,
        outcome: Callable[[], Snapshot | None],
        scales: ScalingMetrics,
        has_gateway: bool,
        lacking: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """
        Args:
            outcome: what the last round has left.
            lacking: the power domains on which it left jobs waiting for watts.
            has_gateway: that counts requests.
        """
        self._caches, self._demand, self._outcome = caches, demand, outcome
        self._scales, self._has_gateway, self._lacking = scales, has_gateway, lacking
        self._fleets, self._room, self._warmth = Fleets(), RoomReader(), WarmWorth()
        self._plans_asked = 0
        self.histories: dict[str, History] = {}
        """The services' last day and load, by uid."""
        self.clock: Callable[[], float] = CLOCK.now_s
        """Seconds by which services are scaled; another one in tests."""

    def keep(self, uids: Set[str]) -> None:
        """Forgets all other services."""
        self._fleets.keep(uids)
        self._warmth.keep(uids)
        for uid in self.histories.keys() - uids:
            del self.histories[uid]

    async def plan(
        self, key: Key, service: ModelService, own: tuple[Pod, ...], made_by: Workload | None
    ) -> Plan | None:
        """What the service's latency target says; the solver runs beside the event loop."""
        if service.spec.slo is None:
            self._fleets.without_target(service.metadata.uid)
            return None
        seen = self._seen(key, service, own, made_by)
        return await asyncio.to_thread(self._planned, seen, self._outcome())

    def day(self, key: Key, service: ModelService) -> Counts | None:
        """What came and was spent in the last 24 hours, with what is known now; None without a gateway."""
        if not self._has_gateway:
            return None
        history, now_s = self._history(service), utc_now().timestamp()
        demand, usage = self._demand.of(key), service.status.usage if service.status is not None else None
        if demand is not None and demand.totals is not None:
            history.answered(demand.totals, now_s)
        if usage is not None:
            history.used(Spent(cost=usage.cost, joules=usage.energy_joules or 0.0), now_s)
        return history.day(now_s)

    def warmth(self, service: ModelService, own: tuple[Pod, ...], plan: Plan | None) -> Warmth | None:
        """What decides on its surplus replicas; None: it has no `scaling.warm`."""
        return self._warmth.of(service, own, plan, self.clock())

    def latest(self, uid: str) -> Plan | None:
        """What `plan` said last of a service, without its attainment."""
        return self._fleets.latest(uid)

    def shares_of(self, uid: str) -> Shares:
        """Where each class of a service's prompts shall go, by pool."""
        return self._fleets.shares(uid)

    async def service_plan(self, asked: ServicePlanRequest) -> ServicePlanAnswer:
        """The cheapest replicas of a service for a stated load. Raises Busy."""
        key = Key(asked.namespace, asked.name)
        service = self._caches.services.items.get(key)
        if service is None:
            return refused(asked, "The operator has not seen the service yet; try again.")
        if self._plans_asked >= MOST_PLANS:
            raise Busy("other plans are being computed; try again in a few seconds")
        self._plans_asked += 1
        try:
            made_by = model_uri(service, self._caches.jobs.items.values()).made_by
            seen, snapshot = self._seen(key, service, (), made_by), self._outcome()
            sizes, trust = self._fleets.outlook(service.metadata.uid, seen.demand)
            return await asyncio.to_thread(
                lambda: service_plan(self._with_room(seen, snapshot), sizes, trust, asked)
            )
        finally:
            self._plans_asked -= 1

    def _planned(self, seen: Seen, snapshot: Snapshot | None) -> Plan:
        """In a thread: `ServiceRooms` looks at every job."""
        with self._scales.solving.time():
            return self._fleets.plan(self._with_room(seen, snapshot))

    def _with_room(self, seen: Seen, snapshot: Snapshot | None) -> Seen:
        """With what quota, budgets, power and other work leave to the service."""
        tenant = self._caches.tenant_of.get(seen.service.metadata.namespace or "", "")
        names = [pool.metadata.name for pool in seen.pools]
        owner = self._caches.tenants.items.get(Key("", tenant))
        budgets = budgets_left(owner, utc_now()) if owner is not None else ()
        room = self._room.of(snapshot, seen.service, tenant, names, budgets, self._lacking())
        return replace(seen, room=room)

    def _seen(self, key: Key, service: ModelService, own: tuple[Pod, ...], made_by: Workload | None) -> Seen:
        tenant = self._caches.tenant_of.get(key.namespace, "")
        return Seen(
            service=service,
            pods=own,
            pools=usable_pools(service, self._caches.pools.items.values(), tenant),
            profiles=tuple(self._caches.profiles.items.values()),
            demand=self._demand.of(key) if self._has_gateway else None,
            reading=self._demand.reading,
            counted_s=self._demand.counted_s,
            now_s=self.clock(),
            off=service.spec.suspend or not tenant,
            made_by=made_by,
            days=self._history(service).profile,
        )

    def _history(self, service: ModelService) -> History:
        return self.histories.setdefault(service.metadata.uid, History())
