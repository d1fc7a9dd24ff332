"""The handlers of Tenants and of their namespaces."""

from __future__ import annotations

import logging
import time

from busbar.kube.informer import Key
from busbar.kube.resources import TENANTS
from busbar.kube.types import Tenant
from busbar.operator.accounting.allocations import (
    TenantAllocation,
)
from busbar.operator.decisions import Decision
from busbar.operator.handlers.shared import Shared
from busbar.operator.profiles.table import rates_of
from busbar.operator.queue.controller import Item
from busbar.operator.steady_clock import utc_now
from busbar.operator.tenancy.reconcile import COUNTS_S as TENANT_COUNTS_S
from busbar.operator.tenancy.reconcile import TenantView, release, revoke
from busbar.operator.tenancy.reconcile import reconcile as reconcile_tenant
from busbar.operator.training.view import waits_for_its_turn

log = logging.getLogger(__name__)

ENDING_S = 2.0
"""After so long a namespace whose pods end is looked at again."""


class Tenants:
    """Reconciles Tenants and namespaces; remembers when counts were written, and which namespaces had no Tenant."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._told: dict[Key, float] = {}  # when a tenant's status was written
        self._without_tenant: set[str] = set()
        """Namespaces that were seen without a Tenant."""

    async def reconcile(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        found = self._shared.caches.tenants.items.get(key)
        if found is None:
            self._told.pop(key, None)
            self._shared.holds.look(key.name)
            return None
        view = TenantView(
            tenant=found,
            owner_of=self._shared.caches.tenant_of,
            namespaces={k.name: n for k, n in self._shared.caches.namespaces.items.items()},
            bindings=tuple(self._shared.caches.bindings.items.values()),
            now=utc_now(),
            policies=tuple(self._shared.caches.policies.items.values()),
            quotas=tuple(self._shared.caches.quotas.items.values()),
            waiting_jobs=self._waiting_jobs(found),
            platform=self._shared.settings.shielded_by,
            allocation=self._shared.allocations.tenants.get(key.name, TenantAllocation()),
            free_by_type=self._shared.allocations.free_by_type,
            pools=tuple(self._shared.caches.pools.items.values()),
            rates=rates_of(self._shared.caches.pools.items.values()),
            energy_joules=self._shared.energy_total(
                found.metadata.uid, found.status.usage if found.status is not None else None
            ),
            drawn_watts=self._shared.energy.watts(key.name),
            inference=self._shared.demand.account(key.name),
            lost=tuple(
                (
                    s.metadata.uid,
                    self._shared.caches.tenant_of.get(k.namespace, ""),
                    s.status.lost_work_caused,
                )
                for k, s in self._shared.caches.services.items.items()
                if s.status is not None and s.status.lost_work_caused is not None
            ),
            usage_period_s=self._shared.settings.usage_period_s,
            half_life_s=self._shared.settings.usage_half_life_s,
        )
        update = reconcile_tenant(view)
        await self._shared.writer.carry_out(update.actions)
        if update.status is not None:
            self._shared.energy_sent(found.metadata.uid, update.status.usage)
            self._told[key] = time.monotonic()
            await self._shared.writer.write_status(TENANTS, found, update.status)
        for reason, message in update.notices:
            self._shared.writer.notice(TENANTS, found, reason, message)
        self._shared.holds.look(key.name)
        return update.again_s

    def _waiting_jobs(self, tenant: Tenant) -> int | None:
        limits = tenant.spec.limits
        if limits is None or limits.waiting_jobs is None:
            return None
        spaces = set(tenant.spec.namespaces or ())
        return sum(
            job.metadata.namespace in spaces and waits_for_its_turn(job)
            for job in self._shared.caches.jobs.items.values()
        )

    def allocation_changed(self, key: Key, old: TenantAllocation | None, new: TenantAllocation) -> None:
        """Queues a tenant whose allocation changed; where it holds what it held, when its counts may be written again."""
        if old == new:
            return
        item = Item("Tenant", key)
        left_s = self._told.get(key, float("-inf")) + TENANT_COUNTS_S - time.monotonic()
        if left_s > 0 and old is not None and old.holds_as(new):
            self._shared.controller.queue.later(item, left_s)
        else:
            self._shared.controller.add(*item)

    async def reconcile_namespace(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        found = self._shared.caches.namespaces.items.get(key)
        if found is None:
            return None
        owner_of = self._shared.caches.tenant_of
        self._tenancy_seen(key.name, key.name in owner_of)
        ending = key.name not in owner_of and self._runs_in(key.name)
        actions = revoke(
            found,
            owner_of,
            self._shared.caches.bindings.items.values(),
            ()
            if ending
            else self._shared.caches.policies.items.values(),  # as long as our pods run, so does their shield
            self._shared.settings.shielded_by,
            self._shared.caches.quotas.items.values(),
        )
        await self._shared.writer.carry_out(tuple(actions))
        released = release(found, owner_of)
        if released is not None:
            await self._shared.writer.carry_out((released.apply,))
            self._shared.writer.put_notice(released.notice)
            log.info("namespace released", extra={"object": key.name})
        return ENDING_S if ending else None

    def _tenancy_seen(self, namespace: str, has_tenant: bool) -> None:
        """Queues the jobs and services of a namespace that lost its Tenant or got one."""
        if has_tenant == (namespace not in self._without_tenant):
            return
        (self._without_tenant.discard if has_tenant else self._without_tenant.add)(namespace)
        for cache in (self._shared.caches.jobs, self._shared.caches.services):
            for key in cache.items:
                if key.namespace == namespace:
                    self._shared.controller.add(cache.resource.kind, key)

    def _runs_in(self, namespace: str) -> bool:
        """Whether pods of our jobs and services run in the namespace."""
        pods = self._shared.caches.pods.items.values()
        return any(p.kind and p.key.namespace == namespace and not p.ended for p in pods)
