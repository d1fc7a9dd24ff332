"""Makes pools for devices that no pool covers.

A node that offers a known device, and that no pool selects, gets a pool made from its labels (those that the GPU
operator's feature discovery sets). Such a pool carries the label ``busbar.dev/discovered``; to change
it, people make their own, which takes the nodes that it selects, or edit it: the operator never writes it again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from busbar.kube.informer import Key
from busbar.kube.resources import ACCELERATOR_POOLS
from busbar.kube.types import AcceleratorPool
from busbar.operator.pools.nodes import DISCOVERED, pool_of_node
from busbar.operator.watch.projections import Node
from busbar.operator.write.actions import Create
from busbar.scheduler.fit.accelerators import type_of_product

PRODUCT_LABELS = {"nvidia.com/gpu": "nvidia.com/gpu.product", "amd.com/gpu": "amd.com/gpu.product-name"}
MEMORY_LABEL = "nvidia.com/gpu.memory"  # MiB
_MODEL = re.compile(r"\b(RTX-)?(GH\d+|GB\d+|[A-Z]{1,2}\d{1,4}[A-Z]?|MI\d+[A-Z]?|RTX-?\d+)\b")


def discover(nodes: Iterable[Node], pools: Iterable[AcceleratorPool]) -> list[Create]:
    """Pools for known devices that no pool covers; none where a pool of that name exists, which somebody has edited."""
    pools = tuple(pools)
    taken = {p.metadata.name for p in pools}
    found: dict[str, Create] = {}
    for node in sorted(nodes, key=lambda n: n.name):
        labels = dict(node.labels)
        for resource_name, label in PRODUCT_LABELS.items():
            product = labels.get(label)
            if not product or not node.device(resource_name) or pool_of_node(node, pools) is not None:
                continue
            name = re.sub(r"[^a-z0-9]+", "-", product.lower()).strip("-")[:50]
            if name not in taken:
                found.setdefault(name, _pool(name, product, label, resource_name, labels, node))
    return list(found.values())


def accelerator_name(product: str) -> str:
    """The short type in a product's name: ``NVIDIA-H100-80GB-HBM3`` is an H100. That of its data sheet, as speeds and watts
    are known by it, where there is one."""
    known = type_of_product(product)
    if known:
        return known
    match = _MODEL.search(product.replace("_", "-").replace(" ", "-"))
    return match.group(0) if match else re.sub(r"[^A-Za-z0-9.-]+", "-", product).strip("-.")[:63]


def _pool(
    name: str, product: str, label: str, resource_name: str, labels: dict[str, str], node: Node
) -> Create:
    spec: dict[str, object] = {
        "accelerator": accelerator_name(product),
        "resourceName": resource_name,
        "nodeSelector": {label: product},
    }
    memory = labels.get(MEMORY_LABEL, "")
    if memory.isdigit():
        spec["memoryGib"] = round(int(memory) / 1024, 1)
    tolerations = [
        {"key": key, "operator": "Exists", "effect": effect}
        for key, _, effect in node.taints
        if key == resource_name
    ]
    if tolerations:
        spec["tolerations"] = tolerations
    body = {
        "apiVersion": ACCELERATOR_POOLS.api_version,
        "kind": "AcceleratorPool",
        "metadata": {"name": name, "labels": {DISCOVERED: "true"}},
        "spec": spec,
    }
    return Create(ACCELERATOR_POOLS, Key("", name), body)
