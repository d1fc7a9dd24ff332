"""What a pod of a job asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import ENGINE, NOW, job, pool, service, tenant
from tests.training.small import manifest

from busbar.kube.types import AcceleratorPool, TrainingJob
from busbar.operator.scheduling.snapshot import ClusterObjects, build
from busbar.operator.training.claim import OTHER_FILES_MIB, asked
from busbar.operator.watch.projections import Node
from busbar.scheduler import Placement, Policy, Resources, Snapshot, WaitCode, plan, sentence
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


IMAGES: dict[str, dict[str, Any]] = {"builtin": {}, "vllm": {"image": "vllm/vllm-openai:v1"}}


def gpus(*jobs: TrainingJob, others: tuple[AcceleratorPool, ...] = ()) -> Snapshot:
    """Four nodes of two A100."""
    labels, devices = (("pool", "gpus"),), (("nvidia.com/gpu", 2),)
    nodes = [Node(f"n{i}", labels, (), 16_000, 262_144, 500_000, devices, True) for i in range(4)]
    nodes += [
        Node(f"c-{each.metadata.name}", (("pool", each.metadata.name),), (), 8000, 32_768, 100_000, (), True)
        for each in others
    ]
    a100 = pool("gpus", accelerator="A100", resourceName="nvidia.com/gpu", memoryGib=80)
    owner = tenant("team", ["team"])
    return build(ClusterObjects(jobs=jobs, pools=(a100, *others), tenants=(owner,), nodes=tuple(nodes)), NOW)


def engine_job(
    name: str = "job", shape: dict[str, Any] | None = None, processes: int = 1, **spec: Any
) -> TrainingJob:
    engine = {**ENGINE, "mode": "resident", "model": {"config": CONFIG}}
    if processes > 1:
        engine["parallelism"] = {"processesPerPod": processes}
    return job(name, engine=engine, shape=shape or {}, **spec)


def started(made: Snapshot) -> dict[str, Placement]:
    """By the job's name."""
    names = {one.id: one.name for one in made.jobs}
    actions = plan(made, Policy(), NOW.timestamp(), None)[0].actions
    return {names[action.job]: action.to for action in actions if action.to is not None}


def given(shape: dict[str, Any] | None = None, **spec: Any) -> Resources:
    """What a pod of a job of the engine gets."""
    return started(gpus(engine_job(shape=shape, **spec)))["job"].per_pod


def test_a_pod_on_a_gpu_that_names_nothing_gets_the_memory_that_it_needs_and_a_core_for_each_accelerator() -> (
    None
):
    alone = given()
    assert alone.cpu_m == 1000
    assert HOST_RUNTIME_BYTES / 2**20 < alone.memory_mib < 2 * HOST_RUNTIME_BYTES / 2**20
    own = job("own", template={"image": "own"}, shape={"acceleratorsPerPod": 2})
    assert started(gpus(own))["own"].per_pod.cpu_m == 2000
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
    both = started(gpus(engine_job("plain"), engine_job("copied", **copied)))
    assert both["copied"].per_pod.memory_mib - both["plain"].per_pod.memory_mib == alone


def test_a_pod_of_the_engine_gets_no_accelerators_that_it_would_not_use() -> None:
    of = engine_job(shape={"acceleratorsPerPod": 2, "minPods": 2, "maxPods": 2})
    made = gpus(of)
    [record] = plan(made, Policy(), NOW.timestamp(), None)[0].waiting
    assert (record.code, record.never) == (WaitCode.DEVICES_UNUSED, True)
    assert sentence(record) == (
        "Its pods ask for 2 accelerators each, of which its engine would use 1: set shape.acceleratorsPerPod to 1, and ask "
        "for as many pods as it needs; or, of a training job, set engine.parallelism.processesPerPod to 2."
    )
    assert started(gpus(of, others=(pool(),)))["job"].pool == "cpu", "cores are not meant"


def test_a_pod_of_several_processes_gets_an_accelerator_and_memory_for_each() -> None:
    two, both = {"minPods": 2, "maxPods": 2}, {"acceleratorsPerPod": 2}
    copied: dict[str, Any] = {"checkpoint": {"memory": {"everySteps": 10}}}

    def needs(shape: dict[str, Any], processes: int, **spec: Any) -> Resources:
        of = engine_job(shape=shape, processes=processes, **spec)
        return started(gpus(of))["job"].per_pod

    each, pod = needs(two, 1), needs(both, 2)
    assert (pod.accelerators_m, pod.cpu_m) == (2000, 2000)
    assert pod.memory_mib == pytest.approx(2 * each.memory_mib, abs=1)
    # A pod's parts are copied into its own memory; two pods hold each other's parities as well.
    own = needs(both, 2, **copied).memory_mib - pod.memory_mib
    others = needs({**two, **both}, 2, **copied).memory_mib - needs({**two, **both}, 2).memory_mib
    assert own < others < 2 * own


@pytest.mark.parametrize(("engine", "places"), [("builtin", set()), ("vllm", {"web-0"})])
def test_a_replica_of_busbars_engine_gets_one_accelerator_and_a_vllm_as_many_as_it_asks_for(
    engine: str, places: set[str]
) -> None:
    status = {"desiredReplicas": 1, "observedGeneration": 1}
    web = service(replicas=1, status=status, engine=engine, shape={"acceleratorsPerPod": 2}, **IMAGES[engine])
    made = replace(
        gpus(), jobs=build(ClusterObjects(services=(web,), tenants=(tenant("team", ["team"]),)), NOW).jobs
    )
    assert started(made).keys() == places
