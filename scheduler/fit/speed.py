"""Predicted training speed: a roofline of compute, device memory, and the link to the host.

Per step, with T tokens, P parameters and k accelerators:

    compute   6 P T / (k x reached flops)
    update    resident: the optimizer state is read and written in device memory
              optimizer-offload: gradients go down and weights come up the link, the host updates its state;
              transfer and update overlap with each other, and with the compute of other layers
              parameter-offload: weights cross the link twice more, once per pass over a micro-batch
"""

from __future__ import annotations

import math

from .accelerators import Accelerator
from .model import BatchShape, ModelShape

HOST_GB_PER_S = 20.0
"""Memory bandwidth a host gives to one accelerator's update."""
EFFICIENCY_PER_DOUBLING = 0.95
"""What every doubling of accelerators keeps."""


def tokens_per_s(
    model: ModelShape, batch: BatchShape, mode: str, device: Accelerator, accelerators: float = 1.0
) -> float:
    """Predicted tokens per second of the whole job."""
    flops = device.tflops * 1e12 * device.utilisation
    if batch.dtype == "float32" and device.name != "cpu":
        flops /= 4 if device.has_bfloat16 else 8
    compute_s = 6 * model.parameters * batch.tokens / (flops * accelerators)
    seconds = compute_s + _update_s(model, batch, mode, device, compute_s, accelerators)
    doublings = math.log2(max(accelerators, 1.0))
    return batch.tokens / seconds * float(EFFICIENCY_PER_DOUBLING**doublings)


def speed_limit(model: ModelShape, device: Accelerator, accelerators: float = 1.0) -> float:
    """Tokens per second that no training method exceeds: the blocks' forward pass alone, at the data sheet's
    throughput; 0 (not known) for CPUs, whose instruction sets differ too much."""
    if device.name == "cpu":
        return 0.0
    return device.tflops * 1e12 * accelerators / (2 * model.layers * model.layer_parameters)


def _update_s(
    model: ModelShape,
    batch: BatchShape,
    mode: str,
    device: Accelerator,
    compute_s: float,
    accelerators: float,
) -> float:
    parameters, weight = model.parameters, batch.weight_bytes
    state = parameters * (8 if batch.dtype == "float32" else 12)
    if mode == "resident" or device.name == "cpu":
        touched = 2 * state + 3 * parameters * weight
        extra = 1.0 if mode == "resident" else 1.3
        return extra * touched / (device.memory_gb_per_s * 1e9)
    link_s = parameters * weight / (device.link_gb_per_s * 1e9)
    host_s = (2 * state + 2 * parameters * weight) / (HOST_GB_PER_S * 1e9)
    if mode == "parameter-offload":
        passes = max(1, batch.sequences // max(batch.micro_batch, 1))
        link_s += 2 * passes * parameters * weight / (device.link_gb_per_s * 1e9 * accelerators)
    return max(0.0, max(link_s, host_s) - 0.5 * compute_s)
