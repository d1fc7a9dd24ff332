"""What a run needs in bytes, independent of where it is put: its groups, activations, state, exchange and checkpoints.

`plan` decides what of it is on the device, on the host or on disk, and has the formulas. No torch here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from busbar.workloads.training.parity import Stripes
from busbar.workloads.training.settings import BF16, EXACT, GATED, INT8, OPTIMIZER, PARAMETERS

ALIGN_BYTES = 256
RANDOM_STATE_BYTES = 8192
COPIES = 2  # of the state in memory: one is whole while the other is written
PARITY_PIECE_BYTES = 2**20  # of what ranks add up at a time
COPY_HEADER_BYTES = 2**20  # names, shapes and checksums of all tensors of a copy of the state
MIN_CHUNK, MAX_CHUNK = 64 * 1024, 32 * 1024 * 1024  # parameters
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
MOMENT_BYTES = {EXACT: 8.0, BF16: 4.0, INT8: 2 + 2 * 4 / 256}  # of a parameter, both (see `moments`)
NARROW_RUN = 2**20  # moments that are made narrow at a time
AUTO, KEEP, RECOMPUTE, SWAP = "auto", "keep", "recompute", "swap"  # what a job may say of its activations
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


def aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def sliced(size: int, ranks: int) -> int:
    """Bytes of one of as many slices of `size` bytes, all of a multiple of ALIGN_BYTES."""
    return aligned(-(-size // ranks))


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


def is_gated(demand: Demand, offloaded: Sequence[GroupSize]) -> bool:
    """Whether updates run beside the next forward pass, if the state of `offloaded` is on the host."""
    return demand.schedule == GATED or (demand.schedule == AUTO and bool(offloaded))


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
