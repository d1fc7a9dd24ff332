"""All handlers, registered with the controller, and what each round tells them."""

from __future__ import annotations

import asyncio

from busbar.kube.informer import Key
from busbar.operator.accounting.allocations import AllocationCounts, PoolRemarks
from busbar.operator.handlers.foreign_pods import ForeignPods
from busbar.operator.handlers.model_services import ModelServices
from busbar.operator.handlers.pools import Pools
from busbar.operator.handlers.shared import Shared
from busbar.operator.handlers.tenants import Tenants
from busbar.operator.handlers.training_jobs import TrainingJobs
from busbar.operator.metrics import Metrics
from busbar.operator.pods.orphans import Reaper
from busbar.scheduler import Snapshot


class Handlers:
    """Registers one handler per kind with the controller of ``shared``."""

    def __init__(self, shared: Shared, reaper: Reaper, metrics: Metrics) -> None:
        self._shared, controller = shared, shared.controller
        self.holds, self.profiles = shared.holds, shared.profiles
        self.energy, self.power = shared.energy, shared.power
        self._counts = AllocationCounts()
        services = ModelServices(shared, metrics)
        self.targets = services.targets
        self.tenants, self.pools = Tenants(shared), Pools(shared)
        pods = ForeignPods(shared, reaper)
        controller.handles("TrainingJob", TrainingJobs(shared).reconcile)
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
