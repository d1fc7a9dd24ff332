"""Pools, nodes, speeds, tenants and models, as far as a caller may see them.

Admins (who may list Tenants) see everything. Everybody else sees pools that a tenant of theirs may use,
without the list of who else may; nodes of these pools, with amounts but no names of jobs or tenants; their
own tenants, without other people's usage.
"""

from __future__ import annotations

from dataclasses import dataclass

from busbar.api.access.authorization import Authorizer
from busbar.api.access.identity import Caller
from busbar.api.access.tenancy import Tenancy
from busbar.api.kubernetes.store import Store
from busbar.api.objects.objects import Objects
from busbar.api.objects.operator_client import Operator
from busbar.api.objects.profiles import classes_of, identity_of, profile_for_member, served_classes, without
from busbar.kube.contracts.preview import NodeLoad
from busbar.kube.resources import TRAINING_JOBS
from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile, Tenant, TrainingJob
from busbar.kube.types.service_status import ModelServiceStatus, ServicePhase
from busbar.kube.types.tenant import Role

POOL_ONLY_FOR_ADMINS = {"tenants"}
TENANT_ONLY_FOR_ADMINS = {"members", "budgets"}


@dataclass(frozen=True)
class Model:
    """A served model."""

    id: str
    namespace: str
    service: str
    tenant: str
    ready: bool
    phase: str
    replicas: int


class Cluster:
    """Reads cluster-wide objects for callers."""

    def __init__(
        self, store: Store, tenancy: Tenancy, authorizer: Authorizer, objects: Objects, operator: Operator
    ) -> None:
        self._store = store
        self._tenancy = tenancy
        self._authorizer = authorizer
        self._objects = objects
        self._operator = operator

    async def pools(self, caller: Caller) -> list[AcceleratorPool]:
        """Pools that the caller may see, sorted by name."""
        pools = sorted(self._store.all(AcceleratorPool), key=lambda p: p.metadata.name)
        if await self._authorizer.is_admin(caller):
            return pools
        mine = {m.tenant for m in self._tenancy.memberships(caller)}
        return [_pool_for_member(pool) for pool in pools if usable(pool, mine)]

    async def profiles(self, caller: Caller) -> list[PerformanceProfile]:
        """Speeds of workload classes, sorted by class: all for admins, those of their own jobs' classes for
        others."""
        found = sorted(
            self._store.all(PerformanceProfile), key=lambda p: (p.spec.workload_class, p.metadata.name)
        )
        if await self._authorizer.is_admin(caller):
            return found
        jobs = await self._objects.listing(caller, TrainingJob)
        services = await self._objects.listing(caller, ModelService)
        classes = classes_of(jobs) | served_classes(services)
        kinds = {pool.spec.accelerator for pool in await self.pools(caller)}
        return [profile_for_member(p, kinds) for p in found if p.spec.workload_class in classes]

    async def nodes(self, caller: Caller) -> list[NodeLoad]:
        """Load per node of the pools that the caller may see."""
        visible = {pool.metadata.name for pool in await self.pools(caller)}
        if not visible:
            return []
        return [load for load in await self._operator.nodes() if load.pool in visible]

    async def tenants(self, caller: Caller) -> list[Tenant]:
        """All tenants for admins, one's own otherwise."""
        if await self._authorizer.is_admin(caller):
            return self._tenancy.tenants()
        roles = {m.tenant: m.role for m in self._tenancy.memberships(caller)}
        return [
            tenant if roles[tenant.metadata.name] == Role.ADMIN else _tenant_for_member(tenant)
            for tenant in self._tenancy.tenants()
            if tenant.metadata.name in roles
        ]

    async def models(self, caller: Caller) -> list[Model]:
        """Services that the caller may use, sorted by model id."""
        found = [
            self._model(service, service.status or ModelServiceStatus())
            for service in await self._objects.listing(caller, ModelService)
        ]
        return sorted(found, key=lambda m: (m.id, m.namespace))

    def _model(self, service: ModelService, status: ModelServiceStatus) -> Model:
        namespace, ready = service.metadata.namespace or "", status.ready_replicas or 0
        return Model(
            id=model_id(service),
            namespace=namespace,
            service=service.metadata.name,
            tenant=self._tenancy.tenant_of(namespace),
            ready=ready > 0,
            phase=(status.phase or ServicePhase.PENDING).value,
            replicas=ready,
        )

    async def namespaces(self, caller: Caller) -> list[str]:
        """Namespaces where the caller may create jobs, for the submit form."""
        if await self._authorizer.is_admin(caller):
            spaces = {n for t in self._tenancy.tenants() for n in t.spec.namespaces or ()}
        else:
            spaces = {n for m in self._tenancy.memberships(caller) if m.may_write for n in m.namespaces}
        return [
            n for n in sorted(spaces) if await self._authorizer.allowed(caller, "create", TRAINING_JOBS, n)
        ]


def model_id(service: ModelService) -> str:
    """The name that clients use for a service's model."""
    told = service.status.model_id if service.status is not None else None
    return told or service.spec.model_id or service.metadata.name


def usable(pool: AcceleratorPool, tenants: set[str]) -> bool:
    """Whether one of these tenants may use the pool."""
    allowed = pool.spec.tenants
    return bool(tenants) and (allowed is None or bool(tenants & set(allowed)))


def _pool_for_member(pool: AcceleratorPool) -> AcceleratorPool:
    return pool.model_copy(
        update={"metadata": identity_of(pool.metadata), "spec": without(pool.spec, POOL_ONLY_FOR_ADMINS)}
    )


def _tenant_for_member(tenant: Tenant) -> Tenant:
    return tenant.model_copy(
        update={
            "metadata": identity_of(tenant.metadata),
            "spec": without(tenant.spec, TENANT_ONLY_FOR_ADMINS),
        }
    )
