"""Pools for devices that no AcceleratorPool describes."""

from __future__ import annotations

import pytest
from tests.operator.builders import pool

from busbar.operator.pools.discovery import accelerator_name, discover
from busbar.operator.watch.projections import Node
from busbar.scheduler.fit.accelerators import accelerator


def test_known_devices_without_a_pool_are_discovered_once_per_product() -> None:
    labels = (("nvidia.com/gpu.memory", "81559"), ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3"))
    nodes = [
        Node(
            f"n{i}",
            labels,
            (("nvidia.com/gpu", "", "NoSchedule"),),
            8000,
            1,
            1,
            (("nvidia.com/gpu", 8),),
            True,
        )
        for i in range(2)
    ]
    [create] = discover(nodes, [pool()])
    assert create.body["spec"]["accelerator"] == "H100"
    assert create.body["spec"]["memoryGib"] == 79.6
    covering = pool("mine", nodeSelector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"})
    assert discover(nodes, [covering]) == []
    name = create.body["metadata"]["name"]
    edited = pool(name, nodeSelector={"somebody": "chose-other-nodes"})
    assert discover(nodes, [edited]) == []  # the API server would refuse a create in every round


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("NVIDIA-H100-NVL", "H100-NVL"),
        ("NVIDIA-H100-PCIe", "H100-PCIe"),
        ("NVIDIA-A100-SXM4-80GB", "A100"),
        ("NVIDIA-A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "A100-1g.10gb"),
        ("NVIDIA-A100-PCIE-40GB-MIG-3g.20gb", "A100-40GB-3g.20gb"),
        ("NVIDIA-RTX-6000-Ada-Generation", "RTX-6000-Ada"),
        ("Quadro-RTX-6000", "RTX-6000"),
        ("AMD_Instinct_MI300X_OAM", "MI300X"),
        ("Tesla-V100-SXM2-32GB", "V100"),
        ("NVIDIA-L4", "L4"),
        ("NVIDIA-GeForce-RTX-4090", "RTX-4090"),
        ("Tesla-T4", "T4"),
        ("NVIDIA-L40S", "L40S"),
        ("NVIDIA-GH200-480GB", "GH200"),
    ],
)
def test_the_type_is_read_from_the_products_name(product: str, name: str) -> None:
    assert accelerator_name(product) == name


def test_a_discovered_slice_counts_as_its_part_of_the_device() -> None:
    whole, slice_ = (
        accelerator(accelerator_name(f"NVIDIA-A100-SXM4-80GB{of}")) for of in ("", "-MIG-1g.10gb")
    )
    assert whole is not None
    assert slice_ is not None
    assert slice_.rate == pytest.approx(whole.rate / 7)
