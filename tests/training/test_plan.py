"""The memory plan: pure, complete, checked before anything is allocated, with refusals that say what would fit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.demand import (
    COPIES,
    COPY_HEADER_BYTES,
    PARITY_PIECE_BYTES,
    Demand,
    GroupSize,
    aligned,
    chunk_sizes,
    chunked_bytes,
    copy_bytes,
    own_checkpoint_bytes,
)
from busbar.workloads.training.disk_plan import disk_shortage
from busbar.workloads.training.errors import InfeasiblePlan, InvalidJob
from busbar.workloads.training.fixes import MOST, Fix, find_fixes
from busbar.workloads.training.layouts import first_that_fits
from busbar.workloads.training.plan import (
    EVALUATION_BYTES,
    MAKING_TOKENS_BYTES,
    MemoryLimits,
    MemoryPlan,
    lay_out,
)
from busbar.workloads.training.streamed_plan import why_not_streamed

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
UNLIMITED = MemoryLimits(None, None, device_is_host=False)


def limited(device_mib: float | None = None, host_mib: float | None = None) -> MemoryLimits:
    def size(mib: float | None) -> int | None:
        return None if mib is None else int(mib * MIB)

    return MemoryLimits(size(device_mib), size(host_mib), device_is_host=False)


@given(st.lists(st.integers(0, 50_000), max_size=6), st.integers(1, 20_000))
def test_bytes_of_chunks_are_those_of_each_of_them(groups: list[int], chunk: int) -> None:
    each = [aligned(3 * size + 1) for group in groups for size in chunk_sizes(group, chunk)]
    assert chunked_bytes(groups, chunk, lambda size: aligned(3 * size + 1)) == sum(each)


def test_the_planner_imports_no_torch() -> None:
    code = "import sys, busbar.workloads.training.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_resident_bytes_are_sixteen_per_fp32_parameter_plus_activations() -> None:
    plan = make_plan(DEMAND, UNLIMITED, "resident")
    assert plan.device["parameters"] == plan.device["gradients"] == 4 * DEMAND.parameters
    assert plan.device["optimizer"] == 8 * DEMAND.parameters
    assert plan.device["staging"] == 0
    assert plan.device_bytes == 16 * DEMAND.parameters + 64 * MIB


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("sharding", "divided"),
    [("optimizer", 8), ("gradients", 12), ("parameters", 16)],  # of 16 bytes per parameter
)
def test_a_rank_of_a_deep_model_needs_what_zeros_formula_says(
    sharding: str, divided: int, ranks: int
) -> None:
    """Within 5 %: beside it are a block or two on their way, and in stage 3 what stands around the blocks."""
    deep = replace(
        DEMAND,
        groups=(GroupSize("embedding", MIB), *(GroupSize(f"block-{i}", 3 * MIB) for i in range(128))),
        activation_bytes=0,
        ranks=ranks,
        sharding=sharding,
    )
    plan = make_plan(deep, UNLIMITED, "resident")
    assert plan.device_bytes == pytest.approx(deep.parameters * (16 - divided + divided / ranks), rel=0.05)
    held = sum(plan.device[owner] for owner in ("parameters", "gradients", "optimizer"))
    assert held == deep.parameters * (16 - divided + divided // ranks)


def test_divided_weights_are_refused_where_there_are_no_blocks_to_gather() -> None:
    several = replace(DEMAND, ranks=2, sharding="parameters")
    for demand, said in (
        (replace(several, shared_blocks=True), "blocks of this model have weights in common"),
        (replace(several, groups=DEMAND.groups[:1]), "no block of this model has weights of its own"),
    ):
        with pytest.raises(
            InvalidJob, match=f"parallelism.sharding: parameters is not possible here: {said}"
        ):
            make_plan(demand, UNLIMITED, "resident")
        make_plan(replace(demand, sharding="gradients"), UNLIMITED, "resident")


def test_weights_of_blocks_that_are_not_trained_are_divided_too() -> None:
    """An adapter: what each block has of the base is on the ranks in slices, and once whole in the slot; what is around them
    is whole, as without."""
    inside = {f"block-{index}": 12 * MIB for index in range(16)}
    adapter = replace(
        DEMAND,
        groups=tuple(GroupSize(name, 1024 * 8) for name in inside),
        frozen_bytes=20 * MIB + sum(inside.values()),
        frozen_in_blocks=inside,
        ranks=4,
    )
    whole, divided = (
        make_plan(replace(adapter, sharding=sharding), UNLIMITED, "resident").device
        for sharding in ("gradients", "parameters")
    )
    assert whole["base"] == 20 * MIB + 16 * 12 * MIB
    assert divided["base"] == 20 * MIB + 16 * 3 * MIB
    assert divided["slots"] == 12 * MIB + 4 * 1024 * 8
    assert "slots" not in whole


def test_divided_weights_start_without_the_whole_model_in_memory() -> None:
    large = replace(DEMAND, ranks=8, sharding="parameters", activation_bytes=0)
    beside_a_gpu = MemoryLimits(None, 0, device_is_host=False)
    all_at_once, in_parts = (
        lay_out(replace(large, part_bytes=part), beside_a_gpu, "resident", 0).phases["start"]
        for part in (None, 8 * MIB)
    )
    assert all_at_once >= large.model_bytes
    assert in_parts < large.model_bytes


def test_a_gang_that_does_not_fit_is_told_to_divide_more() -> None:
    several = replace(DEMAND, ranks=4)
    least = {
        sharding: make_plan(replace(several, sharding=sharding), UNLIMITED, "resident").device_bytes
        for sharding in ("gradients", "parameters")
    }
    for sharding, size in least.items():
        enough = replace(UNLIMITED, device_bytes=size)
        assert refusal(several, enough, "resident")[0] == f"parallelism.sharding: {sharding}"


def test_offload_exchanges_the_state_for_three_staging_slots() -> None:
    plan = make_plan(DEMAND, UNLIMITED, "optimizer-offload")
    assert plan.device["optimizer"] == 0
    assert plan.device["staging"] == 3 * aligned(plan.chunk_parameters * 8)
    assert plan.host["optimizer"] == 8 * DEMAND.parameters
    assert plan.offloaded_fraction == 1.0


def test_bfloat16_keeps_half_a_master_weight_in_the_state() -> None:
    plan = make_plan(replace(DEMAND, dtype="bfloat16"), UNLIMITED, "resident")
    assert plan.device["parameters"] == 2 * DEMAND.parameters
    assert plan.device["optimizer"] == 10 * DEMAND.parameters
    assert plan.device["staging"] == 2 * aligned(plan.chunk_parameters * 4)  # a chunk's gradient and master


def test_a_device_that_is_the_hosts_memory_counts_twice() -> None:
    plan = make_plan(DEMAND, MemoryLimits(None, None, device_is_host=True), "resident")
    assert plan.host_bytes == plan.device_bytes + plan.host["checkpoint"] + MAKING_TOKENS_BYTES


CHECKPOINT = 12 * DEMAND.parameters  # fp32 weights and two moments, beside the random state


def test_the_snapshot_takes_what_the_host_has_left() -> None:
    whole = make_plan(DEMAND, UNLIMITED, "resident")
    assert CHECKPOINT < whole.host["checkpoint"] < CHECKPOINT + 2 * whole.snapshot_block_bytes
    room = whole.device_bytes + 40 * MIB
    tight = make_plan(DEMAND, MemoryLimits(None, room, device_is_host=True), "resident")
    assert room - tight.snapshot_block_bytes < tight.host_bytes <= room
    room = whole.device_bytes + 2 * whole.snapshot_block_bytes + MAKING_TOKENS_BYTES
    assert make_plan(DEMAND, MemoryLimits(None, room, device_is_host=True), "resident").snapshot_blocks == 2
    with pytest.raises(InfeasiblePlan):
        make_plan(DEMAND, MemoryLimits(None, room - 1, device_is_host=True), "resident")


def test_copies_in_memory_are_part_of_every_phase_but_preparation() -> None:
    cpu = MemoryLimits(None, None, device_is_host=True)
    without, with_copies = (
        make_plan(replace(DEMAND, memory_copies=copies), cpu, "resident") for copies in (0, COPIES)
    )
    copies = COPIES * (without.checkpoint_bytes + COPY_HEADER_BYTES)
    assert with_copies.host["copies"] == copies
    assert with_copies.host_bytes == without.host_bytes + copies
    more = {name: size - without.phases[name] for name, size in with_copies.phases.items()}
    assert more == {**dict.fromkeys(more, copies), "preparation": 0}


@pytest.mark.parametrize(("ranks", "parity", "times"), [(2, 0, 1), (2, 1, 2), (4, 1, 4 / 3), (8, 2, 8 / 6)])
def test_copies_of_a_gang_have_room_for_parities(ranks: int, parity: int, times: float) -> None:
    whole = replace(DEMAND, memory_copies=COPIES, parity=parity)
    gang = replace(whole, ranks=ranks)
    pieces = PARITY_PIECE_BYTES * (3 + parity)
    own = own_checkpoint_bytes(gang) + COPY_HEADER_BYTES
    assert 0 <= copy_bytes(gang) - pieces - COPIES * own * times <= COPIES * ranks * 4096


@pytest.mark.parametrize("mode", ["resident", "parameter-offload"])
def test_copies_for_which_there_is_no_room_are_what_is_given_up_first(mode: str) -> None:
    model = replace(DEMAND, recompute_bytes=DEMAND.activation_bytes)
    host = make_plan(model, UNLIMITED, mode).host_bytes
    with pytest.raises(InfeasiblePlan, match="copies") as refused:
        make_plan(replace(model, memory_copies=COPIES), MemoryLimits(None, host, False), mode)
    assert refused.value.fixes[0] == "no checkpoint.memory"


def test_the_host_needs_what_its_hungriest_phase_needs() -> None:
    cpu = MemoryLimits(None, None, device_is_host=True)
    step = make_plan(DEMAND, cpu, "resident")
    running = step.device_bytes + step.host["checkpoint"]
    assert step.host_bytes == step.phases["step"] == running + MAKING_TOKENS_BYTES
    assert step.phases["start"] == running - DEMAND.activation_bytes
    evaluating = make_plan(replace(DEMAND, evaluation_bytes=70 * MIB), cpu, "resident")
    assert evaluating.device["activations"] == 70 * MIB
    assert (
        evaluating.host_bytes
        == evaluating.phases["evaluation"]
        == evaluating.phases["step"] - MAKING_TOKENS_BYTES + EVALUATION_BYTES
    )
    gpu = make_plan(replace(DEMAND, dtype="bfloat16"), MemoryLimits(None, 112 * MIB, False), "resident")
    assert gpu.phases["export"] == gpu.phases["step"] - MAKING_TOKENS_BYTES + 2 * DEMAND.parameters
    model = billions(20)
    large = make_plan(model, MemoryLimits(None, 60 * 2**30, False), "resident")
    assert large.phases["start"] >= 2 * model.parameters  # the model is made on the host


def test_a_claim_that_is_too_small_for_the_checkpoints_is_refused_with_the_number_that_fits() -> None:
    plan = make_plan(DEMAND, UNLIMITED, "resident")
    result, three = 4 * DEMAND.parameters, 3 * plan.checkpoint_bytes
    assert disk_shortage(plan, DEMAND, 2, three + result) is None
    said = disk_shortage(plan, DEMAND, 2, three + result - 1)
    assert said is not None
    assert said.fixes == ("checkpoint.keep: 1", "a claim with at least 1Mi more")
    said = disk_shortage(plan, DEMAND, 2, 10)
    assert said is not None
    assert said.fixes == (f"a claim with at least {-(-(three + result - 10) // MIB)}Mi more",)


def test_13_billion_parameters_fit_on_139_gib_and_128_gib() -> None:
    """40 blocks of a 13 B model in bfloat16: state on the host as far as needed, and room for a checkpoint."""
    blocks = tuple(GroupSize(f"block-{i}", 317_204_480) for i in range(40))
    model = Demand(
        (GroupSize("embedding", 163_840_000), *blocks, GroupSize("head", 163_845_120)),
        "bfloat16",
        1,
        8 * 2**30,
    )
    plan = make_plan(model, MemoryLimits(139 * 2**30, 127 * 2**30, False), "auto")
    assert 0.25 < plan.offloaded_fraction < 0.4
    assert plan.host_bytes <= 127 * 2**30


def test_auto_stays_resident_where_that_fits() -> None:
    assert make_plan(DEMAND, limited(400), "auto").mode == "resident"


def test_auto_spills_the_last_groups_and_no_more_than_needed() -> None:
    room = lay_out(DEMAND, UNLIMITED, "optimizer-offload", 2).device_bytes
    plan = make_plan(DEMAND, MemoryLimits(room, None, False), "auto")
    assert plan.offloaded == ("block-3", "head")
    assert make_plan(DEMAND, MemoryLimits(room - 1, None, False), "auto").offloaded == (
        "block-2",
        "block-3",
        "head",
    )


def test_a_plan_at_the_limit_fits_and_one_byte_less_is_refused() -> None:
    need = make_plan(DEMAND, UNLIMITED, "resident").device_bytes
    assert make_plan(DEMAND, MemoryLimits(need, None, False), "resident").device_bytes == need
    with pytest.raises(InfeasiblePlan):
        make_plan(DEMAND, MemoryLimits(need - 1, None, False), "resident")


def test_a_refusal_lists_bytes_per_owner() -> None:
    with pytest.raises(
        InfeasiblePlan, match=r"parameters 52\.0 MiB, gradients 52\.0 MiB, optimizer 104\.0 MiB"
    ):
        make_plan(DEMAND, limited(200), "resident")


FIX_CASES: list[tuple[str, MemoryLimits, str, Callable[[str], bool]]] = [
    ("offload is offered", limited(200), "resident", lambda fixes: "mode: auto" in fixes),
    ("the micro-batch that fits", limited(150), "optimizer-offload", lambda fixes: "microBatch: 4" in fixes),
    ("the memory it takes", limited(200), "resident", lambda fixes: "deviceMemory: at least 273Mi" in fixes),
    ("more host memory", limited(None, 5), "resident", lambda fixes: "shape.memory: at least" in fixes),
]


@pytest.mark.parametrize(("name", "limits", "mode", "holds"), FIX_CASES, ids=[case[0] for case in FIX_CASES])
def test_a_refusal_names_a_fix(
    name: str, limits: MemoryLimits, mode: str, holds: Callable[[str], bool]
) -> None:
    with pytest.raises(InfeasiblePlan) as refusal:
        make_plan(DEMAND, limits, mode)
    assert holds(str(refusal.value).partition("What would help:")[2]), str(refusal.value)


def test_the_memory_that_a_refusal_asks_for_is_enough() -> None:
    assert make_plan(DEMAND, limited(273), "resident").mode == "resident"


KEPT = replace(DEMAND, activations="keep", recompute_bytes=16 * MIB)


@pytest.mark.parametrize(
    ("device_mib", "mode", "first"),
    [
        (230, "optimizer-offload", ""),
        (130, "optimizer-offload", "activations: recompute (one more forward pass per step, equal results)"),
        (230, "resident", "mode: auto ("),
        (125, "resident", "mode: auto and activations: recompute ("),
        (113, "auto", "activations: recompute (one more forward pass"),  # with the weights on the host
        (65, "auto", "activations: recompute and batch.microBatch: 4 (now 8) (one more forward pass"),
    ],
)
def test_a_job_that_keeps_its_activations_is_told_of_recomputing_them(
    device_mib: int, mode: str, first: str
) -> None:
    limits = limited(device_mib)
    if not first:
        assert make_plan(KEPT, limits, mode).activations == "keep"
        return
    fixes = refusal(KEPT, limits, mode)
    assert fixes[0].startswith(first), fixes
    auto = replace(KEPT, activations="auto")
    assert not [fix for fix in find_fixes(auto, limits, mode) if fix.activations]


def test_a_refusal_of_auto_says_that_recomputing_was_tried() -> None:
    with pytest.raises(
        InfeasiblePlan, match=r"at best with weights and state on the host and recomputed act"
    ):
        make_plan(replace(KEPT, activations="auto"), limited(60), "auto")


def billions(parameters: float, activations_gib: float = 10) -> Demand:
    """32 equal blocks in bfloat16."""
    block = int(parameters * 1e9 / 32) // 1024 * 1024
    groups = tuple(GroupSize(f"block-{index}", block) for index in range(32))
    return Demand(groups, "bfloat16", 1, int(activations_gib * 2**30))


H200 = MemoryLimits(139 * 2**30, 127 * 2**30, False, device_capacity_bytes=139 * 2**30)


def refusal(demand: Demand, limits: MemoryLimits, mode: str) -> tuple[str, ...]:
    with pytest.raises(InfeasiblePlan) as refused:
        make_plan(demand, limits, mode)
    return refused.value.fixes


def test_a_resident_run_that_needs_a_little_more_is_told_of_auto_first() -> None:
    fixes = refusal(billions(10), H200, "resident")
    assert fixes[0].startswith("mode: auto (")
    assert not [fix for fix in fixes if "deviceMemory" in fix]  # the device has no more memory
    assert fixes[1].startswith("a device with at least")


def test_full_offload_that_exceeds_the_host_is_told_of_auto_and_not_of_a_larger_device() -> None:
    fixes = refusal(billions(12), replace(H200, host_bytes=100 * 2**30), "optimizer-offload")
    assert fixes[0].startswith("mode: auto (")
    assert fixes[1].startswith("shape.memory: at least ")
    assert len(fixes) == 2


def test_device_memory_is_raised_only_as_far_as_the_device_goes() -> None:
    half = replace(H200, device_bytes=70 * 2**30)
    assert "deviceMemory: at least" in refusal(billions(7.2), half, "resident")[1]
    assert not [fix for fix in refusal(billions(30), H200, "resident") if "deviceMemory" in fix]


def test_a_micro_batch_that_fits_with_some_of_the_state_on_the_host_comes_before_a_larger_device() -> None:
    """7 B in micro-batches of 4 on 80 GiB: resident it fits in no micro-batch, and `auto` does not fit with 4."""
    h100 = MemoryLimits(79 * 2**30, 127 * 2**30, False, 79 * 2**30)
    fixes = refusal(replace(billions(7, 100), micro_batch=4), h100, "resident")
    assert fixes[0].startswith("mode: auto and batch.microBatch: 2 (now 4) (")
    assert fixes[1].startswith("a device with at least")


def test_a_resident_run_on_a_small_host_is_told_of_auto_with_more_host_memory() -> None:
    small = MemoryLimits(79 * 2**30, 16 * 2**30, False, 79 * 2**30)
    assert refusal(billions(7, 20), small, "resident")[0].startswith("mode: auto and shape.memory: at least ")


def test_where_both_sides_are_short_one_fix_names_both() -> None:
    (fix,) = refusal(billions(50), replace(H200, host_bytes=2**20), "auto")[-1:]
    assert "a device with at least" in fix
    assert "shape.memory: at least" in fix


def test_a_refusal_names_the_phase_that_needs_the_most_of_the_host() -> None:
    """Resident on a device, the host needs little but for the model that is made there."""
    with pytest.raises(InfeasiblePlan, match=r"host, in phase start, needs 13\.0 GiB and has 1024"):
        make_plan(billions(7), replace(H200, host_bytes=2**30), "resident")
    with pytest.raises(InfeasiblePlan, match=r"host, in phase export, needs 66\.\d GiB and has 60"):
        make_plan(billions(7), replace(H200, host_bytes=60 * 2**30), "optimizer-offload")


def with_fix(fix: Fix, demand: Demand, limits: MemoryLimits, mode: str) -> MemoryPlan:
    """The plan of the job after it did what `fix` says, in whole MiB as the sentence has it."""
    if fix.micro_batch is not None:
        share = fix.micro_batch / demand.micro_batch
        demand = replace(
            demand,
            micro_batch=fix.micro_batch,
            activation_bytes=int(demand.activation_bytes * share),
            evaluation_bytes=int(demand.evaluation_bytes * share),
            recompute_bytes=None if demand.recompute_bytes is None else int(demand.recompute_bytes * share),
        )
    if fix.activations is not None:
        demand = replace(demand, activations=fix.activations)
    said = fix.text(demand, limits)
    numbers = {
        name: int(size) * MIB for name, size in re.findall(r"(device|host|Memory|memory).*?(\d+)Mi", said)
    }
    device = limits.device_bytes if fix.device_bytes is None else numbers.get("device", numbers.get("Memory"))
    host = limits.host_bytes
    if fix.host_bytes is not None:
        host = (host or 0) + numbers["memory"]
    return make_plan(demand, replace(limits, device_bytes=device, host_bytes=host), fix.mode or mode)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    blocks=st.lists(st.integers(1, 4000), min_size=1, max_size=6),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    micro=st.sampled_from([1, 2, 6, 8]),
    activations=st.integers(0, 400),
    evaluation=st.integers(0, 100),
    recomputed=st.none() | st.integers(0, 200),
    asked=st.sampled_from(["auto", "keep"]),
    device=st.none() | st.integers(0, 800),
    host=st.none() | st.integers(0, 1500),
    on_cpu=st.booleans(),
    capacity=st.none() | st.integers(800, 2000),
    mode=st.sampled_from(["auto", "resident", "optimizer-offload", "parameter-offload"]),
)
def test_every_fix_of_every_refusal_makes_it_fit(
    blocks: list[int],
    dtype: str,
    micro: int,
    activations: int,
    evaluation: int,
    recomputed: int | None,
    asked: str,
    device: int | None,
    host: int | None,
    on_cpu: bool,
    capacity: int | None,
    mode: str,
) -> None:
    groups = tuple(GroupSize(f"block-{index}", size * 1024) for index, size in enumerate(blocks))
    demand = Demand(
        groups,
        dtype,
        micro,
        activations * micro * MIB,
        evaluation * micro * MIB,
        activations=asked,
        recompute_bytes=None if recomputed is None else recomputed * micro * MIB,
    )

    def size(mib: int | None) -> int | None:
        return None if mib is None else mib * MIB

    limits = MemoryLimits(size(device), size(host), on_cpu, size(capacity))
    if first_that_fits(demand, limits, mode) is not None:
        return
    if mode == "parameter-offload" and why_not_streamed(demand)[0]:
        with pytest.raises(InvalidJob, match="parameter-offload is not possible here"):
            make_plan(demand, limits, mode)
        return
    fixes = find_fixes(demand, limits, mode)
    assert 0 < len(fixes) <= MOST
    assert refusal(demand, limits, mode) == tuple(fix.text(demand, limits) for fix in fixes)
    for fix in fixes:
        assert with_fix(fix, demand, limits, mode).device_bytes > 0


def test_a_gated_plan_takes_slots_from_what_the_device_has_left() -> None:
    gated, blocking = (replace(DEMAND, schedule=schedule) for schedule in ("auto", "blocking"))
    total = len(gated.groups)
    least = lay_out(gated, UNLIMITED, "optimizer-offload", total)
    room = MemoryLimits(least.device_bytes + 10 * 2**30, None, device_is_host=False)
    plan = lay_out(gated, room, "optimizer-offload", total)
    assert plan.slots > least.slots == lay_out(blocking, room, "optimizer-offload", total).slots == 3
    assert least.device_bytes < plan.device_bytes <= least.device_bytes + 10 * 2**30
