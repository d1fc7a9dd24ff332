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

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from busbar.workloads.training.parity import Stripes
from busbar.workloads.training.settings import (
    BF16,
    BLOCKING,
    EXACT,
    GATED,
    GRADIENTS,
    INT8,
    OPTIMIZER,
    PARAMETERS,
)

ALIGN_BYTES = 256
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
RANDOM_STATE_BYTES = 8192
COPIES = 2  # of the state in memory: one is whole while the other is written
PARITY_PIECE_BYTES = 2**20  # of what ranks add up at a time
COPY_HEADER_BYTES = 2**20  # names, shapes and checksums of all tensors of a copy of the state
SLOTS = 3  # one loading, one updating, one storing
AHEAD = (
    3,
    4,
)  # of the travelling chunks may be loaded before the norm is known: backward is that part of a step at most
MIN_CHUNK, MAX_CHUNK = 64 * 1024, 32 * 1024 * 1024  # parameters
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
MOMENT_BYTES = {EXACT: 8.0, BF16: 4.0, INT8: 2 + 2 * 4 / 256}  # of a parameter, both (see `moments`)
NARROW_RUN = 2**20  # moments that are made narrow at a time
DIVIDED = {
    OPTIMIZER: "the optimizer's state",
    GRADIENTS: "gradients and the optimizer's state",
    PARAMETERS: "weights, gradients and the optimizer's state",
}
AUTO, KEEP, RECOMPUTE, SWAP = "auto", "keep", "recompute", "swap"  # what a job may say of its activations
WAYS = {KEEP: "kept", RECOMPUTE: "recomputed", SWAP: "swapped"}  # in the order in which `auto` tries them
AGAIN = (RECOMPUTE, SWAP)  # with these, blocks are computed again in backward


@dataclass(frozen=True)
class GroupSize:
    """One flat group: a transformer block, or what stands before or after the blocks."""

    name: str
    parameters: int  # elements, alignment padding included

    @property
    def is_block(self) -> bool:
        return self.name.startswith("block-")


@dataclass(frozen=True)
class Demand:
    """What the run needs, independent of where it is put."""

    groups: tuple[GroupSize, ...]  # in forward order
    dtype: str
    micro_batch: int
    activation_bytes: int  # at `micro_batch` sequences, of training
    evaluation_bytes: int = 0  # the same of an evaluation; 0: there is none
    frozen_bytes: int = 0  # weights without gradients and state
    frozen_in_blocks: Mapping[str, int] = field(default_factory=dict)  # of them, by block
    shared_blocks: bool = False  # blocks have parameters in common, with others or with what is around them
    writes_frozen: bool = False  # the result holds them too
    merge_bytes: int = 0  # what adding an adapter to them needs; 0: it is not added
    ranks: int = 1  # that share a step, each with its own share of the optimizer's state
    fixed_order: bool = False
    partial_sums: int = 0  # copies of the gradients that a fixed order keeps beside them
    leaf_size: int = 1  # micro-batches that a fixed order adds up before the ranks' gradients are added
    sharding: str = (
        OPTIMIZER  # what the ranks divide: optimizer | gradients | parameters, with what is before it
    )
    part_bytes: int | None = (
        None  # weights in host memory at a time while divided ones come into their slices; None: all of them
    )
    gathers_result: bool = False  # where weights are divided: rank 0 needs all that it writes at once
    activations: str = AUTO
    recompute_bytes: int | None = None  # `activation_bytes` when they are recomputed; None: they cannot be
    swap_bytes: int | None = None  # the same when inputs of blocks are on the host; None: they cannot be
    swapped_bytes: int = 0  # of these
    gradient_dtype: str = ""  # in which gradients are added up; "": that of the weights
    sequence: int = 1  # ranks that share each sequence
    sequence_bytes: int = 0  # the most that ranks which share a sequence exchange at once
    memory_copies: int = 0  # of the state in host memory, beside the checkpoints (see `memory_copy`)
    parity: int = 0  # ranks that may be lost, and whose parts of these copies the others can rebuild
    state: str = EXACT  # format of AdamW's moments: exact | bf16 | int8
    zeroth_order: bool = False  # there is no backward pass (see `zeroth_plan`)
    schedule: str = (
        AUTO  # gated, if updates run beside the next forward pass | blocking | auto: if state travels
    )

    @cached_property
    def parameters(self) -> int:
        return sum(group.parameters for group in self.groups)

    def training_bytes(self, activations: str) -> int | None:
        """Of activations on the device that are kept, recomputed or swapped; None: they cannot be."""
        known = {KEEP: self.activation_bytes, RECOMPUTE: self.recompute_bytes, SWAP: self.swap_bytes}
        return known[activations]

    @property
    def model_bytes(self) -> int:
        """All weights, as they are when the model was made."""
        return self.parameters * self.weight_bytes + self.frozen_bytes

    @property
    def made_bytes(self) -> int:
        """Of the weights that are in host memory at a time before they are where they stay."""
        if self.divided != PARAMETERS or self.part_bytes is None:
            return self.model_bytes
        return min(self.part_bytes, self.model_bytes)

    @property
    def written_in_blocks(self) -> int:
        """Weights of blocks that are not trained and that the result holds all the same."""
        return sum(self.frozen_in_blocks.values()) if self.writes_frozen or self.merge_bytes else 0

    @property
    def result_bytes(self) -> int:
        """What is written at the end: the whole model, an adapter alone, or with a merged one both."""
        if self.writes_frozen:
            return self.model_bytes
        own = self.parameters * self.weight_bytes
        return own + (self.model_bytes if self.merge_bytes else 0)

    @property
    def weight_bytes(self) -> int:
        return WEIGHT_BYTES[self.dtype]

    @property
    def gradient_element_bytes(self) -> int:
        return WEIGHT_BYTES[self.gradient_dtype or self.dtype]

    @property
    def state_bytes_per_parameter(self) -> float:
        """A multiple of 1/32."""
        moments = 0.0 if self.zeroth_order else MOMENT_BYTES[self.state]
        return moments + (0 if self.dtype == "float32" else 2)

    def state_size(self, parameters: int) -> int:
        """Bytes of the state of so many."""
        return math.ceil(parameters * self.state_bytes_per_parameter)

    @property
    def scratch_bytes(self) -> int:
        """What updates need beside the chunk: in fp32 its gradient and its master weight under bfloat16, and its moments where
        they are not kept so; of `int8` also room to make them narrow."""
        chunk = aligned(chunk_parameters(self) * 4)
        narrow = 0 if self.state == EXACT else 2 * chunk
        if self.state == INT8:
            narrow += aligned(4 * min(NARROW_RUN, chunk_parameters(self)))
        if self.dtype == "float32":
            return narrow
        return narrow + chunk * (1 if self.gradient_element_bytes == 4 else 2)

    @property
    def exchange_bytes(self) -> int:
        """Of one group at a time; in fast order what gloo copies is part of it."""
        largest = max((group.parameters for group in self.groups), default=0) * self.gradient_element_bytes
        if self.ranks == 1 and not self.fixed_order:
            return 0
        filled = 0 if self.divided == OPTIMIZER else aligned(largest)
        own = 0 if self.fixed_order else aligned(largest // self.ranks)
        return filled + aligned(largest) + own + 2 * aligned(self.sequence_bytes)

    @property
    def divided(self) -> str:
        """What is divided among the ranks: as `sharding`, and where there is one rank nothing more than it has."""
        return OPTIMIZER if self.ranks == 1 else self.sharding

    @property
    def gradient_bytes(self) -> int:
        """Of all groups, with the sums that a fixed order keeps."""
        each = self.gradient_element_bytes
        whole = self.group_bytes(1, each)
        if self.divided == OPTIMIZER:
            return whole * (1 + self.partial_sums)
        leaves = whole if self.fixed_order and self.leaf_size > 1 else 0
        return self.group_bytes(self.ranks, each) * (1 + self.partial_sums) + leaves

    def group_bytes(self, parts: int, element: int) -> int:
        """One of `parts` equal slices of all groups, with so many bytes an element."""
        return sum(aligned(group.parameters // parts * element) for group in self.groups)


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


def aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def sliced(size: int, ranks: int) -> int:
    """Bytes of one of as many slices of `size` bytes, all of a multiple of ALIGN_BYTES."""
    return aligned(-(-size // ranks))


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


def gathered_bytes(demand: Demand) -> int:
    """Whole weights that a rank has at a time where they are divided."""

    inner = {
        name: demand.ranks * sliced(size, demand.ranks) for name, size in demand.frozen_in_blocks.items()
    }
    outer = 0
    for group in demand.groups:
        whole = aligned(group.parameters * demand.weight_bytes)
        if group.is_block:
            inner[group.name] = inner.get(group.name, 0) + whole
        else:
            outer += whole
    return max(inner.values(), default=0) + outer


def base_bytes(demand: Demand) -> int:
    """Of weights that are not trained, those that stay on a rank."""
    inside = demand.frozen_in_blocks.values()
    if demand.divided != PARAMETERS:
        return demand.frozen_bytes
    return demand.frozen_bytes - sum(inside) + sum(sliced(size, demand.ranks) for size in inside)


def why_not_divided(demand: Demand) -> tuple[str, str]:
    """Why the ranks cannot divide what the job asks them to, and what would help; two empty texts: they can."""
    if demand.divided != PARAMETERS:
        return "", ""
    if demand.shared_blocks:
        return "blocks of this model have weights in common", "set sharding: gradients"
    if not demand.frozen_in_blocks and not any(group.is_block for group in demand.groups):
        return (
            "no block of this model has weights of its own, and what stands around the blocks is whole on every rank",
            "set sharding: gradients",
        )
    return "", ""


def state_bytes(demand: Demand, groups: Sequence[GroupSize]) -> int:
    """The optimizer's state of `groups`, chunk by chunk."""
    chunk = chunk_parameters(demand)
    own = (group.parameters // demand.ranks for group in groups)
    return chunked_bytes(own, chunk, lambda size: aligned(demand.state_size(size)))


def checkpoint_bytes(demand: Demand) -> int:
    """Of all ranks."""
    state = demand.state_size(demand.parameters)
    return demand.parameters * demand.weight_bytes + state + RANDOM_STATE_BYTES


def own_checkpoint_bytes(demand: Demand) -> int:
    """This rank's part."""
    return -(-checkpoint_bytes(demand) // demand.ranks) + (RANDOM_STATE_BYTES if demand.ranks > 1 else 0)


def copy_bytes(demand: Demand) -> int:
    """Copies of the state in host memory, with their headers and manifests, and of a gang with parities."""
    own = own_checkpoint_bytes(demand) + COPY_HEADER_BYTES
    if demand.ranks == 1:
        return demand.memory_copies * own
    held = Stripes(demand.ranks, demand.parity).held_bytes(own)
    pieces = PARITY_PIECE_BYTES * (3 + demand.parity)  # one comes, one goes, one is multiplied, and the sums
    return demand.memory_copies * held + pieces


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


def is_gated(demand: Demand, offloaded: Sequence[GroupSize]) -> bool:
    """Whether updates run beside the next forward pass, if the state of `offloaded` is on the host."""
    return demand.schedule == GATED or (demand.schedule == AUTO and bool(offloaded))


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


def chunk_parameters(demand: Demand) -> int:
    """Elements per chunk: about a sixty-fourth of the model, within bounds, a multiple of 1024."""
    wanted = -(-demand.parameters // demand.ranks // 64 // 1024) * 1024
    return min(MAX_CHUNK, max(MIN_CHUNK, wanted))


def chunked_bytes(groups: Iterable[int], chunk: int, bytes_of: Callable[[int], int]) -> int:
    """The sum of `bytes_of` over all chunks of groups of so many elements. A plan compares hundreds of layouts, whose groups have
    up to hundreds of chunks, and all blocks are of one size."""
    chunks: Counter[int] = Counter()
    for parameters, count in Counter(groups).items():
        full, rest = divmod(parameters, chunk)
        chunks[chunk] += count * full
        chunks[rest] += count * (rest > 0)
    return sum(count * bytes_of(size) for size, count in chunks.items())


def chunk_sizes(parameters: int, chunk: int) -> list[int]:
    """Elements of each chunk of one group; chunks do not span groups."""
    full, rest = divmod(parameters, chunk)
    return [chunk] * full + ([rest] if rest else [])
