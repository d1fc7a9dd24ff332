"""One cache per kind, and the few indexes that decisions need.

Our kinds are fed by Kopf's watch (``observe``/``forget``), by a list at the start and at each resync, and
by the answers to our own writes. Pods, Nodes, Namespaces, RoleBindings, NetworkPolicies, ResourceQuotas,
PersistentVolumeClaims and opted-in Jobs come through our own informers. The caches decide nothing; ``on_change`` is called with each object
that changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from busbar.kube.client import KubeClient, Object
from busbar.kube.errors import ApiError, ConnectionFailed, NotFound
from busbar.kube.informer import Cache, Informer, Key, key_of
from busbar.kube.resources import (
    ACCELERATOR_POOLS,
    JOBS,
    MODEL_SERVICES,
    NAMESPACES,
    NETWORK_POLICIES,
    NODES,
    PERFORMANCE_PROFILES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    POWER_DOMAINS,
    RESOURCE_QUOTAS,
    ROLE_BINDINGS,
    TENANTS,
    TRAINING_JOBS,
    Resource,
)
from busbar.kube.types import (
    AcceleratorPool,
    ModelService,
    PerformanceProfile,
    PowerDomain,
    Tenant,
    TrainingJob,
)
from busbar.kube.types.lost_work import ChargedLoss, Loss
from busbar.kube.types.meta import LABEL_QUEUE, share_equal_parts
from busbar.kube.types.meta import Resource as Model
from busbar.operator.watch.projections import Node, Pod, project_node, project_pod
from busbar.operator.watch.small_projections import (
    BatchJobSeen,
    BindingSeen,
    NamespaceSeen,
    PolicySeen,
    QuotaSeen,
    VolumeClaimSeen,
    project_batch_job,
    project_binding,
    project_namespace,
    project_policy,
    project_quota,
    project_volume_claim,
)

log = logging.getLogger(__name__)

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_SELECTOR = f"{MANAGED_BY}=busbar"


Changed = Callable[[str, Key, Any, Any], None]
"""(kind, key, old, new)"""


class Caches:
    """See the module's head."""

    def __init__(self, client: KubeClient, on_change: Changed, *, inactivity_s: float) -> None:
        self._client, self._on_change = client, on_change
        self.jobs: Cache[TrainingJob] = self._cache(TRAINING_JOBS, TrainingJob)
        self.services: Cache[ModelService] = self._cache(MODEL_SERVICES, ModelService)
        self.pools: Cache[AcceleratorPool] = self._cache(ACCELERATOR_POOLS, AcceleratorPool)
        self.tenants: Cache[Tenant] = self._cache(TENANTS, Tenant)
        self.profiles: Cache[PerformanceProfile] = self._cache(PERFORMANCE_PROFILES, PerformanceProfile)
        self.power_domains: Cache[PowerDomain] = self._cache(POWER_DOMAINS, PowerDomain)
        self.telling: frozenset[str] = frozenset()
        """Nodes of which it is known which pods hold which board: no object says it, and the keeper of the power domains sets it."""
        self._tenant_of: Mapping[str, str] | None = None  # None: a tenant has changed
        self._owned: dict[tuple[str, Key], dict[Key, None]] = {}
        self._charged: dict[str, dict[str, tuple[str, ChargedLoss]]] = {}
        self._gone_pods: dict[
            str, tuple[int, frozenset[str]]
        ] = {}  # by the owner's uid: of which attempt, and their names
        """By the uid of a job: the newest attempt of which this process saw a pod that is gone."""

        def changed(kind: str) -> Callable[[Key, Any, Any], None]:
            return lambda key, old, new: on_change(kind, key, old, new)

        self.pods: Informer[Pod] = Informer(
            client, PODS, project_pod, self._pod_changed, inactivity_s=inactivity_s
        )
        self.nodes: Informer[Node] = Informer(
            client, NODES, project_node, changed("Node"), inactivity_s=inactivity_s
        )
        self.namespaces: Informer[NamespaceSeen] = Informer(
            client, NAMESPACES, project_namespace, changed("Namespace"), inactivity_s=inactivity_s
        )
        self.bindings: Informer[BindingSeen] = Informer(
            client, ROLE_BINDINGS, project_binding, changed("RoleBinding"),
            label_selector=MANAGED_SELECTOR, inactivity_s=inactivity_s,
        )  # fmt: skip
        self.policies: Informer[PolicySeen] = Informer(
            client, NETWORK_POLICIES, project_policy, changed("NetworkPolicy"),
            label_selector=MANAGED_SELECTOR, inactivity_s=inactivity_s,
        )  # fmt: skip
        self.quotas: Informer[QuotaSeen] = Informer(
            client, RESOURCE_QUOTAS, project_quota, changed("ResourceQuota"),
            label_selector=MANAGED_SELECTOR, inactivity_s=inactivity_s,
        )  # fmt: skip
        self.volume_claims: Informer[VolumeClaimSeen] = Informer(
            client, PERSISTENT_VOLUME_CLAIMS, project_volume_claim, changed("PersistentVolumeClaim"),
            inactivity_s=inactivity_s,
        )  # fmt: skip
        self.batch_jobs: Informer[BatchJobSeen] = Informer(
            client, JOBS, project_batch_job, changed("Job"),
            label_selector=f"{LABEL_QUEUE}=true", inactivity_s=inactivity_s,
        )  # fmt: skip

    @property
    def informers(self) -> tuple[Informer[Any], ...]:
        return (
            self.pods,
            self.nodes,
            self.namespaces,
            self.bindings,
            self.policies,
            self.quotas,
            self.volume_claims,
            self.batch_jobs,
        )

    @property
    def ours(self) -> tuple[Cache[Any], ...]:
        return (self.jobs, self.services, self.pools, self.tenants, self.profiles, self.power_domains)

    def by_kind(self) -> dict[str, Cache[Any]]:
        return {c.resource.kind: c for c in (*self.ours, *self.informers)}

    async def read_again(self, kind: str, key: Key) -> bool:
        """Reads one object from the server, without waiting for its watch; False: there was no answer."""
        cache = self.by_kind()[kind]
        try:
            cache.observe(await self._client.get(cache.resource, key.name, key.namespace or None))
        except NotFound:
            cache.forget(key)
        except (ApiError, ConnectionFailed) as error:
            log.warning("%s %s was not read: %s", kind, key, error)
            return False
        return True

    @property
    def tenant_of(self) -> Mapping[str, str]:
        """Namespace to tenant name, see `tenant_of_namespace`."""
        if self._tenant_of is None:
            self._tenant_of = tenant_of_namespace(self.tenants.items.values())
        return self._tenant_of

    def tenant(self, namespace: str) -> str:
        """The name of the namespace's tenant; empty where it has none."""
        return self.tenant_of.get(namespace, "")

    def owner(self, kind: str, key: Key) -> Model | None:
        """The job or service with this key, by the name of its kind."""
        cache: Cache[Any] = self.jobs if kind == TRAINING_JOBS.kind else self.services
        found: Model | None = cache.items.get(key)
        return found

    def pods_named(self, pod: Pod) -> int:
        """How many pods carry the same label of kind and the same owner's name."""
        return len(self._owned.get((pod.kind, Key(pod.key.namespace, pod.job)), ()))

    def named_pods(self, kind: str, key: Key) -> list[Key]:
        """The pods that carry this label of kind and this owner's name, whoever made them."""
        return list(self._owned.get((kind, key), ()))

    def owned_pods(self, kind: str, owner: Model) -> tuple[Pod, ...]:
        """The pods that this very object made; those of an earlier object of the name are not among them."""
        key = Key(owner.metadata.namespace or "", owner.metadata.name)
        found = (self.pods.items.get(k) for k in self._owned.get((kind, key), ()))
        return tuple(
            sorted(
                (p for p in found if p is not None and p.owner_uid == owner.metadata.uid),
                key=lambda p: (p.attempt, p.rank),
            )
        )

    def _pod_changed(self, key: Key, old: Pod | None, new: Pod | None) -> None:
        for pod, present in ((old, False), (new, True)):
            if pod is None or not pod.kind:
                continue
            owner = (pod.kind, Key(pod.key.namespace, pod.job))
            if present:
                self._owned.setdefault(owner, {})[key] = None
            else:
                held = self._owned.get(owner)
                if held is not None:
                    held.pop(key, None)
                    if not held:
                        del self._owned[owner]
        if old is not None and new is None:
            self._lose(old)
        self._on_change("Pod", key, old, new)

    def _lose(self, pod: Pod) -> None:
        """A job's deletion may be heard after the deletion of its pods, so its reconcile has to know of these."""
        job = self.jobs.items.get(Key(pod.key.namespace, pod.job))
        if job is not None and job.metadata.uid == pod.owner_uid:
            attempt, names = self._gone_pods.get(pod.owner_uid, (0, frozenset()))
            if pod.attempt > attempt:
                self._gone_pods[pod.owner_uid] = pod.attempt, frozenset({pod.key.name})
            elif pod.attempt == attempt:
                self._gone_pods[pod.owner_uid] = attempt, names | {pod.key.name}

    def gone_pods(self, uid: str) -> frozenset[str]:
        """Names of pods of the object's newest attempt that were seen and are gone."""
        return self._gone_pods.get(uid, (0, frozenset()))[1]

    def _own_changed(self, kind: str, key: Key, old: Any, new: Any) -> None:
        if old is not None and (new is None or new.metadata.uid != old.metadata.uid):
            self._gone_pods.pop(old.metadata.uid, None)
        if kind == TENANTS.kind:
            self._tenant_of = None
        if kind == TRAINING_JOBS.kind:
            self._charge(old, new)
        self._on_change(kind, key, old, new)

    def _charge(self, old: TrainingJob | None, new: TrainingJob | None) -> None:
        for job, present in ((old, False), (new, True)):
            for entry in _charged(job):
                assert job is not None
                by_job = self._charged.setdefault(entry.uid, {})
                if present:
                    by_job[job.metadata.uid] = job.metadata.namespace or "", entry
                else:
                    by_job.pop(job.metadata.uid, None)

    def charged_to(self, service: str) -> dict[str, tuple[str, Loss]]:
        """What jobs that exist have lost to replicas of a service, by the job's uid, with the job's tenant.

        Args:
            service: its uid.
        """
        found = self._charged.get(service, {})
        return {uid: (self.tenant_of.get(namespace, ""), loss) for uid, (namespace, loss) in found.items()}

    def _cache(self, resource: Resource, model: type[Any]) -> Cache[Any]:
        made: Cache[Any] = Cache(
            resource,
            lambda obj: _read(resource, model, obj, made.items.get(key_of(obj))),
            lambda key, old, new: self._own_changed(resource.kind, key, old, new),
        )
        return made


def _charged(job: TrainingJob | None) -> Iterable[ChargedLoss]:
    lost = job.status.lost_work if job is not None and job.status is not None else None
    return (lost.charged if lost is not None else None) or ()


def _read(resource: Resource, model: type[Any], obj: Object, old: Any) -> Any:
    """The projection of our own kinds: the model, or None where an object does not match it.

    An object of the same generation has the same spec, so that is not read again: most changes are of the status.
    """
    meta = obj["metadata"]
    seen = (old.metadata.uid, old.metadata.generation) if old is not None else None
    spec = None
    if seen == (meta.get("uid"), meta.get("generation")):
        spec = old.spec
        obj = {**obj, "spec": spec}
    try:
        made = model.model_validate(obj)
    except ValidationError as error:
        log.warning(
            "%s %s/%s is left alone: it does not match this version's schema: %s",
            resource.kind, meta.get("namespace", ""), meta["name"], error.errors(include_url=False)[:3],
        )  # fmt: skip
        return None
    share_equal_parts(made, done=spec)
    return made


def tenant_of_namespace(tenants: Iterable[Tenant]) -> dict[str, str]:
    """Namespace to tenant name; a namespace claimed twice belongs to the tenant that was made first."""
    owner: dict[str, str] = {}
    for tenant in sorted(tenants, key=_age):
        for namespace in tenant.spec.namespaces or ():
            owner.setdefault(namespace, tenant.metadata.name)
    return owner


def _age(tenant: Tenant) -> tuple[float, str]:
    made = tenant.metadata.creation_timestamp
    return (made.timestamp() if made is not None else 0.0, tenant.metadata.name)
