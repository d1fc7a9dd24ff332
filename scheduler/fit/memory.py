"""Bytes on the device and on the host, by engine mode: the training engine's own plan, for a size instead of a model.

With P parameters of w bytes (4 in float32, 2 in bfloat16), of which T are trained, and AdamW:

    weights      w P
    gradients    w T          kept until the global norm is known
    optimizer    s T          s = 8 (two float32 moments), 10 in bfloat16 (and the low half of the master weight)
    staging      three chunks of state on their way; in bfloat16 also a chunk's gradient and master in float32
    activations  of one micro-batch. Kept: per token and block about 14 hidden + 3 intermediate elements, in bfloat16
                 16 hidden (attention scores are recomputed, never kept: true of fused kernels, without attention
                 dropout); once, logits with their softmax and gradient: 3 times the logits in float32.
                 Recomputed: per token and block its input, hidden elements; once, the larger of the inside of one
                 block in backward, 2 hidden + 1 intermediate elements more than are kept of it, and 3 times the logits.
                 A tied table's gradient has two parts: the output's waits for the input's, in all 3 copies.
                 All this is within 5 % of what fake tensors say of Llama models of 2 to 24 blocks, within 16 %
                 where their inner layers are narrow, and within 27 % of GPT-2's. With frozen parts they are those
                 of training everything, which are more

    mode                device                                   host
    resident            all                                      two buffers for the checkpoint
    optimizer-offload   all but the optimizer, and the staging   the optimizer and the buffers
    parameter-offload   what stands around the blocks, with      weights, gradients, optimizer and the buffers; room for
                        its gradients; two blocks' weights and   the gradients of a block, and what a bfloat16 update
                        two blocks' gradients; activations,      needs beside its chunk
                        always recomputed

All P are trained but those that `freeze` names, as far as their sizes are known from their names (`frozen`).
The host also holds the model while it is made, and up to a gibibyte of it while the result is written. A test holds
these formulas to the plan that the engine makes (`workloads/training/plan.py`, which must run without this package).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .frozen import frozen_parameters, frozen_parts
from .model import BatchShape, ModelShape

PARAMETER_OFFLOAD = "parameter-offload"
MODES = ("resident", "optimizer-offload", PARAMETER_OFFLOAD)
AUTO, KEEP, RECOMPUTE = "auto", "keep", "recompute"  # activations
RUNTIME_BYTES = 600 * 2**20
"""Driver context, libraries and allocator slack on a GPU; the plan does not count them."""
_MIN_CHUNK, _MAX_CHUNK = 64 * 1024, 32 * 2**20
_MIN_BLOCK, _MAX_BLOCK = 256 * 1024, 4 * 2**20
_EXPORT_BYTES = 2**30


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


def state_bytes(batch: BatchShape) -> int:
    """Optimizer state of one parameter."""
    return 8 if batch.dtype == "float32" else 10


def activations(model: ModelShape, batch: BatchShape) -> int:
    """Bytes that forward and backward of one micro-batch keep alive."""
    tokens = batch.micro_batch * batch.sequence_length
    logits = 4 * tokens * model.vocabulary
    element = tokens * batch.weight_bytes
    block = element * (
        (14 if batch.dtype == "float32" else 16) * model.hidden + 3 * model.active_intermediate
    )
    table = batch.weight_bytes * model.vocabulary * model.hidden if model.tied else 0
    if batch.activations != RECOMPUTE:
        return max(model.layers * block + 3 * logits, 3 * table)
    inputs = model.layers * element * model.hidden
    inside = block + element * (2 * model.hidden + model.active_intermediate)
    return max(inputs + inside + table, inputs + 3 * logits + 4 * element * model.hidden, 3 * table)


def decided(model: ModelShape, batch: BatchShape, mode: str, device_bytes: int | None) -> BatchShape:
    """`batch` with what `auto` does with activations on a device of this memory; None: of any.

    As in the engine: they are recomputed where they do not fit, and that needs less; in `parameter-offload` always.
    """
    if mode == PARAMETER_OFFLOAD:
        return replace(batch, activations=RECOMPUTE)
    if batch.activations != AUTO:
        return batch
    keeps, recomputes = (replace(batch, activations=each) for each in (KEEP, RECOMPUTE))
    needed = memory(model, keeps, mode).device_bytes
    if device_bytes is None or needed <= device_bytes:
        return keeps
    return recomputes if memory(model, recomputes, mode).device_bytes < needed else keeps


def memory(model: ModelShape, batch: BatchShape, mode: str) -> Footprint:
    """What training needs on one accelerator and on its host; of `auto` activations, to keep them (see `decided`).

    Raises:
        ValueError: a mode that no formula describes.
    """
    if mode not in MODES:
        raise ValueError(f"no memory formula for the mode {mode!r}; known are {', '.join(MODES)}")
    parameters, weight, each = model.parameters, batch.weight_bytes, state_bytes(batch)
    trained = parameters - frozen_parameters(model, batch.freeze)
    made, gradients, state = parameters * weight, trained * weight, trained * each
    chunk = min(_MAX_CHUNK, max(_MIN_CHUNK, trained // 64))
    scratch = 0 if batch.dtype == "float32" else 8 * chunk
    buffers = 2 * min(_MAX_BLOCK, max(_MIN_BLOCK, (gradients + state) // 32))
    if mode == PARAMETER_OFFLOAD:
        block = _largest_block(model, batch)
        frozen = frozen_parts(model, batch.freeze)
        outer = parameters - model.layers * model.layer_parameters
        trained_outer = outer - sum(size for part, size in frozen.items() if not part.startswith("block-"))
        on_device = (outer + trained_outer + 2 * model.layer_parameters + 2 * block) * weight
        again = replace(batch, activations=RECOMPUTE)
        home = made - (outer - trained_outer) * weight
        on_host = home + gradients + state + block * weight + scratch + buffers + min(made, _EXPORT_BYTES)
        return Footprint(on_device + activations(model, again) + RUNTIME_BYTES, max(made + home, on_host))
    offloaded = mode == "optimizer-offload"
    device = made + gradients + scratch + (3 * chunk * each if offloaded else state)
    running = (state if offloaded else 0) + buffers + min(made, _EXPORT_BYTES)
    return Footprint(device + activations(model, batch) + RUNTIME_BYTES, max(made, running))


def _largest_block(model: ModelShape, batch: BatchShape) -> int:
    """Trained parameters of the block that has most of them."""
    frozen = frozen_parts(model, batch.freeze)
    least = min(frozen.get(f"block-{index}", 0) for index in range(model.layers)) if frozen else 0
    return model.layer_parameters - least
