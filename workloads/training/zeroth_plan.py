"""Bytes of training without a backward pass (see `zeroth_order`). No torch here.

    device    the weights (or, with weights on the host, what stands around the blocks, and slots for the weights of
              blocks); moved copies of the largest block's and of those of what stands around; what a forward pass keeps
              alive, which is less than half of its peak while the signs of a run of weights are told between two blocks
    home      where the weights are: in bfloat16 the low halves of their masters, and room to update a run of them

There are no gradients. Weights on the host are those of `parameter-offload`.
"""

from __future__ import annotations

from busbar.workloads.training.demand import Demand, GroupSize, aligned
from busbar.workloads.training.plan import MemoryLimits, MemoryPlan, assemble
from busbar.workloads.training.streamed_plan import (
    PARAMETER_OFFLOAD,
    WEIGHT_SLOTS,
    block_weights,
    why_not_streamed,
)

RESIDENT = "resident"
MODES = ("auto", RESIDENT, PARAMETER_OFFLOAD)
SIGN_BYTES = 9
"""Of each element of a run whose signs are told: its bit as a number, its sign, and its share of a hash (see `directions`)."""
MAX_RUN = 16 * 2**20  # parameters
NONE, WHY = "none", "there is no backward pass"  # what happens to activations


def why_not_zeroth(demand: Demand, mode: str) -> tuple[str, str]:
    """Why a job cannot be trained so, and what would help; two empty texts: it can."""
    if demand.ranks > 1 or demand.fixed_order:
        return "it runs in one process", "set shape.maxPods: 1 and remove parallelism"
    if mode not in MODES:
        return f"it has no state that mode {mode} could move", f"set mode: {', '.join(MODES)}"
    if mode == PARAMETER_OFFLOAD:
        return why_not_streamed(demand)
    return "", ""


def zeroth_layouts(demand: Demand, limits: MemoryLimits, mode: str) -> list[MemoryPlan]:
    """The weights on the device, then on the host."""
    if why_not_zeroth(demand, mode)[0]:
        return []
    found = [] if mode == PARAMETER_OFFLOAD else [lay_out_zeroth(demand, limits)]
    if mode != RESIDENT and not why_not_streamed(demand)[0]:
        why = "" if mode == PARAMETER_OFFLOAD else "the device has no room for all weights"
        found.append(lay_out_zeroth(demand, limits, on_host=True, why=why))
    return found


def run_parameters(demand: Demand) -> int:
    """Elements that are moved or updated at a time: a sixteenth of the largest group, within bounds, a multiple of 1024."""
    largest = max(group.parameters for group in demand.groups)
    return min(MAX_RUN, -(-largest // 16 // 1024) * 1024)


def lay_out_zeroth(
    demand: Demand, limits: MemoryLimits, *, on_host: bool = False, why: str = ""
) -> MemoryPlan:
    """Bytes per owner; `why` the mode was chosen."""

    def bytes_of(groups: list[GroupSize]) -> int:
        return sum(aligned(group.parameters * demand.weight_bytes) for group in groups)

    outer = bytes_of([group for group in demand.groups if not group.is_block])
    inner = [bytes_of([group]) for group in demand.groups if group.is_block]
    weights, chunk = outer + sum(inner), run_parameters(demand)
    signs = SIGN_BYTES * chunk
    at_home = {"parameters": weights}
    if demand.dtype != "float32":
        at_home["optimizer"] = sum(aligned(group.parameters * 2) for group in demand.groups)
        at_home["staging"] = 2 * aligned(chunk * 4)
    frozen_inside = sum(demand.frozen_in_blocks.values())
    moved = outer + max(inner, default=0)
    passing = max(demand.activation_bytes, demand.activation_bytes // 2 + signs, demand.evaluation_bytes)
    if on_host:
        slots = block_weights(demand)
        device = {"parameters": outer, "moved": moved, "activations": passing}
        device["slots"] = min(WEIGHT_SLOTS, len(slots)) * max(slots.values())
        host = {**at_home, "signs": signs} | ({"base": frozen_inside} if frozen_inside else {})
        base = demand.frozen_bytes - frozen_inside
    else:
        device, host = {**at_home, "moved": moved, "activations": passing}, {}
        base = demand.frozen_bytes
    if base:
        device["base"] = base
    on_device = (outer if on_host else weights) + base if limits.device_is_host else 0
    return assemble(
        demand,
        limits,
        MemoryPlan(
            mode=PARAMETER_OFFLOAD if on_host else RESIDENT,
            dtype=demand.dtype,
            offloaded=(),
            chunk_parameters=chunk,
            slots=0,
            device=device,
            host=host,
            limits=limits,
            offloaded_fraction=1.0 if on_host else 0.0,
            activations=NONE,
            why=WHY,
            gated=False,
            weight_slots=min(WEIGHT_SLOTS, len(block_weights(demand))) if on_host else 0,
            why_mode=why,
        ),
        demand.model_bytes + (weights + frozen_inside if on_host else 0) + on_device,
    )
