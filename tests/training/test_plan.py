"""The memory plan: pure, complete, refused before anything is allocated, and helpful when it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from busbar.workloads.training.errors import InfeasiblePlan
from busbar.workloads.training.plan import Demand, GroupSize, Limits, aligned, lay_out, make_plan

MIB = 2**20
DEMAND = Demand(
    groups=(
        GroupSize("embedding", 1 * MIB),
        *(GroupSize(f"block-{i}", 3 * MIB) for i in range(4)),
        GroupSize("head", 1024),
    ),
    dtype="float32",
    micro_batch=8,
    activation_bytes=64 * MIB,
)
UNLIMITED = Limits(None, None, device_is_host=False)


def limited(device_mib: float | None = None, host_mib: float | None = None) -> Limits:
    def size(mib: float | None) -> int | None:
        return None if mib is None else int(mib * MIB)

    return Limits(size(device_mib), size(host_mib), device_is_host=False)


def test_the_planner_imports_no_torch() -> None:
    code = "import sys, busbar.workloads.training.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_resident_bytes_are_sixteen_per_fp32_parameter_plus_activations() -> None:
    plan = make_plan(DEMAND, UNLIMITED, "resident")
    assert plan.device["parameters"] == plan.device["gradients"] == 4 * DEMAND.parameters
    assert plan.device["optimizer"] == 8 * DEMAND.parameters
    assert plan.device["staging"] == 0
    assert plan.device_bytes == 16 * DEMAND.parameters + 64 * MIB


def test_offload_exchanges_the_state_for_three_staging_slots() -> None:
    plan = make_plan(DEMAND, UNLIMITED, "optimizer-offload")
    assert plan.device["optimizer"] == 0
    assert plan.device["staging"] == 3 * aligned(plan.chunk_parameters * 8)
    assert plan.host["optimizer"] == 8 * DEMAND.parameters
    assert plan.offloaded_fraction == 1.0


def test_bfloat16_keeps_a_master_weight_in_the_state() -> None:
    plan = make_plan(replace(DEMAND, dtype="bfloat16"), UNLIMITED, "resident")
    assert plan.device["parameters"] == 2 * DEMAND.parameters
    assert plan.device["optimizer"] == 12 * DEMAND.parameters
    assert plan.device["staging"] == aligned(plan.chunk_parameters * 4)  # a chunk's gradient in fp32


def test_a_device_that_is_the_hosts_memory_counts_twice() -> None:
    plan = make_plan(DEMAND, Limits(None, None, device_is_host=True), "resident")
    assert plan.host_bytes == plan.device_bytes + plan.host["checkpoint"]


def test_auto_stays_resident_where_that_fits() -> None:
    assert make_plan(DEMAND, limited(400), "auto").mode == "resident"


def test_auto_spills_the_last_groups_and_no_more_than_needed() -> None:
    room = lay_out(DEMAND, UNLIMITED, "optimizer-offload", 2).device_bytes
    plan = make_plan(DEMAND, Limits(room, None, False), "auto")
    assert plan.offloaded == ("block-3", "head")
    assert make_plan(DEMAND, Limits(room - 1, None, False), "auto").offloaded == (
        "block-2",
        "block-3",
        "head",
    )


def test_a_plan_at_the_limit_fits_and_one_byte_less_is_refused() -> None:
    need = make_plan(DEMAND, UNLIMITED, "resident").device_bytes
    assert make_plan(DEMAND, Limits(need, None, False), "resident").device_bytes == need
    with pytest.raises(InfeasiblePlan):
        make_plan(DEMAND, Limits(need - 1, None, False), "resident")


def test_a_refusal_lists_bytes_per_owner() -> None:
    with pytest.raises(
        InfeasiblePlan, match=r"parameters 52\.0 MiB, gradients 52\.0 MiB, optimizer 104\.0 MiB"
    ):
        make_plan(DEMAND, limited(200), "resident")


FIX_CASES: list[tuple[str, Limits, str, Callable[[str], bool]]] = [
    ("offload is offered", limited(200), "resident", lambda fixes: "mode: optimizer-offload" in fixes),
    ("the micro-batch that fits", limited(150), "optimizer-offload", lambda fixes: "microBatch: 4" in fixes),
    ("the memory it takes", limited(200), "resident", lambda fixes: "deviceMemory: at least 273Mi" in fixes),
    ("more host memory", limited(None, 100), "resident", lambda fixes: "shape.memory: at least" in fixes),
]


@pytest.mark.parametrize(("name", "limits", "mode", "holds"), FIX_CASES, ids=[case[0] for case in FIX_CASES])
def test_a_refusal_names_the_fix(name: str, limits: Limits, mode: str, holds: Callable[[str], bool]) -> None:
    with pytest.raises(InfeasiblePlan) as refusal:
        make_plan(DEMAND, limits, mode)
    assert holds(str(refusal.value).partition("What would help:")[2]), str(refusal.value)


def test_the_memory_that_a_refusal_asks_for_is_enough() -> None:
    assert make_plan(DEMAND, limited(273), "resident").mode == "resident"
