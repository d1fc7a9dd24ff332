"""Bytes on the device and on the host, by engine mode: the training engine's own plan, for a size instead of a model.

With P parameters of w bytes (4 in float32, 2 in bfloat16), of which T are trained, and AdamW:

    weights      w P
    gradients    g T          kept until the global norm is known; g = w, or 4 where they are added up in float32
    optimizer    s T          s = 8 (two float32 moments; 4 in bf16, 2.03 in int8), and in bfloat16 2 for the low half of the
                              master weight
    staging      three chunks of state on their way; in bfloat16 also a chunk's master, and its gradient if that is in
                 bfloat16, in float32; of reduced moments a chunk's in float32
    activations  of one micro-batch, of its tokens that this pod has. Kept: per token and block about 14 hidden + 3
                 intermediate elements, in bfloat16 16 hidden (attention scores are recomputed, never kept: true of fused
                 kernels, without attention dropout); once, logits with their softmax and gradient: 3 times the logits in float32.
                 Recomputed: per token and block its input, hidden elements; once, the larger of the inside of one
                 block in backward, 2 hidden + 1 intermediate elements more than are kept of it, and 3 times the logits.
                 Swapped: the inputs of two blocks, or beside the logits of one; the others are on the host.
                 MLPs in tiles: 10 hidden elements are kept in a block, in bfloat16 12; and once 2 more, with 5
                 intermediate elements of the tokens of one tile, or in bfloat16 10 more if these are more.
                 Documents that are kept apart have a mask of length x length elements for each sequence, which all blocks
                 share, and heads of keys and values that are repeated for those of queries.
                 A tied table's gradient has two parts: the output's waits for the input's, in all 3 copies.
                 All this is within 5 % of what fake tensors say of Llama models of 2 to 24 blocks, within 16 %
                 where their inner layers are narrow, and within 27 % of GPT-2's. With frozen parts they are those
                 of training everything, which are more

    mode                device                                   host
    resident            all                                      two buffers for the checkpoint
    optimizer-offload   all but the optimizer, and the staging   the optimizer and the buffers
    parameter-offload   what stands around the blocks, with      weights, gradients, optimizer and the buffers; room for
                        its gradients; two blocks' weights and   the gradients of a block, and what a bfloat16 update
                        two blocks' gradients; activations,      needs beside its chunk. State that may be on disk
                        always recomputed                        is there, but for three chunks on their way

A zeroth-order run has no gradients and no moments, keeps no activations, and in bfloat16 has the low halves as its state; it
has moved copies of the largest block's weights and of those around the blocks.

Over the N processes of a gang (`Gang`) the optimizer is s T / N, and so are the chunks and the buffers. Gradients are
g T / N where they are divided; where weights are, those that are trained and those of blocks are w / N, beside the largest
block's and the trained ones of what stands around the blocks. Processes that share sequences exchange a micro-batch's queries, and have room for
them twice. A fixed order keeps sums of gradients, and processes exchange the largest group's.

All P are trained but those that `freeze` names, as far as their sizes are known from their names (`frozen`).
The host also holds the model while it is made, or of divided weights a part of it at a time, and up to a gibibyte of it while the result is written. Beside all that a
pod's host needs HOST_RUNTIME_BYTES, and room for copies of the state in memory where the job asks for them. A test holds
these formulas to the plan that the engine makes (`workloads/training/plan.py`, which must run without this package).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .frozen import frozen_parameters, frozen_parts
from .model import BatchShape, ModelShape

PARAMETER_OFFLOAD = "parameter-offload"
MODES = ("resident", "optimizer-offload", PARAMETER_OFFLOAD)
AUTO, KEEP, RECOMPUTE, SWAP = "auto", "keep", "recompute", "swap"  # activations
AGAIN = (RECOMPUTE, SWAP)
WHOLE, TILED = "whole", "tiled"  # logits, and MLPs
TILE_TOKENS = 256  # of logits
_MLP_TILES, _LEAST_MLP_TILE = 16, 512
EXACT, BF16, INT8 = "exact", "bf16", "int8"  # moments
_MOMENT_BYTES = {EXACT: 8.0, BF16: 4.0, INT8: 2 + 2 * 4 / 256}
_NARROW_RUN = 2**20
RUNTIME_BYTES = 600 * 2**20
"""Driver context, libraries and allocator slack on a GPU; the plan does not count them."""
HOST_RUNTIME_BYTES = 2**30 + 96 * 2**20
"""On the host of a GPU: Python, the driver and its libraries, which the engine keeps free, and text that is prepared."""
CPU_RUNTIME_BYTES = 256 * 2**20 + 96 * 2**20
"""The same where the accelerator is the CPU, without a driver and its libraries."""
_SUPERVISOR_BYTES = 64 * 2**20
_COPY_HEADER_BYTES, _RANDOM_STATE_BYTES, _PARITY_PIECE_BYTES, _PARITY_GRAIN = 2**20, 8192, 2**20, 4096
_MIN_CHUNK, _MAX_CHUNK = 64 * 1024, 32 * 2**20
_MIN_BLOCK, _MAX_BLOCK = 256 * 1024, 4 * 2**20
_EXPORT_BYTES = 2**30
_READ_BYTES = 16 * 2**20
_SIGN_BYTES = 9  # of each element of a run whose direction is told
_MAX_RUN = 16 * 2**20
_MOST_LEAVES = 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes needed, one accelerator."""

    device_bytes: int
    host_bytes: int

    @property
    def device_mib(self) -> int:
        return -(-self.device_bytes // 2**20)

    @property
    def host_mib(self) -> int:
        return -(-self.host_bytes // 2**20)


@dataclass(frozen=True, slots=True)
class Gang:
    """The processes that share each step of a run, one accelerator each."""

    ranks: int = 1
    sharding: str = "optimizer"
    """What they divide: "optimizer", its state; "gradients", these too; "parameters", the weights too."""
    fixed_order: bool = False
    per_pod: int = 1
    """So many of them are in each pod, and share its host memory."""

    def sums(self, batch: BatchShape) -> int:
        """Copies of its gradients, or of its part of them, that a process keeps beside those it adds up."""
        return (self._leaves(batch) // self.ranks).bit_length() - 1 if self.fixed_order else 0

    def keeps_leaves(self, batch: BatchShape) -> bool:
        """Whether divided gradients need room for whole ones, until several micro-batches are added up."""
        micro_batches = batch.sequences // batch.micro_batch
        return self.fixed_order and micro_batches > self._leaves(batch)

    def _leaves(self, batch: BatchShape) -> int:
        micro_batches = batch.sequences // batch.micro_batch
        return max(self.ranks, min(_MOST_LEAVES, micro_batches & -micro_batches))


ALONE = Gang()


def state_bytes(batch: BatchShape) -> float:
    """Optimizer state of one parameter: a multiple of 1/32."""
    moments = 0.0 if batch.is_zeroth_order else _MOMENT_BYTES[batch.state]
    return moments + (0 if batch.dtype == "float32" else 2)


def copies_mib(model: ModelShape, batch: BatchShape, gang: Gang, parity: int) -> int:
    """MiB on the host of each pod where the state is copied into their memory: two copies, with what rebuilds those of
    `parity` lost processes, and the process that keeps them."""
    ranks = gang.ranks
    trained = model.parameters - frozen_parameters(model, batch.freeze)
    saved = int(trained * (batch.weight_bytes + state_bytes(batch))) + _RANDOM_STATE_BYTES
    own = -(-saved // ranks) + _COPY_HEADER_BYTES
    pieces = 0
    if ranks > 1:
        own += _RANDOM_STATE_BYTES
        own = ranks * -(-own // ((ranks - parity) * _PARITY_GRAIN)) * _PARITY_GRAIN
        pieces = (3 + parity) * _PARITY_PIECE_BYTES
    return -(-gang.per_pod * (2 * own + pieces + _SUPERVISOR_BYTES) // 2**20)


def _scratch_bytes(batch: BatchShape, chunk: int) -> int:
    """What updates need beside a chunk of so many parameters."""
    narrow = 0 if batch.state == EXACT else 8 * chunk
    narrow += 4 * min(_NARROW_RUN, chunk) if batch.state == INT8 else 0
    if batch.dtype == "float32":
        return narrow
    return narrow + (4 if batch.gradient_bytes == 4 else 8) * chunk


def logit_rows(batch: BatchShape) -> int:
    """Tokens whose logits exist at a time."""
    tokens = batch.micro_batch_tokens
    return min(tokens, TILE_TOKENS) if batch.loss == TILED else tokens


def mlp_tile_rows(tokens: int) -> int:
    """Tokens of a micro-batch of so many for which MLPs in tiles are computed at a time: few enough tiles that gradients are
    not rounded away where they are added up, and large enough that each keeps a GPU busy."""
    return min(tokens, max(_LEAST_MLP_TILE, -(-tokens // _MLP_TILES)))


def tiles_mlps(batch: BatchShape) -> bool:
    """Whether MLPs are computed in more than one tile."""
    tokens = batch.micro_batch_tokens
    return batch.mlp == TILED and mlp_tile_rows(tokens) < tokens


def activations(model: ModelShape, batch: BatchShape) -> int:
    """Bytes that forward and backward of one micro-batch keep alive."""
    tokens = batch.micro_batch_tokens
    logits = 4 * logit_rows(batch) * model.vocabulary
    element = tokens * batch.weight_bytes
    (block, inside), one = block_activations(model, batch), element * model.hidden
    mask, making = mask_bytes(batch)
    table = batch.weight_bytes * model.vocabulary * model.hidden if model.tied else 0
    if batch.activations not in AGAIN:
        at_end = inside - block + 3 * one if tiles_mlps(batch) else 0
        return max(mask + max(model.layers * block + at_end + 3 * logits, 3 * table), making + one)
    at_block, at_loss = (
        (min(2, model.layers), 1) if batch.activations == SWAP else (model.layers, model.layers)
    )
    needed = max(at_block * one + inside + table, (at_loss + 4) * one + 3 * logits, 3 * table)
    return max(mask + needed, making + one)


def mask_bytes(batch: BatchShape) -> tuple[int, int]:
    """Of a micro-batch whose documents are kept apart: while it is used, and while it is made of a boolean one."""
    if batch.packing == "across-documents":
        return 0, 0
    elements = batch.micro_batch * batch.sequence_length**2
    return elements * batch.weight_bytes, elements * (batch.weight_bytes + 1)


def block_activations(model: ModelShape, batch: BatchShape) -> tuple[int, int]:
    """Of the inside of one block what is kept until backward, and what is there at its worst moment."""
    element, exact = batch.micro_batch_tokens * batch.weight_bytes, batch.dtype == "float32"
    repeated = 2 * (model.heads - model.kv_heads) * model.head_dim if mask_bytes(batch)[0] else 0
    if not tiles_mlps(batch):
        kept = element * ((14 if exact else 16) * model.hidden + 3 * model.active_intermediate + repeated)
        return kept, kept + element * (2 * model.hidden + model.active_intermediate)
    one, rows = element * model.hidden, mlp_tile_rows(batch.micro_batch_tokens)
    kept = (10 if exact else 12) * one + element * repeated
    tile = rows * batch.weight_bytes * (5 * model.active_intermediate)
    return kept, kept + max(2 * one + tile, 0 if exact else 10 * one)


def swapped_activations(model: ModelShape, batch: BatchShape) -> int:
    """Bytes on the host of inputs of blocks, of one micro-batch, if they are swapped."""
    tokens = batch.micro_batch_tokens
    return (model.layers - 1) * tokens * batch.weight_bytes * model.hidden


def exchanged_parts(model: ModelShape, batch: BatchShape) -> int:
    """Bytes that one of the accelerators which share sequences exchanges at once: its queries of a micro-batch."""
    if batch.sequence_parallel == 1:
        return 0
    return batch.micro_batch_tokens * batch.weight_bytes * model.heads * model.head_dim


def forward_activations(model: ModelShape, batch: BatchShape) -> int:
    """Bytes that a forward pass of one micro-batch keeps alive where there is no backward pass: of the block or of the
    loss that needs the most. Within 6 % of what fake tensors say of Llama models."""
    tokens = batch.micro_batch_tokens
    element, rows = tokens * batch.weight_bytes, mlp_tile_rows(tokens) if batch.mlp == TILED else tokens
    inside = max(3 * model.active_intermediate * rows // tokens + 4 * model.hidden, 8 * model.hidden)
    losses = (8 if batch.dtype == "float32" else 10) * logit_rows(batch) * model.vocabulary
    mask, making = mask_bytes(batch)
    one = element * model.hidden
    return max(mask + element * inside, losses + one, making + one)


def decided(
    model: ModelShape, batch: BatchShape, mode: str, device_bytes: int | None, gang: Gang = ALONE
) -> BatchShape:
    """`batch` with what `auto` does with activations on a device of this memory; None: of any.

    As in the engine: the first of what is kept, recomputed and swapped that fits, where nothing does the one that needs the
    least. In `parameter-offload` nothing is kept.
    """
    if batch.activations != AUTO:
        return batch
    known = AGAIN if mode == PARAMETER_OFFLOAD else (KEEP, *AGAIN)
    ways = [replace(batch, activations=each) for each in known]
    needed = [memory(model, each, mode, gang).device_bytes for each in ways]
    for way, bytes_ in zip(ways, needed, strict=True):
        if device_bytes is None or bytes_ <= device_bytes:
            return way
    return ways[needed.index(min(needed))]


def memory(model: ModelShape, batch: BatchShape, mode: str, gang: Gang = ALONE) -> Footprint:
    """What training needs on one accelerator and on its host; of `auto` activations, to keep them (see `decided`).

    Of a gang, what one of its processes needs.

    Raises:
        ValueError: a mode that no formula describes.
    """
    if batch.is_zeroth_order:
        return _zeroth_order(model, batch, mode)
    if mode not in MODES:
        raise ValueError(f"no memory formula for the mode {mode!r}; known are {', '.join(MODES)}")
    parameters, weight, each = model.parameters, batch.weight_bytes, state_bytes(batch)
    trained = parameters - frozen_parameters(model, batch.freeze)
    made, gradients, state = parameters * weight, trained * batch.gradient_bytes, int(trained * each)
    chunk = min(_MAX_CHUNK, max(_MIN_CHUNK, trained // gang.ranks // 64))
    scratch = _scratch_bytes(batch, chunk)
    buffers = 2 * min(_MAX_BLOCK, max(_MIN_BLOCK, (trained * weight + state) // gang.ranks // 32))
    if mode == PARAMETER_OFFLOAD:
        block = _largest_block(model, batch)
        frozen = frozen_parts(model, batch.freeze)
        outer = parameters - model.layers * model.layer_parameters
        trained_outer = outer - sum(size for part, size in frozen.items() if not part.startswith("block-"))
        on_device = (outer + 2 * model.layer_parameters) * weight
        on_device += (trained_outer + 2 * block) * batch.gradient_bytes
        home = made - (outer - trained_outer) * weight
        on_disk = min(state, batch.scratch_disk_bytes)
        kept = state - on_disk + (int(3 * chunk * each) if on_disk else 0)
        on_host = home + gradients + kept + block * batch.gradient_bytes + scratch + buffers
        on_host += min(made, _EXPORT_BYTES) + _swapped(model, batch)
        return Footprint(
            on_device + activations(model, keeping_none(batch)) + RUNTIME_BYTES, max(made + home, on_host)
        )
    offloaded, own_state = mode == "optimizer-offload", state // gang.ranks
    device = (
        scratch
        + 2 * exchanged_parts(model, batch)
        + (int(3 * chunk * each) if offloaded else own_state)
        + _weights_and_gradients(model, batch, gang)
    )
    running = (own_state if offloaded else 0) + buffers + min(made, _EXPORT_BYTES) + _swapped(model, batch)
    if gang.ranks > 1 and gang.sharding == "parameters":
        part = part_bytes(model, batch)
        if part is None:  # gathered to be written at once
            running += (trained + _frozen_inside(model, batch)) * weight
        made = made if part is None else min(made, part)
    return Footprint(device + activations(model, batch) + RUNTIME_BYTES, max(made, running))


def part_bytes(model: ModelShape, batch: BatchShape) -> int | None:
    """On the host of a process that keeps slices of the weights, while it takes them: two of the largest tensors, of which none
    is larger than a block or the table. None: all weights, as the files of a model with experts are not read in parts."""
    if model.experts:
        return None
    largest = max(model.layer_parameters, model.vocabulary * model.hidden)
    return max(_READ_BYTES, 2 * largest * batch.weight_bytes)


def keeping_none(batch: BatchShape) -> BatchShape:
    """As where the weights are on the host: blocks are computed again, whatever happens to their inputs."""
    return batch if batch.activations in AGAIN else replace(batch, activations=RECOMPUTE)


def _swapped(model: ModelShape, batch: BatchShape) -> int:
    return swapped_activations(model, batch) if batch.activations == SWAP else 0


def _zeroth_order(model: ModelShape, batch: BatchShape, mode: str) -> Footprint:
    """Without gradients: weights, moved copies of a block's and of those around the blocks, and what a pass keeps alive."""
    weight, frozen = batch.weight_bytes, frozen_parts(model, batch.freeze)
    trained = model.parameters - frozen_parameters(model, batch.freeze)
    made, own_state = model.parameters * weight, int(trained * state_bytes(batch))
    run = min(_MAX_RUN, max(_largest_block(model, batch), *_outer(model, batch)) // 16)
    scratch = 0 if batch.dtype == "float32" else 8 * run
    buffers = 2 * min(_MAX_BLOCK, max(_MIN_BLOCK, (trained * weight + own_state) // 32))
    outer = model.parameters - model.layers * model.layer_parameters
    trained_outer = outer - sum(size for part, size in frozen.items() if not part.startswith("block-"))
    forward = forward_activations(model, batch)
    passing = max(forward, forward // 2 + _SIGN_BYTES * run) + RUNTIME_BYTES
    passing += (trained_outer + _largest_block(model, batch)) * weight
    written = buffers + min(made, _EXPORT_BYTES)
    if mode != PARAMETER_OFFLOAD:
        return Footprint(made + own_state + scratch + passing, max(made, written))
    home = made - (outer - trained_outer) * weight
    on_host = home + own_state + scratch + _SIGN_BYTES * run + written
    return Footprint((outer + 2 * model.layer_parameters) * weight + passing, max(made + home, on_host))


def _weights_and_gradients(model: ModelShape, batch: BatchShape, gang: Gang) -> int:
    """Bytes of one pod, with what they are exchanged through."""
    weight, frozen = batch.weight_bytes, frozen_parameters(model, batch.freeze)
    parameters = model.parameters
    trained, each = parameters - frozen, batch.gradient_bytes
    gradients, made, sums = trained * each, parameters * weight, 1 + gang.sums(batch)
    block, outer = _largest_block(model, batch), _outer(model, batch)
    largest = max(block, *outer) * each
    exchanged = largest + (0 if gang.fixed_order else largest // gang.ranks)
    if gang.ranks == 1:
        return made + gradients * sums + (exchanged if gang.fixed_order else 0)
    if gang.sharding == "optimizer":
        return made + gradients * sums + exchanged
    gradients = gradients // gang.ranks * sums + (gradients if gang.keeps_leaves(batch) else 0)
    if gang.sharding == "parameters":
        divided = trained + _frozen_inside(model, batch)
        made += (divided // gang.ranks - divided + model.layer_parameters + sum(outer)) * weight
    return made + gradients + exchanged + largest


def _frozen_inside(model: ModelShape, batch: BatchShape) -> int:
    """Parameters of blocks that are not trained."""
    frozen = frozen_parts(model, batch.freeze)
    return sum(size for part, size in frozen.items() if part.startswith("block-"))


def _outer(model: ModelShape, batch: BatchShape) -> tuple[int, int]:
    """Trained parameters before the blocks, and after them."""
    table, frozen = model.vocabulary * model.hidden, frozen_parts(model, batch.freeze)
    after = model.hidden + (0 if model.tied else table)
    return table - frozen.get("embedding", 0), after - frozen.get("head", 0)


def _largest_block(model: ModelShape, batch: BatchShape) -> int:
    """Trained parameters of the block that has most of them."""
    frozen = frozen_parts(model, batch.freeze)
    least = min(frozen.get(f"block-{index}", 0) for index in range(model.layers)) if frozen else 0
    return model.layer_parameters - least
