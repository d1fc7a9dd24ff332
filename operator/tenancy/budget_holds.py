"""What a spent budget holds or stops: tells why, and has all of its tenant looked at when that changes."""

from __future__ import annotations

from collections.abc import Callable

from busbar.kube.informer import Key
from busbar.operator.accounting.budgets import FREE, Hold, hold
from busbar.operator.pods.foreign_pods import is_claim
from busbar.operator.queue.controller import Controller
from busbar.operator.steady_clock import utc_now
from busbar.operator.watch.caches import Caches


class BudgetHolds:
    """Of all tenants. `wake` asks for a scheduling round."""

    def __init__(self, caches: Caches, controller: Controller, wake: Callable[[], None]) -> None:
        self._caches, self._controller, self._wake = caches, controller, wake
        self._known: dict[str, Hold] = {}  # by tenant, those that are held

    def of_namespace(self, namespace: str) -> Hold:
        """What its tenant's budgets do to work there now."""
        return self._of_tenant(self._caches.tenant_of.get(namespace, ""))

    def look(self, name: str) -> None:
        """To be called with each reconcile of a tenant, and when it is gone: queues what is in its namespaces
        where its budget begins to hold or stop it, or no longer does."""
        found = self._of_tenant(name)
        if found == self._known.get(name, FREE):
            return
        self._known[name] = found
        if found == FREE:
            del self._known[name]
        tenant = self._caches.tenants.items.get(Key("", name))
        spaces = set(tenant.spec.namespaces or ()) if tenant is not None else set()
        for cache in (self._caches.jobs, self._caches.services):
            for key in cache.items:
                if key.namespace in spaces:
                    self._controller.add(cache.resource.kind, key)
        for pod in self._caches.pods.items.values():
            if pod.gated and pod.key.namespace in spaces and is_claim(pod):
                self._controller.add("Pod", pod.key)
        self._wake()

    def _of_tenant(self, name: str) -> Hold:
        tenant = self._caches.tenants.items.get(Key("", name))
        return hold(tenant, utc_now()) if tenant is not None and tenant.spec.budgets else FREE
