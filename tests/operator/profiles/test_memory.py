"""The device memory that jobs used: beside the planned memory, and in what later jobs ask for."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.operator.builders import ENGINE, NOW, job, pool
from tests.operator.profiles.parts import (
    POOLS,
    TEAM,
    TENANT_OF,
    cell,
    finished,
    formula,
    profile,
    waiting,
    written,
)
from tests.operator.profiles.test_speeds import CONFIG, done, ran, tokens

from busbar.kube.types import PerformanceProfile, TrainingJob
from busbar.kube.types.training_status import MemoryUse
from busbar.operator.profiles.table import performance_table, workload


def used(mib: int, of: TrainingJob) -> TrainingJob:
    """The job, having used so much device memory."""
    assert of.status is not None
    memory = MemoryUse(planned_device_mib=1, peak_device_mib=mib)
    return of.model_copy(update={"status": of.status.model_copy(update={"memory": memory})})


def test_memory_that_a_job_used_stands_beside_the_planned_and_outlives_it() -> None:
    planned = next(
        c for c in performance_table((waiting(),), POOLS, TENANT_OF).cells if c.accelerator == "A100"
    )
    peak = planned.memory_mib // 2
    kept = written(profile(), used(peak, finished(0.4)), waiting())
    assert cell(kept, "A100").measured_memory_gib == peak / 1024
    assert cell(kept, "A100").memory_gib == planned.memory_mib / 1024
    assert cell(kept, "V100").measured_memory_gib is None
    later = written(kept, used(peak // 2, finished(0.4, name="again")), now=NOW + timedelta(hours=1))
    assert cell(later, "A100").measured_memory_gib == peak / 1024
    # The memory that other jobs get is not less because one job used less.
    table = performance_table((waiting(),), POOLS, TENANT_OF, (kept,), (TEAM,))
    learned = next(c for c in table.learned if c.accelerator == "A100" and not c.tenant)
    assert learned.memory_mib == planned.memory_mib


BELIEVED = 4


def asked(*jobs: TrainingJob, of: PerformanceProfile, tenant: str = "") -> dict[str, int]:
    """MiB of device memory that plans ask for, by accelerator."""
    table = performance_table(jobs, POOLS, TENANT_OF, (of,), (TEAM,))
    return {c.accelerator: c.memory_mib for c in table.learned if c.tenant == tenant}


def test_memory_above_the_plan_is_asked_for_in_that_cell_alone_and_the_plan_stays_readable() -> None:
    planned = {c.accelerator: c.memory_mib for c in performance_table((waiting(),), POOLS, TENANT_OF).cells}
    peak = 2 * planned["A100"]
    more = planned | {"A100": peak}
    assert asked(used(peak, finished(0.4)), waiting(), of=profile()) == more
    running = used(peak, ran(formula("A100")))
    assert asked(running, waiting(), of=profile()) == more
    kept = written(profile(), used(peak, finished(0.4)), waiting())
    assert (cell(kept, "A100").memory_gib, cell(kept, "A100").measured_memory_gib) == (
        planned["A100"] / 1024,
        peak / 1024,
    )
    assert asked(waiting(), of=kept) == more
    for hours in (1, 2):  # what was measured does not become the plan, so it does not add up
        later = used(BELIEVED * planned["A100"], finished(0.4, name=f"again-{hours}"))
        kept = written(kept, later, waiting(), now=NOW + timedelta(hours=hours))
        assert asked(waiting(), of=kept)["A100"] == BELIEVED * planned["A100"]
        assert cell(kept, "A100").memory_gib == planned["A100"] / 1024


def test_memory_that_cannot_be_right_is_neither_shown_nor_asked_for() -> None:
    planned = {c.accelerator: c.memory_mib for c in performance_table((waiting(),), POOLS, TENANT_OF).cells}
    liar = done(formula("A100") * 2, tokens() / formula("A100"))
    for of in (used(2**40, finished(0.4)), used(2 * planned["A100"], liar)):
        kept = written(profile(), of, waiting())
        assert cell(kept, "A100").measured_memory_gib is None
        assert asked(waiting(), of=kept) in (planned, {})
        assert asked(of, waiting(), of=profile()) in (planned, {})


def training(activations: str, **engine: object) -> TrainingJob:
    """A small model on long sequences, whose activations are most of what it needs."""
    long = {
        "model": {"config": CONFIG},
        "data": {"uri": "pvc://text", "sequenceLength": 16_384},
        "batch": {"sequences": 4, "microBatch": 4},
        "mode": "resident",
        "activations": activations,
    }
    return job(f"long-{activations}", engine={**ENGINE, **long, **engine})


def planned_on(memory_gib: float, activations: str) -> int:
    """MiB in which a job is admitted to accelerators of this memory."""
    pools = [pool("a100", accelerator="A100", resourceName="nvidia.com/gpu", memoryGib=memory_gib)]
    (found,) = performance_table((training(activations),), pools, TENANT_OF).cells
    return found.memory_mib


def test_auto_is_admitted_with_the_memory_that_the_engine_will_use_on_that_pool() -> None:
    kept, again = planned_on(10_000, "keep"), planned_on(10_000, "recompute")
    assert again < kept / 2
    assert planned_on(kept / 1024 + 1, "auto") == kept
    assert planned_on(kept / 1024 - 1, "auto") == again
    assert planned_on(kept / 1024 - 1, "keep") == kept  # which does not fit there


def test_a_pod_of_a_gang_is_sized_by_what_the_pods_divide() -> None:
    def needed(pods: int, **parallelism: str) -> int:
        engine = {
            **ENGINE,
            "model": {"config": CONFIG},
            "batch": {"sequences": 8, "microBatch": 1},
            "mode": "resident",
            "parallelism": parallelism,
        }
        gang = job("gang", engine=engine, shape={"minPods": pods, "maxPods": max(2, pods)})
        pools = [pool("a100", accelerator="A100", resourceName="nvidia.com/gpu", memoryGib=10_000)]
        (found,) = performance_table((gang,), pools, TENANT_OF).cells
        return found.memory_mib

    stages = [needed(2, sharding=each) for each in ("optimizer", "gradients", "parameters")]
    assert [needed(1), *stages] == sorted([needed(1), *stages], reverse=True)
    assert len({needed(1), *stages}) == 4
    assert needed(4, sharding="parameters") < stages[-1]
    assert needed(2, order="fixed") > stages[0]  # whose partial sums are counted too


def test_frozen_parts_make_a_class_of_their_own_that_needs_less() -> None:
    whole, frozen = (
        workload(training("keep", **changes))
        for changes in ({}, {"freeze": ["model.layers.*.mlp.*", "lm_head.*"]})
    )
    assert whole.workload_class != frozen.workload_class
    pools = [pool("a100", accelerator="A100", resourceName="nvidia.com/gpu", memoryGib=80)]
    jobs = [training("keep"), training("keep", freeze=["model.layers.*.mlp.*", "lm_head.*"])]
    needed = {c.workload_class: c.memory_mib for c in performance_table(jobs, pools, TENANT_OF).cells}
    assert needed[frozen.workload_class] < needed[whole.workload_class]


@pytest.mark.parametrize(("activations", "fits"), [("auto", True), ("recompute", True), ("keep", False)])
def test_a_device_memory_in_which_only_recomputed_activations_fit_allows_all_modes(
    activations: str, fits: bool
) -> None:
    limit = planned_on(10_000, "recompute") + 100
    modes = workload(training(activations, mode="auto", deviceMemory=f"{limit}Mi")).modes
    assert modes == (
        ("resident", "optimizer-offload", "parameter-offload") if fits else ("optimizer-offload",)
    )


def test_auto_has_the_weights_on_the_host_only_where_one_process_may_recompute() -> None:
    def modes(activations: str = "auto", pods: int = 1, **changes: object) -> tuple[str, ...]:
        job = training(activations, mode="auto", **changes)
        shape = job.spec.shape.model_copy(update={"min_pods": pods, "max_pods": pods})
        return workload(job.model_copy(update={"spec": job.spec.model_copy(update={"shape": shape})})).modes

    assert modes() == ("resident", "optimizer-offload", "parameter-offload")
    for refused in (modes(pods=2), modes("keep"), modes(parallelism={"order": "fixed"})):
        assert refused == ("resident", "optimizer-offload")


def test_a_job_without_a_backward_pass_has_no_state_to_move_and_needs_less() -> None:
    zeroth = workload(training("auto", mode="auto", optimizer={"name": "ZerothOrder"}))
    assert zeroth.modes == ("resident", "parameter-offload")
    assert zeroth.workload_class != workload(training("auto", mode="auto")).workload_class
    pools = [pool("a100", accelerator="A100", resourceName="nvidia.com/gpu", memoryGib=80)]
    jobs = [training("auto"), training("auto", optimizer={"name": "ZerothOrder"})]
    with_moments, without = (
        next(c for c in performance_table([job], pools, TENANT_OF).cells if c.mode == "resident")
        for job in jobs
    )
    assert without.memory_mib < with_moments.memory_mib / 2
    assert without.speed > with_moments.speed
