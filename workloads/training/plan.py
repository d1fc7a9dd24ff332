"""Who needs how many bytes, and whether that fits: decided before anything is allocated. No torch here.

Device bytes (AdamW, P parameters, w bytes per weight: 4 for float32, 2 for bfloat16):

    base          weights that are not trained, beside an adapter or because they are frozen: P does not count them.
                  Where weights are divided, those of blocks are as well
    parameters    w P        divided among N ranks w P / N
    slots         where weights are divided: the largest block's, and those of what stands around the blocks
    gradients     g P        kept until the global norm is known, for exact clipping; g = w, or 4 where they are added up in
                             float32. In fixed order once more
                             for every partial sum (see `division`). Divided among N ranks w P / N, and in fixed order
                             with several micro-batches per leaf w P more (see `gradient_shards`)
    optimizer     s R / N    s = 8 (fp32 m and v; 4 in bf16, 2.03 in int8), plus 2 for the low half of the master weight
                             under bfloat16; R = parameters of the groups whose state is resident; N ranks share it evenly
    exchange      over several ranks or in fixed order: the largest group's gradients, and in fast order a rank's
                             slice of them beside; once more the largest group's where gradients are divided;
                             twice a micro-batch's queries where ranks share sequences
    staging       slots x chunk x s, and under bfloat16 8 bytes per element of one chunk, for its gradient
                             and its master weight in fp32, and as much for its moments in a reduced format; nothing when
                             all state is resident, exact and in float32. Three slots
                             are enough; in the gated schedule more are taken from what the device has left, up to
                             three quarters of what travels, because loads run during backward as far as there are slots
    activations   what forward and backward of one micro-batch keep alive at their worst moment, or an evaluation,
                  or merging an adapter; with recomputation (`recompute`) the inputs of all blocks and the inside of one;
                  swapped (`input_swap`) the inputs of two blocks, as the others are on the host

A scratch disk may hold state that neither side has room for, in `parameter-offload` only (see `streamed_plan`).

Host bytes: the state that is not resident, swapped inputs of blocks, buffers for the checkpoint that is being written, and, where the
device is the host's memory (a CPU), the device bytes again. The buffers take what the host has left, up to a
copy of everything; two blocks are enough (see `capture`). `checkpoint.memory` takes two copies of the state more.

The host needs the most of what the phases of a run need (`MemoryPlan.phases`), D and H being the bytes above:

    preparation   tokenizer and one piece of text; tokens go to a file
    start         the model as it was made, w P (and the base), and on a CPU the parameters that it moves into; of divided
                  weights not all, but two of the largest drawn parameters, or a part of a file (see `first_weights`).
                  After that, and not beside it, the rest of a step but its activations
    step          D (on a CPU) and H, and a piece of text that is tokenized beside it; the same while a snapshot is taken and
                  while a checkpoint is read
    evaluation    D and H, and the counts of n-grams; its activations are in `activations`
    export        D and H, and on a GPU the part of the weights that is written at once

`auto` moves state to the host only as far as needed, last groups first: the next forward needs them last
(the placement rule for overlapped updates). Activations are recomputed where the job says so, or says `auto` and no
layout fits that keeps them; they are swapped where it says so, or `auto` fits in no other way. `choice` takes the first layout that fits, and where none does, `fixes` finds the cheapest
changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from busbar.workloads.training.demand import (
    AUTO,
    KEEP,
    RECOMPUTE,
    SWAP,
    Demand,
    GroupSize,
    aligned,
    base_bytes,
    checkpoint_bytes,
    chunk_parameters,
    copy_bytes,
    gathered_bytes,
    is_gated,
    own_checkpoint_bytes,
    state_bytes,
)
from busbar.workloads.training.settings import (
    BLOCKING,
    EXACT,
    GATED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
)

PREPARATION_BYTES = (
    96 * 2**20
)  # 45 MiB were measured, 72 with tables; the text that a tokenizer is trained on is bounded
MAKING_TOKENS_BYTES = (
    32 * 2**20
)  # a piece of text while it is tokenized beside the first steps; 22 MiB were measured
EVALUATION_BYTES = 80 * 2**20  # counts of n-grams, of which there are as many as held-out bytes at most
EXPORT_BYTES = 2**30  # weights that are written at once
READ_BYTES = 16 * 2**20  # of a saved model, of whose weights only slices are read, at a time
DRAWN_ROOM = 2  # times the largest tensor is in memory while weights are drawn of which only slices are kept
MIN_BLOCK, MAX_BLOCK = 256 * 1024, 4 * 2**20
"""Bytes of one snapshot buffer: small enough that it is written from the CPU's caches, and that little is left to do
when the last one comes."""
MIN_BLOCKS = 2  # one is filled while the other is written
SLOTS = 3  # one loading, one updating, one storing
AHEAD = (
    3,
    4,
)  # of the travelling chunks may be loaded before the norm is known: backward is that part of a step at most
DIVIDED = {
    OPTIMIZER: "the optimizer's state",
    GRADIENTS: "gradients and the optimizer's state",
    PARAMETERS: "weights, gradients and the optimizer's state",
}
WAYS = {KEEP: "kept", RECOMPUTE: "recomputed", SWAP: "swapped"}  # in the order in which `auto` tries them


@dataclass(frozen=True)
class MemoryLimits:
    device_bytes: int | None  # None: not limited
    host_bytes: int | None
    device_is_host: bool  # a CPU: the device arena takes host memory too
    device_capacity_bytes: int | None = None  # to which `deviceMemory` could be raised; None: not known
    disk_bytes: int = 0  # of a scratch disk, which optimizer state may take


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per owner on both sides, and the groups whose optimizer state lives on the host."""

    mode: str  # resident | optimizer-offload | parameter-offload
    dtype: str
    offloaded: tuple[str, ...]  # group names
    chunk_parameters: int
    slots: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    limits: MemoryLimits
    offloaded_fraction: float  # of the parameters
    activations: str  # keep | recompute | swap | none
    why: str  # they are kept, recomputed or swapped
    gated: bool  # updates run beside the next forward pass
    # added by `assemble`:
    snapshot_block_bytes: int = 0
    snapshot_blocks: int = 0  # how many buffers; with fewer than all, updates may wait for the disk
    checkpoint_bytes: int = 0  # of all ranks
    phases: Mapping[str, int] = field(default_factory=dict)  # host bytes of each phase
    weight_slots: int = (
        0  # of blocks on the device, whose weights live on the host; 0: all weights are on the device
    )
    on_disk: tuple[str, ...] = ()  # groups whose optimizer state is on a scratch disk
    disk_bytes: int = 0  # that it takes there
    why_mode: str = ""  # it was chosen; "": the job says so
    state: str = EXACT  # the format of the moments
    sharding: str = OPTIMIZER  # what `ranks` divide among them
    sequence: int = 1  # of them share each sequence
    ranks: int = 1
    gathers_result: bool = False  # rank 0 needs all at once of the divided weights that it writes

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return max(self.phases.values())

    def explain(self) -> str:
        """The plan as lines a person reads."""
        limit = (
            "no limit"
            if self.limits.device_bytes is None
            else f"limit {shown_bytes(self.limits.device_bytes)}"
        )
        share = f", {self.offloaded_fraction:.0%} of the state on the host" if self.offloaded else ""
        if self.weight_slots:
            share = f", all weights and state on the host, {self.weight_slots} blocks at a time on the device"
        if self.on_disk:
            share += f", the state of {len(self.on_disk)} groups on disk"
        chosen = f" ({self.why_mode})" if self.why_mode else ""
        rows = [f"mode {self.mode}{share}{chosen}", f"activations: {self.activations}, {self.why}"]
        rows += [f"schedule: {GATED if self.gated else BLOCKING}"]
        rows += [f"moments: {self.state}"] if self.state != EXACT else []
        rows += [f"sharding: {DIVIDED[self.sharding]} among {self.ranks} ranks"] if self.ranks > 1 else []
        rows += [f"sequences: {self.sequence} ranks share each sequence"] if self.sequence > 1 else []
        rows += [f"device {shown_bytes(self.device_bytes)} ({limit})"]
        rows += [f"  {owner:<12} {shown_bytes(size):>12}" for owner, size in self.device.items() if size]
        limit = (
            "no limit" if self.limits.host_bytes is None else f"limit {shown_bytes(self.limits.host_bytes)}"
        )
        rows += [f"host {shown_bytes(self.host_bytes)} ({limit})"]
        rows += [f"  {owner:<12} {shown_bytes(size):>12}" for owner, size in self.host.items() if size]
        rows += [f"scratch disk {shown_bytes(self.disk_bytes)}"] if self.on_disk else []
        shown = ", ".join(f"{phase} {shown_bytes(size)}" for phase, size in self.phases.items())
        return "\n".join(
            [*rows, f"host by phase: {shown}", f"checkpoint {shown_bytes(self.checkpoint_bytes)}"]
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "modeWhy": self.why_mode,
            "offloadedFraction": round(self.offloaded_fraction, 4),
            "activations": self.activations,
            "activationsWhy": self.why,
            "schedule": GATED if self.gated else BLOCKING,
            "state": self.state,
            "sharding": self.sharding,
            "device": dict(self.device),
            "host": dict(self.host),
            "deviceBytes": self.device_bytes,
            "hostBytes": self.host_bytes,
            "diskBytes": self.disk_bytes,
            "deviceLimitBytes": self.limits.device_bytes,
            "checkpointBytes": self.checkpoint_bytes,
            "hostPhases": dict(self.phases),
        }


def shown_bytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size < 10 * 2**30 else f"{size / 2**30:.1f} GiB"


def lay_out(
    demand: Demand, limits: MemoryLimits, mode: str, offloaded_groups: int, *, activations: str | None = None
) -> MemoryPlan:
    """Bytes per owner when the state of the last `offloaded_groups` groups is on the host.

    Args:
        activations: keep | recompute | swap; None: as the job says, and keep if it says `auto`.
    """
    way = activations or (KEEP if demand.activations == AUTO else demand.activations)
    cut = len(demand.groups) - offloaded_groups
    resident, offloaded = demand.groups[:cut], demand.groups[cut:]
    staged = aligned(demand.state_size(chunk_parameters(demand)))
    divides_weights = demand.divided == PARAMETERS
    weights = demand.group_bytes(demand.ranks if divides_weights else 1, demand.weight_bytes)

    slots = SLOTS if offloaded else 0
    device = {
        "parameters": weights,
        "gradients": demand.gradient_bytes,
        "optimizer": state_bytes(demand, resident),
        "staging": slots * staged + demand.scratch_bytes,
        "activations": max(demand.training_bytes(way) or 0, demand.evaluation_bytes, demand.merge_bytes),
    }
    if demand.frozen_bytes:
        device["base"] = base_bytes(demand)
    if demand.exchange_bytes:
        device["exchange"] = demand.exchange_bytes
    if divides_weights:
        device["slots"] = gathered_bytes(demand)
    host = {"optimizer": state_bytes(demand, offloaded), **swapped(demand, way)}
    more = _more_slots(
        demand,
        limits,
        offloaded,
        sum(device.values()),
        sum(host.values()) + own_checkpoint_bytes(demand) + copy_bytes(demand),
    )
    device["staging"] += more * staged
    made = demand.made_bytes  # before it moves into the arena
    return assemble(
        demand,
        limits,
        MemoryPlan(
            mode=mode,
            dtype=demand.dtype,
            offloaded=tuple(group.name for group in offloaded),
            chunk_parameters=chunk_parameters(demand),
            slots=slots + more,
            device=device,
            host=host,
            limits=limits,
            offloaded_fraction=sum(g.parameters for g in offloaded) / max(1, demand.parameters),
            activations=way,
            why=why_activations(demand, way),
            gated=is_gated(demand, offloaded),
            sharding=demand.divided,
            sequence=demand.sequence,
            ranks=demand.ranks,
            state=demand.state,
            gathers_result=demand.gathers_result,
        ),
        made + (weights + device.get("slots", 0) + device.get("base", 0) if limits.device_is_host else 0),
    )


def swapped(demand: Demand, activations: str) -> dict[str, int]:
    """Bytes of the host for activations."""
    return {"activations": demand.swapped_bytes} if activations == SWAP else {}


def assemble(demand: Demand, limits: MemoryLimits, placed: MemoryPlan, moving: int) -> MemoryPlan:
    """`placed` with the buffers of snapshots, of which there are as many as the host has room for, and its phases.

    Args:
        moving: bytes of the host while the model moves into the arenas.
    """
    device_bytes = placed.device_bytes if limits.device_is_host else 0
    copies = {"copies": copy_bytes(demand)} if demand.memory_copies else {}
    others = sum(placed.host.values()) + sum(copies.values()) + device_bytes
    beside = {
        "step": MAKING_TOKENS_BYTES,
        "evaluation": EVALUATION_BYTES if demand.evaluation_bytes else 0,
        "export": 0 if limits.device_is_host else min(demand.model_bytes, EXPORT_BYTES),
    }
    gathers = placed.sharding == PARAMETERS and demand.gathers_result
    if placed.weight_slots or gathers:
        beside["export"] += demand.merge_bytes
    if gathers:  # whole on rank 0
        beside["export"] += demand.group_bytes(1, demand.weight_bytes)
        beside["export"] += demand.written_in_blocks
    own = own_checkpoint_bytes(demand)
    block = block_bytes(own)
    room = None if limits.host_bytes is None else limits.host_bytes - others - max(beside.values())
    blocks = snapshot_blocks(own, block, room)
    running = others + blocks * block
    return replace(
        placed,
        host={**placed.host, "checkpoint": blocks * block, **copies},
        snapshot_block_bytes=block,
        snapshot_blocks=blocks,
        checkpoint_bytes=checkpoint_bytes(demand),
        phases={
            "preparation": PREPARATION_BYTES,
            "start": max(
                moving + sum(copies.values()),
                running - (placed.device["activations"] if limits.device_is_host else 0),
            ),
            **{phase: running + size for phase, size in beside.items()},
        },
    )


def _more_slots(
    demand: Demand, limits: MemoryLimits, offloaded: tuple[GroupSize, ...], device_bytes: int, host_bytes: int
) -> int:
    """Slots beyond the least number that the device has room for; a whole snapshot on the host goes before them."""
    if not is_gated(demand, offloaded) or limits.device_bytes is None:
        return 0
    chunk = chunk_parameters(demand)
    travelling = sum(-(-(group.parameters // demand.ranks) // chunk) for group in offloaded)
    room = limits.device_bytes - device_bytes
    if limits.device_is_host and limits.host_bytes is not None:
        room = min(room, limits.host_bytes - EVALUATION_BYTES - host_bytes - device_bytes)
    wanted = travelling * AHEAD[0] // AHEAD[1] - SLOTS
    return max(0, min(wanted, room // aligned(demand.state_size(chunk))))


def why_activations(demand: Demand, way: str) -> str:
    if demand.activations != AUTO:
        return "as the job says"
    if way == RECOMPUTE:
        return f"because no layout fits that keeps them ({shown_bytes(demand.activation_bytes)})"
    if way == SWAP:
        return f"because no layout fits that recomputes them ({shown_bytes(demand.recompute_bytes or 0)})"
    return "because they fit" if demand.recompute_bytes is not None else "because this model cannot recompute"


def block_bytes(checkpoint: int) -> int:
    """Size of a snapshot buffer: a thirty-second of the checkpoint, within bounds, whole pages."""
    wanted = -(-checkpoint // 32 // 4096) * 4096
    return min(MAX_BLOCK, max(MIN_BLOCK, wanted))


def snapshot_blocks(checkpoint: int, block: int, room: int | None) -> int:
    """As many buffers as the checkpoint has blocks, or as many as `room` bytes hold, but two at least."""
    whole = -(-checkpoint // block)
    return whole if room is None else min(whole, max(MIN_BLOCKS, room // block))
