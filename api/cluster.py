"""What the cluster is made of, as far as a caller may know it: pools, nodes, speeds, tenants, models.

Admins (who may list Tenants) see everything. Everybody else sees pools that a tenant of theirs may use,
without the list of who else may; nodes of these pools, with amounts but no names of jobs or tenants; their
own tenants, without other people's usage.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from busbar.api.authorization import Authorizer
from busbar.api.identity import Caller
from busbar.api.kubernetes import Object
from busbar.api.objects import Objects
from busbar.api.operator_client import Snapshots
from busbar.api.profiles import classes_of, profile_for_member
from busbar.api.store import Store
from busbar.api.tenancy import Tenancy
from busbar.kube.resources import (
    ACCELERATOR_POOLS,
    MODEL_SERVICES,
    PERFORMANCE_PROFILES,
    TRAINING_JOBS,
)

if TYPE_CHECKING:
    from busbar.scheduler import Snapshot

TENANT_ONLY_FOR_ADMINS = ("members", "budgets")


@dataclass(frozen=True)
class NodeLoad:
    """One cell of the heat map. Amounts are accelerators."""

    name: str
    pool: str
    accelerator: str
    ready: bool
    capacity: float
    allocated: float

    @property
    def share(self) -> float:
        return min(1.0, self.allocated / self.capacity) if self.capacity else 0.0


@dataclass(frozen=True)
class Model:
    """A model that can be asked."""

    id: str
    namespace: str
    service: str
    tenant: str
    ready: bool
    phase: str
    replicas: int


class Cluster:
    """Reads of cluster-wide things, for callers."""

    def __init__(
        self, store: Store, tenancy: Tenancy, authorizer: Authorizer, objects: Objects, snapshots: Snapshots
    ) -> None:
        self._store = store
        self._tenancy = tenancy
        self._authorizer = authorizer
        self._objects = objects
        self._snapshots = snapshots

    async def pools(self, caller: Caller) -> list[Object]:
        """Pools the caller may know, by name."""
        pools = sorted(self._store.all(ACCELERATOR_POOLS), key=lambda p: str(p["metadata"]["name"]))
        if await self._authorizer.is_admin(caller):
            return pools
        mine = {m.tenant for m in self._tenancy.memberships(caller)}
        return [_pool_for_member(pool) for pool in pools if _usable(pool, mine)]

    async def profiles(self, caller: Caller) -> list[Object]:
        """Speeds of workload classes: all for admins, those of one's own jobs otherwise; by class."""
        found = sorted(
            self._store.all(PERFORMANCE_PROFILES),
            key=lambda p: (str(p["spec"].get("workloadClass")), str(p["metadata"]["name"])),
        )
        if await self._authorizer.is_admin(caller):
            return found
        classes = classes_of(await self._objects.listing(caller, TRAINING_JOBS))
        kinds = {str(pool["spec"]["accelerator"]) for pool in await self.pools(caller)}
        return [profile_for_member(p, kinds) for p in found if p["spec"].get("workloadClass") in classes]

    async def nodes(self, caller: Caller) -> list[NodeLoad]:
        """Load per node, of the pools the caller may know."""
        visible = {pool["metadata"]["name"] for pool in await self.pools(caller)}
        if not visible:
            return []
        loads = loads_of(await self._snapshots.current())
        return [load for load in loads if load.pool in visible]

    async def tenants(self, caller: Caller) -> list[Object]:
        """All tenants for admins, one's own otherwise."""
        if await self._authorizer.is_admin(caller):
            return self._tenancy.tenants()
        roles = {m.tenant: m.role for m in self._tenancy.memberships(caller)}
        return [
            tenant if roles[tenant["metadata"]["name"]] == "admin" else _tenant_for_member(tenant)
            for tenant in self._tenancy.tenants()
            if tenant["metadata"]["name"] in roles
        ]

    async def models(self, caller: Caller) -> list[Model]:
        """Services the caller may ask, by model id."""
        found = [
            Model(
                id=model_id(service),
                namespace=service["metadata"]["namespace"],
                service=service["metadata"]["name"],
                tenant=self._tenancy.tenant_of(service["metadata"]["namespace"]),
                ready=bool((service.get("status") or {}).get("readyReplicas")),
                phase=str((service.get("status") or {}).get("phase") or "Pending"),
                replicas=int((service.get("status") or {}).get("readyReplicas") or 0),
            )
            for service in await self._objects.listing(caller, MODEL_SERVICES)
        ]
        return sorted(found, key=lambda m: (m.id, m.namespace))

    async def namespaces(self, caller: Caller) -> list[str]:
        """Namespaces where the caller may create jobs, for the submit form."""
        if await self._authorizer.is_admin(caller):
            spaces = {n for t in self._tenancy.tenants() for n in (t["spec"].get("namespaces") or [])}
        else:
            spaces = {n for m in self._tenancy.memberships(caller) if m.may_write for n in m.namespaces}
        return [
            n for n in sorted(spaces) if await self._authorizer.allowed(caller, "create", TRAINING_JOBS, n)
        ]


def model_id(service: Object) -> str:
    """The name that clients use for a service's model."""
    status, spec = service.get("status") or {}, service.get("spec") or {}
    return str(status.get("modelId") or spec.get("modelId") or service["metadata"]["name"])


def loads_of(snapshot: Snapshot) -> list[NodeLoad]:
    """Capacity and allocation per node, from the scheduler's own view."""
    pools = {pool.name: pool for pool in snapshot.pools}
    used: dict[str, int] = defaultdict(int)
    for job in snapshot.jobs:
        if job.run is not None:
            for name in job.run.placement.nodes:
                used[name] += job.run.placement.per_pod.accelerators_m
    loads = []
    for node in snapshot.nodes:
        pool = pools.get(node.pool)
        if pool is None:
            continue
        capacity = (
            pool.cpu_accelerators_m(node.capacity.cpu_m) if pool.is_cpu else node.capacity.accelerators_m
        )
        loads.append(
            NodeLoad(
                node.name, node.pool, pool.accelerator, node.ready, capacity / 1000, used[node.name] / 1000
            )
        )
    return sorted(loads, key=lambda load: (load.pool, load.name))


def _usable(pool: Object, tenants: set[str]) -> bool:
    allowed = (pool.get("spec") or {}).get("tenants")
    return bool(tenants) and (allowed is None or bool(tenants & set(allowed)))


def _pool_for_member(pool: Object) -> Object:
    spec = {key: value for key, value in pool["spec"].items() if key != "tenants"}
    meta: dict[str, Any] = {
        key: pool["metadata"][key] for key in ("name", "uid", "creationTimestamp") if key in pool["metadata"]
    }
    return {**pool, "metadata": meta, "spec": spec}


def _tenant_for_member(tenant: Object) -> Object:
    spec = {key: value for key, value in tenant["spec"].items() if key not in TENANT_ONLY_FOR_ADMINS}
    meta: dict[str, Any] = {
        key: tenant["metadata"][key]
        for key in ("name", "uid", "creationTimestamp")
        if key in tenant["metadata"]
    }
    return {**tenant, "metadata": meta, "spec": spec}
