"""What is reconciled after an object changed: the object itself, and every other whose reconcile depends on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from busbar.kube.informer import Key
from busbar.kube.types import PowerDomain, TrainingJob
from busbar.operator.forecasts.job_history import JobHistory
from busbar.operator.handlers.registered import Handlers
from busbar.operator.pods.foreign_pods import is_claim
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING
from busbar.operator.pods.orphans import OWNERS, Reaper
from busbar.operator.pods.volume_claims import claims_of_job
from busbar.operator.queue.controller import Controller, Item
from busbar.operator.scheduling.rounds import Rounds
from busbar.operator.scheduling.wakes import matters
from busbar.operator.steady_clock import utc_now
from busbar.operator.tenancy.reconcile import COUNTS_S
from busbar.operator.watch.caches import Caches
from busbar.operator.watch.projections import Node, Pod
from busbar.operator.watch.small_projections import QuotaSeen

OWNER_KIND = {label: resource.kind for label, resource in OWNERS.items()}
FEW_PODS = 8
"""Jobs with as many pods are reconciled at each event of one."""
GATHER_S, MOST_GATHER_S = 0.001, 0.2
"""Others so much later for each of their pods: a reconcile reads all of them, and they start and end together."""

Rule = Callable[[Key, Any, Any], None]


class Changes:
    """Queues what depends on a changed object. ``synced``: whether all kinds have been listed; ``routes``: to be
    called when what the gateways know may have changed."""

    def __init__(
        self,
        caches: Caches,
        controller: Controller,
        rounds: Rounds,
        handlers: Handlers,
        reaper: Reaper,
        history: JobHistory,
        synced: Callable[[], bool],
        routes: Callable[[], None],
    ) -> None:
        self._caches, self._controller, self._rounds = caches, controller, rounds
        self._handlers, self._reaper, self._history = handlers, reaper, history
        self._synced, self._routes = synced, routes
        self._rules: dict[str, tuple[Rule, ...]] = {
            "Node": (self._devices, self._node_power, self._silence, self._routes_of),
            "AcceleratorPool": (self._devices,),
            "PowerDomain": (self._domain_power,),
            "ModelService": (self._routes_of, partial(self._orphans, KIND_SERVICE)),
            "Tenant": (self._routes_of, self._tenancy_of_tenant),
            "Namespace": (self._tenancy,),
            "RoleBinding": (self._tenancy,),
            "NetworkPolicy": (self._tenancy,),
            "ResourceQuota": (self._quota,),
            "TrainingJob": (
                partial(self._orphans, KIND_TRAINING),
                self._classes,
                self._remember,
                self._wake_services_of,
            ),
        }
        """What else a change of a kind does, in this order."""

    def see(self, kind: str, key: Key, old: Any, new: Any) -> None:
        """A cached object changed from ``old`` to ``new``, each None where there is none."""
        if kind == "PersistentVolumeClaim":
            if self._synced() and (old is None or new is None):
                self._volume_claim(key)
            return
        self._rounds.changed(kind, key, new)
        if not self._synced():
            return
        frees = matters(kind, old, new)
        if frees:
            self._rounds.wake()
        if kind == "Pod":
            self._pod(key, old, new, frees)
            return
        self._controller.add(kind, key)
        for rule in self._rules.get(kind, ()):
            rule(key, old, new)

    def _pod(self, key: Key, old: Pod | None, new: Pod | None, frees: bool) -> None:
        pod = new or old
        if pod is not None and pod.kind in OWNER_KIND:
            self.owner_soon(pod, urgent=frees)
        if pod is not None and pod.kind == KIND_SERVICE:
            self._routes()
        if old is None and new is not None and new.gated and is_claim(new):
            self._controller.add("Pod", key)  # its tenant's budget may hold it
        if new is not None and self._reaper.is_stray(new):
            self._controller.add("Pod", key)
        elif old is not None and new is None:
            self._reaper.forget(old.uid)

    def _devices(self, key: Key, old: Any, new: Any) -> None:
        self._handlers.pools.undiscovered = True

    def _node_power(self, key: Key, old: Node | None, new: Node | None) -> None:
        self._handlers.power.node_changed(old, new)

    def _domain_power(self, key: Key, old: PowerDomain | None, new: PowerDomain | None) -> None:
        self._handlers.power.domain_changed(old, new)

    def _routes_of(self, key: Key, old: Any, new: Any) -> None:
        self._routes()

    def _classes(self, key: Key, old: TrainingJob | None, new: TrainingJob | None) -> None:
        self._handlers.profiles.job_changed(old, new)

    def _tenancy(self, key: Key, old: Any, new: Any) -> None:
        """Tenants compete for namespaces: a change of one can give a namespace to another."""
        for tenant in self._caches.tenants.items:
            self._controller.add("Tenant", tenant)
        for namespace in self._caches.namespaces.items:
            self._controller.add("Namespace", namespace)

    def _tenancy_of_tenant(self, key: Key, old: Any, new: Any) -> None:
        if matters("Tenant", old, new):
            self._tenancy(key, old, new)

    def _orphans(self, label: str, key: Key, old: Any, new: Any) -> None:
        """Queues the pods of a job or service that is gone, or about to go: they lost their owner."""
        if new is None or new.metadata.deletion_timestamp is not None:
            for pod_key in self._caches.named_pods(label, key):
                self._controller.add("Pod", pod_key)

    def _silence(self, key: Key, old: Node | None, new: Node | None) -> None:
        """Queues those whose pods are on a node that has ceased to answer, or does so again."""
        if (old.silent_since if old else None) == (new.silent_since if new else None):
            return
        for pod in self._caches.pods.items.values():
            if pod.place == key.name and pod.kind in OWNER_KIND:
                self.owner_soon(pod)

    def owner_soon(self, pod: Pod, *, urgent: bool = False) -> None:
        """Queues the pod's job or service; one of many pods a moment later, together with what the others do then.

        Where the pod frees something, its owner's status has to say so before a waiting job gets it: that goes first.
        """
        item = Item(OWNER_KIND[pod.kind], Key(pod.key.namespace, pod.job))
        pods = self._caches.pods_named(pod)
        if pods <= FEW_PODS:
            self._controller.add(*item, urgent=urgent)
        else:
            self._controller.queue.later(item, min(MOST_GATHER_S, pods * GATHER_S))

    def _volume_claim(self, key: Key) -> None:
        """A claim is there or gone: queues what waits for it, and what would have mounted it."""
        for job_key, job in self._caches.jobs.items.items():
            if job_key.namespace == key.namespace and key.name in claims_of_job(job):
                self._controller.add("TrainingJob", job_key)
        for service in self._caches.services.items:
            if service.namespace == key.namespace:
                self._controller.add("ModelService", service)

    def _quota(self, key: Key, old: QuotaSeen | None, new: QuotaSeen | None) -> None:
        """Restores it at once; what Kubernetes counted is told a little later, as it changes with every pod."""
        tenant = Key("", self._caches.tenant(key.namespace))
        if old is not None and new is not None and old.limits == new.limits:
            self._controller.queue.later(Item("Tenant", tenant), COUNTS_S)
        else:
            self._controller.add("Namespace", Key("", key.namespace))
            self._controller.add("Tenant", tenant)

    def _remember(self, key: Key, old: TrainingJob | None, new: TrainingJob | None) -> None:
        """Keeps what the forecasts need to know of a job that ended or started."""
        if new is not None:
            self._history.observe(new, self._caches.tenant)
        elif old is not None:
            self._history.forget(old, self._caches.tenant, utc_now())

    def _wake_services_of(self, key: Key, old: Any, new: Any) -> None:
        """Queues the services that serve this job's output: they can start once it has succeeded."""
        before = old.status.phase if old is not None and old.status is not None else None
        after = new.status.phase if new is not None and new.status is not None else None
        if before == after:
            return
        for service_key, service in self._caches.services.items.items():
            if service_key.namespace == key.namespace and service.spec.model.training_job == key.name:
                self._controller.add("ModelService", service_key)
