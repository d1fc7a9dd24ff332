"""What a pod of a job asks for."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.builders import ENGINE, NOW, job, pool, tenant
from tests.training.small import manifest

from busbar.kube.types import TrainingJob
from busbar.operator.scheduling.snapshot import ClusterObjects, build
from busbar.operator.training.claim import OTHER_FILES_MIB, asked
from busbar.operator.watch.projections import Node
from busbar.scheduler import Policy, Resources, plan
from busbar.scheduler.fit.memory import HOST_RUNTIME_BYTES


@pytest.mark.parametrize(
    ("scratch", "own", "mib"),
    [
        (None, None, 0),
        (None, "3Gi", 3 * 1024),
        ("200Gi", None, 200 * 1024 + OTHER_FILES_MIB),
        ("200Gi", "3Gi", 203 * 1024),
    ],
)
def test_the_disk_for_state_is_asked_for_beside_that_for_other_files(
    scratch: str | None, own: str | None, mib: int
) -> None:
    document: dict[str, Any] = manifest(mode="auto")
    document["spec"]["engine"] |= {} if scratch is None else {"scratchDisk": scratch}
    document["spec"]["shape"] = {"maxPods": 1} | ({} if own is None else {"ephemeralStorage": own})
    assert asked(TrainingJob.model_validate(document).spec).ephemeral_mib == mib


CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 1024,
}  # fmt: skip


def given(shape: dict[str, Any] | None = None, **spec: Any) -> Resources:
    """What a pod of a job of the engine gets on GPUs, with two at most on a node."""
    labels = (("pool", "gpus"),)
    nodes = tuple(
        Node(f"n{i}", labels, (), 16_000, 262_144, 500_000, (("nvidia.com/gpu", 2),), True) for i in range(4)
    )
    gpus = pool("gpus", accelerator="A100", resourceName="nvidia.com/gpu", memoryGib=80)
    engine = {**ENGINE, "mode": "resident", "model": {"config": CONFIG}, **spec.pop("engine", {})}
    of = job(engine=engine, shape=shape or {}, **spec)
    made = build(
        ClusterObjects(jobs=(of,), pools=(gpus,), tenants=(tenant("team", ["team"]),), nodes=nodes), NOW
    )
    [action] = plan(made, Policy(), NOW.timestamp(), None)[0].actions
    assert action.to is not None
    return action.to.per_pod


def test_a_pod_on_a_gpu_that_names_nothing_gets_the_memory_that_it_needs_and_a_core_for_each_accelerator() -> (
    None
):
    alone = given()
    assert alone.cpu_m == 1000
    assert HOST_RUNTIME_BYTES / 2**20 < alone.memory_mib < 2 * HOST_RUNTIME_BYTES / 2**20
    assert given({"acceleratorsPerPod": 2}).cpu_m == 2000
    assert given({"cpu": "6"}).cpu_m == 6000
    assert given({"memory": "64Gi"}).memory_mib == 65_536
    assert given({"memory": "64Mi"}) == alone, "never less than the plan needs"


def test_copies_of_the_state_in_memory_are_asked_for_as_well() -> None:
    """Of some 110 million parameters in float32, with the moments 12 bytes each."""
    copied: dict[str, Any] = {"checkpoint": {"memory": {}}}
    alone = given(**copied).memory_mib - given().memory_mib
    assert alone == pytest.approx(2 * 12 * 110e6 / 2**20, rel=0.1)
    four, shape = given({"minPods": 4, "maxPods": 4}), {"minPods": 4, "maxPods": 4}
    assert given(shape, **copied).memory_mib - four.memory_mib == pytest.approx(alone / 4 * 4 / 3, rel=0.1)
    unsaved: dict[str, Any] = {"checkpoint": {"memory": {"parity": 0}}}
    assert given(shape, **unsaved).memory_mib - four.memory_mib == pytest.approx(alone / 4, rel=0.15)
    assert given({"memory": "64Gi"}, **copied).memory_mib == 65_536
