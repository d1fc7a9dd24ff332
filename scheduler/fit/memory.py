"""Bytes on the device and on the host, by engine mode.

With P parameters of w bytes (4 in float32, 2 in bfloat16) and AdamW:

    weights      w P
    gradients    w P          kept until the global norm is known
    optimizer    s P          s = 8 (two float32 moments), 12 in bfloat16 (and the float32 master weight)
    activations  of one micro-batch: per token and block about 16 hidden + 2 or 3 intermediate elements
                 (attention scores are recomputed, never kept); once, the logits in float32 and their gradient

    mode                device                                              host
    resident            all                                                 one snapshot for the checkpoint
    optimizer-offload   all but the optimizer, and three chunks of staging  optimizer and the snapshot
    parameter-offload   two blocks of weights and gradients, activations    everything else
"""

from __future__ import annotations

from dataclasses import dataclass

from .model import BatchShape, ModelShape

MODES = ("resident", "optimizer-offload", "parameter-offload")
STAGING_BYTES = 3 * 32 * 2**20 * 12
RUNTIME_BYTES = 600 * 2**20
"""Driver context, libraries and allocator slack on a GPU."""


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


def activations(model: ModelShape, batch: BatchShape) -> int:
    """Bytes that forward and backward of one micro-batch keep alive."""
    tokens = batch.micro_batch * batch.sequence_length
    per_token = 16 * model.hidden + (3 if model.gated else 2) * model.intermediate
    blocks = model.layers * tokens * per_token * batch.weight_bytes
    return blocks + 2 * 4 * tokens * model.vocabulary


def memory(model: ModelShape, batch: BatchShape, mode: str) -> Footprint:
    """What training needs on one accelerator and on its host.

    Raises:
        ValueError: a mode that no formula describes.
    """
    parameters, weight = model.parameters, batch.weight_bytes
    state = parameters * (8 if batch.dtype == "float32" else 12)
    weights = 2 * parameters * weight
    live = activations(model, batch) + RUNTIME_BYTES
    snapshot = parameters * weight + state
    if mode == "resident":
        return Footprint(weights + state + live, snapshot)
    if mode == "optimizer-offload":
        staging = min(STAGING_BYTES, state)
        return Footprint(weights + staging + live, state + snapshot)
    if mode == "parameter-offload":
        blocks = 4 * model.layer_parameters * weight + 2 * model.vocabulary * model.hidden * weight
        return Footprint(min(blocks, weights) + live, weights + state + snapshot)
    raise ValueError(f"no memory formula for the mode {mode!r}; known are {', '.join(MODES)}")
