"""Which part of each node's boards the pods hold. Pure but for a memo.

What counts are the devices that pods request from the node's pool: the kubelet gives a board to one pod only, from
when the pod is bound until it has ended. Of slices (MIG) and shared boards it is the part of the node's devices.
Pods that request none pay for nothing there. On nodes of a CPU pool cores count in their place, for the host alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from busbar.kube.types import AcceleratorPool
from busbar.operator.energy.shares import NOBODY, Holder, Owner
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING
from busbar.operator.pools.nodes import pool_of_node
from busbar.operator.watch.projections import Node, Pod

KINDS = {KIND_TRAINING: "job", KIND_SERVICE: "service"}


class Holders:
    """Remembers each node's resource as long as the node and the pools are the same."""

    def __init__(self) -> None:
        self._pools: tuple[AcceleratorPool, ...] = ()
        self._resources: dict[str, tuple[Node, str]] = {}

    def of(
        self,
        nodes: Mapping[str, Node],
        pods: Iterable[Pod],
        pools: tuple[AcceleratorPool, ...],
        tenant_of: Mapping[str, str],
    ) -> dict[str, list[Holder]]:
        """By node; nodes of no pool have no holders.

        Args:
            nodes: those that are metered, by name.
            tenant_of: tenants by namespace.
        """
        if pools != self._pools:
            self._pools, self._resources = pools, {}
        found: dict[str, list[Holder]] = {}
        for pod in pods:
            node = nodes.get(pod.node)
            if node is None or pod.ended:
                continue
            boards, host = _parts(pod, node, self._resource(node))
            if host > 0:
                found.setdefault(node.name, []).append(Holder(_owner(pod, tenant_of), boards, host))
        return found

    def _resource(self, node: Node) -> str:
        known = self._resources.get(node.name)
        if known is None or known[0] is not node:
            pool = pool_of_node(node, self._pools)
            known = self._resources[node.name] = node, pool.spec.resource_name if pool is not None else ""
        return known[1]


def _parts(pod: Pod, node: Node, resource: str) -> tuple[float, float]:
    """The parts of the boards and of the host."""
    if resource == "cpu":
        return 0.0, pod.requests.cpu_m / node.cpu_m if node.cpu_m else 0.0
    devices = node.device(resource)
    part = pod.requests.device(resource) / devices if devices else 0.0
    return part, part


def _owner(pod: Pod, tenant_of: Mapping[str, str]) -> Owner:
    tenant = tenant_of.get(pod.key.namespace, "")
    if not tenant:
        return NOBODY
    kind = KINDS.get(pod.kind, "pod")
    return Owner(tenant, kind, pod.owner_uid if kind != "pod" else "")
