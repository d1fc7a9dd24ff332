"""Predicted training speed: a roofline of compute, device memory, and the link to the host.

Per step, with T tokens, P parameters, s bytes of optimizer state per parameter and k accelerators:

    compute   6 P T / (k x reached flops); with recomputed activations one more forward pass of the blocks, whose
              parameters are B of the P: (6 P + 2 B) T, about 4/3 of it. Swapped activations go up the link beside
              forward, and down beside backward: each takes as long as the slower of both
              Frozen parameters need no gradient of their own: 2 F less. That backward ends above a frozen beginning of
              the model is not counted
    update    of the P - F that are trained. resident: the optimizer state is read and written in device memory, and reduced
              moments are made wide and narrow there
              optimizer-offload: the share of the state that is on the host (of the last blocks) goes through the
              device, down and up the link at once, as `timeline` says: beside the next forward pass if `gated`,
              beside backward as far as there are staging slots, else behind backward
              parameter-offload: weights come down for each micro-batch's forward and again for its backward pass, in
              which gradients go up; the host's processors update, at the speed of its memory. As no data sheet has
              that speed, the mode is taken to be no faster than optimizer-offload, before which nothing chooses it

A zeroth-order step has two forward passes, 4 P T, and an update of the weights alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .accelerators import Accelerator
from .frozen import frozen_parameters
from .memory import (
    AGAIN,
    BF16,
    EXACT,
    INT8,
    KEEP,
    PARAMETER_OFFLOAD,
    RECOMPUTE,
    SWAP,
    TILED,
    WHOLE,
    keeping_none,
    state_bytes,
    swapped_activations,
    tiles_mlps,
)
from .model import BatchShape, ModelShape
from .timeline import GroupWork, Rates, StreamedBlock, step_time, streamed_step_time

EFFICIENCY_PER_DOUBLING = 0.95
"""What every doubling of accelerators keeps."""
COPIES_ON_A_CPU = 1.3
"""A CPU's link is its own memory: the state is read and written once more on its way."""
HOST_GB_PER_S = 150.0
"""What a host's processors reach of its memory: a stated guess, as its data sheet is not known here."""
NARROWING = {EXACT: 0, BF16: 24, INT8: 204}
"""Bytes that go through memory for each parameter whose moments are widened and made narrow again, operation by operation."""
CHUNKS = 64
"""Of the state, as in the engine."""


def tokens_per_s(
    model: ModelShape, batch: BatchShape, mode: str, device: Accelerator, accelerators: float = 1.0
) -> float:
    """Predicted tokens per second of the whole job; in offload all state is taken to be on the host."""
    seconds = step_seconds(model, batch, mode, device, accelerators)
    doublings = math.log2(max(accelerators, 1.0))
    return batch.tokens / seconds * float(EFFICIENCY_PER_DOUBLING**doublings)


def step_seconds(
    model: ModelShape,
    batch: BatchShape,
    mode: str,
    device: Accelerator,
    accelerators: float = 1.0,
    share: float = 1.0,
    slots: int = 3,
    *,
    gated: bool = True,
) -> float:
    """Predicted seconds of one step.

    Args:
        share: of the state, which is on the host (in resident mode nothing is).
        slots: for chunks of state on their way, each a sixty-fourth of it.
        gated: whether updates run beside the next forward pass.
    """
    if batch.is_zeroth_order:
        return _zeroth_order_s(model, batch, mode, device, accelerators)
    if mode == PARAMETER_OFFLOAD:
        other_s = step_seconds(
            model, keeping_none(batch), "optimizer-offload", device, accelerators, gated=gated
        )
        return max(_streamed_s(model, batch, device, accelerators, gated=gated), other_s)
    compute_s = _passes_s(model, batch, device, accelerators)
    share = 0.0 if mode == "resident" else share
    update_s = _update_s(model, batch, share, device)
    trained = model.parameters - frozen_parameters(model, batch.freeze)
    if share == 0 or trained == 0 or device.name == "cpu":
        return compute_s + update_s
    link = device.link_gb_per_s * 1e9
    return step_time(
        _groups(batch, share, trained, compute_s),
        slots,
        state_bytes(batch),
        Rates(link, link, trained / update_s),
        gated=gated,
    ).seconds


def _zeroth_order_s(
    model: ModelShape, batch: BatchShape, mode: str, device: Accelerator, accelerators: float
) -> float:
    """Two forward passes, each of which brings weights on the host down once per micro-batch, and then the updates."""
    trained = model.parameters - frozen_parameters(model, batch.freeze)
    compute_s = _compute_s(model, batch, device, accelerators)
    touched = 2 * trained * (state_bytes(batch) + batch.weight_bytes)
    if mode != PARAMETER_OFFLOAD or device.name == "cpu":
        return compute_s + touched / (device.memory_gb_per_s * 1e9)
    micro_batches = batch.sequences // batch.micro_batch
    moved = 2 * micro_batches * model.layers * model.layer_parameters * batch.weight_bytes
    return max(compute_s, moved / (device.link_gb_per_s * 1e9)) + touched / (HOST_GB_PER_S * 1e9)


def hiding_tokens(model: ModelShape, batch: BatchShape, device: Accelerator) -> int:
    """Tokens of a micro-batch from which on a block's forward pass takes as long as the next block's load, so that weights
    on the host cost no time; 0 where nothing runs beside anything else, on a CPU."""
    if device.name == "cpu":
        return 0
    load_s = model.layer_parameters * batch.weight_bytes / (device.link_gb_per_s * 1e9)
    one = replace(batch, sequences=1, sequence_length=1, micro_batch=1, activations=RECOMPUTE)
    forward_s = _compute_s(model, one, device, 1.0) / model.layers / 4
    return math.ceil(load_s / forward_s)


def _compute_s(model: ModelShape, batch: BatchShape, device: Accelerator, accelerators: float) -> float:
    """Of forward and backward."""
    flops = device.tflops * 1e12 * device.utilisation
    if batch.dtype == "float32" and device.name != "cpu":
        flops /= 4 if device.has_bfloat16 else 8
    return _flops_per_token(model, batch) * batch.tokens / (flops * accelerators)


def _passes_s(model: ModelShape, batch: BatchShape, device: Accelerator, accelerators: float) -> float:
    """Of forward and backward, with the inputs of blocks that are on their way beside them."""
    compute_s = _compute_s(model, batch, device, accelerators)
    if batch.activations != SWAP:
        return compute_s
    micro_batches = batch.sequences * batch.sequence_parallel / batch.micro_batch / accelerators
    moved = swapped_activations(model, batch) * micro_batches
    if device.name == "cpu":  # nothing runs beside anything else, and each copy reads and writes
        return compute_s + 4 * moved / (device.memory_gb_per_s * 1e9)
    link_s, forward_s = moved / (device.link_gb_per_s * 1e9), compute_s / 4
    return max(forward_s, link_s) + max(compute_s - forward_s, link_s)


@dataclass(frozen=True, slots=True)
class MicroBatchTimes:
    """Seconds of one micro-batch, without what processes exchange, and of one update of all parameters."""

    block_forward_s: float
    block_backward_s: float
    around_forward_s: float
    """What stands around the blocks: most of it is the output's."""
    around_backward_s: float
    update_s: float


def micro_batch_times(
    model: ModelShape, batch: BatchShape, device: Accelerator, share: float
) -> MicroBatchTimes:
    """Of one accelerator, or of one of those that share each sequence; `share` of the state is on the host."""
    one = replace(batch, sequences=batch.micro_batch)
    whole_s = _passes_s(model, one, device, batch.sequence_parallel)
    around = _flops_per_token(replace(model, layers=0), one) / _flops_per_token(model, one)
    block_s = whole_s * (1 - around) / model.layers
    inside, outside = (1 / 4 if again else 1 / 3 for again in (one.activations in AGAIN, one.loss == TILED))
    return MicroBatchTimes(
        block_s * inside,
        block_s * (1 - inside),
        whole_s * around * outside,
        whole_s * around * (1 - outside),
        _update_s(model, batch, share, device),
    )


def _streamed_s(
    model: ModelShape, batch: BatchShape, device: Accelerator, accelerators: float, *, gated: bool
) -> float:
    """Of a step whose weights are on the host. On a CPU nothing runs beside anything else."""
    trained = model.parameters - frozen_parameters(model, batch.freeze)
    read = 2 * batch.weight_bytes + 2 * batch.gradient_bytes
    touched = trained * (2 * state_bytes(batch) + read + NARROWING[batch.state])
    weights = model.layer_parameters * batch.weight_bytes
    gradients = trained * batch.gradient_bytes // model.layers
    micro_batches = batch.sequences // batch.micro_batch
    compute_s = _compute_s(model, keeping_none(batch), device, accelerators)
    if device.name == "cpu":
        moved = micro_batches * model.layers * (2 * weights + 2 * gradients)
        return compute_s + (touched + 2 * moved) / (device.memory_gb_per_s * 1e9)
    forward_s = compute_s / micro_batches / model.layers / 4
    block = StreamedBlock(forward_s, 3 * forward_s, weights, gradients)
    link, update_s = device.link_gb_per_s * 1e9, touched / (HOST_GB_PER_S * 1e9)
    return streamed_step_time([block] * model.layers, micro_batches, link, link, update_s, gated=gated)


def speed_limit(model: ModelShape, device: Accelerator, accelerators: float = 1.0) -> float:
    """Tokens per second that no training method exceeds: the blocks' forward pass alone, at the data sheet's
    throughput; 0 (not known) for CPUs, whose instruction sets differ too much."""
    if device.name == "cpu":
        return 0.0
    return device.tflops * 1e12 * accelerators / (2 * model.layers * model.active_layer_parameters)


def compute_ratio(model: ModelShape, batch: BatchShape, other: BatchShape) -> float:
    """How many times the computation of `batch` the other one takes for a step."""
    return _flops_per_token(model, other) / _flops_per_token(model, batch)


def model_flops_per_token(model: ModelShape, batch: BatchShape) -> int:
    """Of training on one token, without what is computed a second time and without attention scores: what a throughput in
    model TFLOP/s counts."""
    return _flops_per_token(model, replace(batch, activations=KEEP, loss=WHOLE, mlp=WHOLE))


def _flops_per_token(model: ModelShape, batch: BatchShape) -> int:
    if batch.is_zeroth_order:
        return 4 * model.active_parameters
    again = 2 * model.layers * model.active_layer_parameters if batch.activations in AGAIN else 0
    again += 2 * model.hidden * model.vocabulary if batch.loss == TILED else 0
    again += 2 * model.layers * model.active_mlp_parameters if tiles_mlps(batch) else 0
    return 6 * model.active_parameters - 2 * frozen_parameters(model, batch.freeze) + again


def _groups(batch: BatchShape, share: float, trained: int, compute_s: float) -> list[GroupWork]:
    """The state in chunks in forward order, of which the last ones travel; each has its part of the computation."""
    travelling = max(1, round(CHUNKS * share))
    passes = 4 if batch.activations in AGAIN else 3  # forward is one of them, backward the others
    forward_s = compute_s * batch.micro_batch / batch.sequences / passes / CHUNKS
    backward_s, chunks = compute_s / CHUNKS - forward_s, (trained // CHUNKS,)
    return [GroupWork(forward_s, backward_s, chunks, index >= CHUNKS - travelling) for index in range(CHUNKS)]


def _update_s(model: ModelShape, batch: BatchShape, share: float, device: Accelerator) -> float:
    """Seconds in which all parameters are updated, if their state is there."""
    trained = model.parameters - frozen_parameters(model, batch.freeze)
    state = trained * state_bytes(batch)
    read = 2 * batch.weight_bytes + batch.gradient_bytes
    touched = 2 * state + trained * (read + NARROWING[batch.state])
    touched_s = touched / (device.memory_gb_per_s * 1e9)
    if device.name == "cpu":
        return touched_s * (1 + (COPIES_ON_A_CPU - 1) * share)
    return touched_s
