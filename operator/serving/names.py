"""Names of replicas that other pods have: such a replica cannot be made, and its service must say why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from busbar.kube.informer import Key
from busbar.kube.types import ModelService
from busbar.operator.pods.manifests import KIND_SERVICE
from busbar.operator.pods.replica_pods import service_pod_name
from busbar.operator.watch.projections import Pod


def holders(
    service: ModelService, wanted: Iterable[int], own: Iterable[Pod], pods: Mapping[Key, Pod]
) -> dict[int, Pod]:
    """By replica number: pods with the name of a wanted replica that this service did not make.

    Args:
        wanted: the numbers of the replicas that should exist.
        own: the service's pods.
        pods: all pods of the cluster.
    """
    meta = service.metadata
    found: dict[int, Pod] = {}
    for index in sorted(set(wanted) - {pod.rank for pod in own}):
        pod = pods.get(Key(meta.namespace or "", service_pod_name(meta.name, index)))
        if pod is not None and pod.owner_uid != meta.uid:
            found[index] = pod
    return found


def taken(service: ModelService, held: Mapping[int, Pod]) -> str:
    """The sentence about the first of them; empty where there is none."""
    if not held:
        return ""
    pod = held[min(held)]
    owner = pod.owner or "nobody"
    if pod.kind == KIND_SERVICE and pod.job == service.metadata.name:
        owner = f"an earlier service named {pod.job}"
    elif pod.kind:
        owner = pod.job
    return f"pod {pod.key.name} exists already and belongs to {owner}."
