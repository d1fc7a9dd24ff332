"""Which replicas answer for which service: the document that the gateway streams from us."""

from __future__ import annotations

from collections.abc import Iterable

from busbar.kube.contracts.routes import Endpoint, Routes, ServiceRoute
from busbar.kube.contracts.workload import bearer_for
from busbar.kube.informer import Key
from busbar.operator.errors import ProbeRefused
from busbar.operator.pods import Node, Pod
from busbar.operator.podspec import KIND_SERVICE
from busbar.operator.prober import address_of
from busbar.operator.world import World, tenant_of_namespace


def build_routes(world: World, workload_key: bytes, revision: int, pod_cidrs: Iterable[str] = ()) -> Routes:
    """The whole document as of now."""
    tenant_of = tenant_of_namespace(world.tenants.items.values())
    services: list[ServiceRoute] = []
    for key, service in sorted(world.services.items.items()):
        if service.metadata.deletion_timestamp is not None:
            continue
        spec, status = service.spec, service.status
        endpoints = [
            endpoint
            for pod in world.owned_pods(KIND_SERVICE, service)
            if (endpoint := _endpoint(pod, world.nodes.items, pod_cidrs)) is not None
        ]
        services.append(
            ServiceRoute(
                tenant=tenant_of.get(key.namespace, ""),
                namespace=key.namespace,
                name=key.name,
                uid=service.metadata.uid,
                model_id=spec.model_id or key.name,
                desired_replicas=(status.desired_replicas or 0) if status is not None else 0,
                ready_replicas=sum(e.ready for e in endpoints),
                suspended=spec.suspend,
                min_replicas=spec.min_replicas,
                max_replicas=spec.replica_ceiling,
                bearer=bearer_for(workload_key, service.metadata.uid),
                endpoints=endpoints,
            )
        )
    return Routes(revision=revision, services=services)


def _endpoint(pod: Pod, nodes: dict[Key, Node], pod_cidrs: Iterable[str]) -> Endpoint | None:
    if pod.ended or pod.phase != "Running":
        return None
    try:
        url = address_of(pod, nodes.get(Key("", pod.node)), pod_cidrs)
    except ProbeRefused:
        return None
    draining = pod.draining_since is not None or pod.deleting
    return Endpoint(pod=pod.key.name, url=url, ready=pod.ready and not draining, draining=draining)
