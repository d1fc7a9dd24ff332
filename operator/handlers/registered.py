"""All handlers, registered with the controller, and what each round tells them."""

from __future__ import annotations

import asyncio

from busbar.kube.informer import Key
from busbar.operator.accounting.allocations import (
    AllocationCounts,
    PoolRemarks,
)
from busbar.operator.handlers.foreign_pods import ForeignPods
from busbar.operator.handlers.model_services import ModelServices
from busbar.operator.handlers.pools import Pools
from busbar.operator.handlers.shared import Shared
from busbar.operator.handlers.tenants import Tenants
from busbar.operator.handlers.training_jobs import TrainingJobs
from busbar.operator.metrics import Metrics
from busbar.operator.pods.orphans import Reaper
from busbar.operator.pods.prober import Prober
from busbar.operator.queue.controller import Controller
from busbar.operator.scheduling.rounds import Rounds
from busbar.operator.serving.demand import DemandReader
from busbar.operator.settings import Settings
from busbar.operator.watch.caches import Caches
from busbar.operator.write.writer import Writer
from busbar.scheduler import Snapshot


class Handlers:
    """Registers one handler per kind with the controller."""

    def __init__(
        self,
        caches: Caches,
        writer: Writer,
        controller: Controller,
        rounds: Rounds,
        prober: Prober,
        demand: DemandReader,
        settings: Settings,
        reaper: Reaper,
        metrics: Metrics,
    ) -> None:
        self._shared = Shared(caches, writer, controller, rounds, prober, demand, settings, metrics)
        self.holds, self.profiles = self._shared.holds, self._shared.profiles
        self.energy, self.power = self._shared.energy, self._shared.power
        self._counts = AllocationCounts()
        services = ModelServices(self._shared, metrics)
        self.targets = services.targets
        self.tenants, self.pools = Tenants(self._shared), Pools(self._shared)
        pods = ForeignPods(self._shared, reaper)
        controller.handles("TrainingJob", TrainingJobs(self._shared).reconcile)
        controller.handles("ModelService", services.reconcile)
        controller.handles("Tenant", self.tenants.reconcile)
        controller.handles("AcceleratorPool", self.pools.reconcile)
        controller.handles("Pod", pods.reconcile)
        controller.handles("Job", pods.reconcile_job)
        controller.handles("Namespace", self.tenants.reconcile_namespace)

    async def after_round(self, snapshot: Snapshot, remarks: PoolRemarks) -> None:
        """Queues the tenants and pools whose allocation changed, and makes pools for devices that no pool covers."""
        old = self._shared.allocations
        new = await asyncio.to_thread(self._counts.follow, snapshot, remarks)
        self._shared.allocations = new
        for name, now_held in new.tenants.items():
            self.tenants.allocation_changed(Key("", name), old.tenants.get(name), now_held)
        for name, pool_held in new.pools.items():
            if old.pools.get(name) != pool_held:
                self._shared.controller.add("AcceleratorPool", Key("", name))
        await self.profiles.after_round(snapshot.table, self._counts.classes, self._counts.running_classes)
        await self.pools.discover()
