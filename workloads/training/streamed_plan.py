"""Bytes of `parameter-offload`, in which weights and state live on the host. No torch here.

    device    what stands around the blocks, with its gradients; WEIGHT_SLOTS slots for the weights of a block, more
              where the device has room, and GRADIENT_SLOTS for its gradients; activations, recomputed or swapped
    host      all weights, gradients and optimizer state; room for a block's gradients of a later micro-batch until
              they are added up; what updates need beside their chunk, of bfloat16 weights and of reduced moments
    disk      the optimizer state of the last groups, as many as the host has no room for, if the job allows it some; then
              SLOTS chunks of state stand on the host while one is read, one updated and one written

A slot of weights takes the largest block, its frozen weights included.
"""

from __future__ import annotations

from collections.abc import Sequence

from busbar.workloads.training.demand import (
    AGAIN,
    AUTO,
    KEEP,
    RECOMPUTE,
    Demand,
    GroupSize,
    aligned,
    chunk_parameters,
    chunked_bytes,
    copy_bytes,
    is_gated,
    own_checkpoint_bytes,
    state_bytes,
)
from busbar.workloads.training.plan import (
    EVALUATION_BYTES,
    SLOTS,
    MemoryLimits,
    MemoryPlan,
    assemble,
    swapped,
    why_activations,
)

PARAMETER_OFFLOAD = "parameter-offload"
WEIGHT_SLOTS = 2  # one is computed with, the other is loaded
GRADIENT_SLOTS = 2  # one is filled, the other is brought to the host
PAGE = 4096


def why_not_streamed(demand: Demand) -> tuple[str, str]:
    """Why a job cannot run in this mode, and what would help; two empty texts: it can."""
    if demand.ranks > 1:
        return (
            f"it runs in one process, and the job has {demand.ranks}",
            "set shape.maxPods: 1, and remove parallelism",
        )
    if demand.fixed_order:
        return (
            "it adds micro-batches up as they come, and not in a fixed tree",
            "remove parallelism.order: fixed",
        )
    if demand.activations == KEEP:
        return "it recomputes activations, while their block is on the device", "remove activations: keep"
    if not block_weights(demand) or (demand.recompute_bytes is None and not demand.zeroth_order):
        return "this model has no list of blocks that can be computed again", "take another mode"
    if demand.shared_blocks:
        return "blocks of this model have weights in common", "take another mode"
    return "", ""


def block_weights(demand: Demand) -> dict[str, int]:
    """Bytes of the weights of each block, frozen ones included."""
    found = dict(demand.frozen_in_blocks)
    for group in demand.groups:
        if group.is_block:
            found[group.name] = found.get(group.name, 0) + aligned(group.parameters * demand.weight_bytes)
    return found


def streamed_layouts(demand: Demand, limits: MemoryLimits, why: str = "") -> list[MemoryPlan]:
    """With all state on the host, then with that of the last group on disk, of the last two and so on; of `auto` activations,
    those that recompute them come before those that swap them."""
    most = len(demand.groups) if limits.disk_bytes else 0
    ways = AGAIN if demand.activations == AUTO else (demand.activations,)
    return [
        lay_out_streamed(demand, limits, why, count, activations=way)
        for way in ways
        if demand.training_bytes(way) is not None
        for count in range(most + 1)
    ]


def lay_out_streamed(
    demand: Demand,
    limits: MemoryLimits,
    why: str = "",
    groups_on_disk: int = 0,
    *,
    activations: str = RECOMPUTE,
) -> MemoryPlan:
    """Bytes per owner when the state of the last `groups_on_disk` groups is on disk; `why` the mode was chosen."""

    def bytes_of(groups: Sequence[GroupSize], element: int) -> int:
        return sum(aligned(group.parameters * element) for group in groups)

    weight, each = demand.weight_bytes, demand.gradient_element_bytes
    around = [group for group in demand.groups if not group.is_block]
    outer = bytes_of(around, weight)
    gradients = max((bytes_of([group], each) for group in demand.groups if group.is_block), default=0)
    slots = block_weights(demand)
    slot, chunk = max(slots.values()), chunk_parameters(demand)
    cut = len(demand.groups) - groups_on_disk
    on_disk = demand.groups[cut:]
    frozen_inside = sum(demand.frozen_in_blocks.values())
    least = min(WEIGHT_SLOTS, len(slots))
    device = {
        "parameters": outer,
        "gradients": bytes_of(around, each) + GRADIENT_SLOTS * gradients,
        "slots": least * slot,
        "activations": max(demand.training_bytes(activations) or 0, demand.evaluation_bytes),
    }
    if demand.frozen_bytes > frozen_inside:
        device["base"] = demand.frozen_bytes - frozen_inside
    host = {
        "parameters": bytes_of(demand.groups, weight),
        "gradients": bytes_of(demand.groups, each),
        "optimizer": state_bytes(demand, demand.groups[:cut]),
        "staging": gradients + demand.scratch_bytes,
        **swapped(demand, activations),
    }
    if on_disk:
        host["disk"] = SLOTS * _pages(demand.state_size(chunk))
    if frozen_inside:
        host["base"] = frozen_inside
    more = _more_slots(demand, limits, sum(device.values()), sum(host.values()), slot)
    more = min(more, len(slots) - least)
    device["slots"] += more * slot
    on_device = outer + device.get("base", 0) if limits.device_is_host else 0
    return assemble(
        demand,
        limits,
        MemoryPlan(
            mode=PARAMETER_OFFLOAD,
            dtype=demand.dtype,
            offloaded=(),  # the updates do not move it: it is where they run
            chunk_parameters=chunk,
            slots=SLOTS if on_disk else 0,
            device=device,
            host=host,
            limits=limits,
            offloaded_fraction=1.0,
            activations=activations,
            why=_why(demand, activations),
            gated=is_gated(demand, demand.groups),
            weight_slots=least + more,
            on_disk=tuple(group.name for group in on_disk),
            disk_bytes=_disk_bytes(demand, on_disk),
            why_mode=why,
            state=demand.state,
        ),
        demand.model_bytes + host["parameters"] + frozen_inside + on_device,
    )


def _why(demand: Demand, activations: str) -> str:
    always = "while their block is on the device"
    return always if activations == RECOMPUTE else why_activations(demand, activations)


def _disk_bytes(demand: Demand, groups: Sequence[GroupSize]) -> int:
    """Of the state of `groups` in a scratch file."""
    own = (group.parameters for group in groups)
    return chunked_bytes(own, chunk_parameters(demand), lambda size: _pages(demand.state_size(size)))


def _pages(size: int) -> int:
    """A chunk's state on disk, and where it stands on the host, are whole pages."""
    return -(-size // PAGE) * PAGE


def _more_slots(demand: Demand, limits: MemoryLimits, device_bytes: int, host_bytes: int, slot: int) -> int:
    """Beyond the least number; a whole snapshot on the host goes before them."""
    if limits.device_bytes is None:
        return 0
    room = limits.device_bytes - device_bytes
    if limits.device_is_host and limits.host_bytes is not None:
        taken = (
            host_bytes + device_bytes + EVALUATION_BYTES + own_checkpoint_bytes(demand) + copy_bytes(demand)
        )
        room = min(room, limits.host_bytes - taken)
    return max(0, room // slot)
