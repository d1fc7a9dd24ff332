"""AcceleratorPools and Nodes as the scheduler sees them: which pool a node belongs to, its capacity, its topology."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from busbar.kube.types import AcceleratorPool, quantity
from busbar.kube.types.accelerator_pool import AcceleratorPoolSpec
from busbar.kube.types.shape import Domain
from busbar.operator.watch.projections import Node, Requests
from busbar.scheduler import Node as SNode
from busbar.scheduler import Pool, Resources, Taint, Toleration
from busbar.scheduler.fit.accelerators import accelerator

TOPOLOGY: Mapping[Domain, tuple[str, ...]] = {
    Domain.ZONE: ("topology.kubernetes.io/zone",),
    Domain.NETWORK: ("busbar.dev/network",),
    Domain.RACK: ("topology.kubernetes.io/rack", "network.topology.nvidia.com/leaf"),
    Domain.NVLINK: ("network.topology.nvidia.com/accelerator", "nvidia.com/gpu.clique"),
}
"""The tree of domains, outermost first, and the node labels that name each; the first label found counts. The node
itself is the innermost. At a level without a label the node is in no domain."""


CORES_M = 1000
"""Of a pod on other accelerators that names no CPU, for each of them: without a request it would get what others leave."""
DISCOVERED = "busbar.dev/discovered"
"""Label of the pools that discovery.py has made."""


def pools_selecting(node: Node, pools: Iterable[AcceleratorPool]) -> list[AcceleratorPool]:
    """The pools that select a node. It belongs to the first: those that people made come before discovered ones, then
    those with more labels, then by name."""
    labels = set(node.labels)
    matching = [p for p in pools if set(p.spec.node_selector.items()) <= labels]
    return sorted(
        matching, key=lambda p: (DISCOVERED in p.metadata.labels, -len(p.spec.node_selector), p.metadata.name)
    )


def pool_of_node(node: Node, pools: Iterable[AcceleratorPool]) -> AcceleratorPool | None:
    """The pool that a node belongs to, if any."""
    return next(iter(pools_selecting(node, pools)), None)


class NodePools:
    """Remembers each node's pool as long as the node and the pools are the same."""

    def __init__(self) -> None:
        self._pools: tuple[AcceleratorPool, ...] = ()
        self._of: dict[str, tuple[Node, AcceleratorPool | None]] = {}

    def use(self, pools: tuple[AcceleratorPool, ...]) -> None:
        """These are the pools from now on."""
        if pools != self._pools:
            self._pools, self._of = pools, {}

    def pool(self, node: Node) -> AcceleratorPool | None:
        known = self._of.get(node.name)
        if known is None or known[0] is not node:
            known = self._of[node.name] = node, pool_of_node(node, self._pools)
        return known[1]

    def resource(self, node: Node) -> str:
        """The name under which pods request the node's accelerators; "": it is in no pool."""
        pool = self.pool(node)
        return pool.spec.resource_name if pool is not None else ""


def unit_m(pool: AcceleratorPool) -> int:
    """Millicores of one accelerator of a CPU pool."""
    return max(1, quantity.to_millis(pool.spec.unit)) if pool.spec.is_cpu else 1000


def scheduler_pool(pool: AcceleratorPool) -> Pool:
    """The pool as the scheduler sees it."""
    spec = pool.spec
    reserved = spec.reserved or {}
    cpu_m = quantity.to_millis(reserved.get("cpu", 0))
    kept = Resources(
        accelerators_m=0 if spec.is_cpu else quantity.to_millis(reserved.get(spec.resource_name, 0)),
        cpu_m=cpu_m,
        memory_mib=quantity.to_mib(reserved.get("memory")),
        ephemeral_mib=quantity.to_mib(reserved.get("ephemeral-storage")),
    )
    return Pool(
        name=pool.metadata.name,
        accelerator=spec.accelerator,
        resource_name=spec.resource_name,
        tenants=tuple(spec.tenants) if spec.tenants is not None else None,
        tolerations=tuple(
            Toleration(t.key, str(t.operator), t.value or "", str(t.effect or ""))
            for t in spec.tolerations or ()
        ),
        memory_mib=memory_mib(spec),
        price_per_hour=spec.price_per_hour,
        reserved=kept,
        unit_m=unit_m(pool),
        cpu_m=0 if spec.is_cpu else CORES_M,
        link=link_class(pool),
        runtime=spec.runtime_class_name or "",
        fabric="" if spec.fabric is None else spec.fabric.model_dump_json(by_alias=True, exclude_none=True),
    )


def memory_mib(spec: AcceleratorPoolSpec) -> int:
    """Of one accelerator: as stated, or else by its type's data sheet; 0: that is not known, or it is the host's."""
    if spec.is_cpu:
        return 0
    known = accelerator(spec.accelerator) if spec.memory_gib is None else None
    return round((spec.memory_gib or 0.0) * 1024) if known is None else known.memory_mib


def link_class(pool: AcceleratorPool) -> str:
    """The link class of a pool; "": none is stated."""
    return (pool.spec.interconnect.link_class if pool.spec.interconnect is not None else None) or ""


def lacks_fabric(node: Node, pool: AcceleratorPool) -> bool:
    """Whether a node of the pool has too few devices of its fabric for its accelerators."""
    count = node.device(pool.spec.resource_name)
    return any(node.device(name) < each * count for name, each in pool.spec.fabric_devices.items())


def scheduler_node(node: Node, pool: AcceleratorPool, others: Iterable[Requests]) -> SNode:
    """A node of a pool, with the capacity that others leave.

    Args:
        others: requests of the pods here whose use is not counted by a job of the snapshot.

    Of accelerators only as many count as the node has devices of the pool's fabric for.
    """
    others = tuple(others)
    name, labels = pool.spec.resource_name, dict(node.labels)
    devices = min(
        (node.device(device) - sum(r.device(device) for r in others)) // each
        for device, each in ((name, 1), *pool.spec.fabric_devices.items())
    )
    return SNode(
        name=node.name,
        pool=pool.metadata.name,
        capacity=Resources(
            accelerators_m=0 if name == "cpu" else max(0, devices) * 1000,
            cpu_m=max(0, node.cpu_m - sum(r.cpu_m for r in others)),
            memory_mib=max(0, node.memory_mib - sum(r.memory_mib for r in others)),
            ephemeral_mib=max(0, node.ephemeral_mib - sum(r.ephemeral_mib for r in others)),
        ),
        labels=node.labels,
        taints=tuple(Taint(*t) for t in node.taints),
        topology=tuple(next((labels[k] for k in keys if k in labels), "") for keys in TOPOLOGY.values()),
        ready=node.ready,
        cordoned=node.cordoned,
    )
