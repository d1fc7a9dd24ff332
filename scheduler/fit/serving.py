"""Serving: bytes on the device and the time of a step by engine mode, and which mode a device gets.

With P_l parameters in a layer, L layers, tables of t parameters (the embedding, and the head where it is not tied), w bytes
of a weight (4 in float32, 2 in bfloat16) and v bytes of keys and values per token:

    mode      layers on the device               a step reads
    resident  w L P_l                            everything from device memory
    int8      1 byte a weight: L P_l             the same
    stream    two slots, and as many as fit      also what does not stay, over the link or from the disk

and w t + keys and values + the runtime in all of them. A step of B requests takes the longest of reading device memory,
2 B (L A_l + t) operations, and reading what is streamed: the engine reads ahead. With experts A_l are the parameters of a
layer that one token uses, and of device memory a step reads the experts that its B tokens choose (`read_layer_parameters`);
else both are P_l. Streamed layers are taken to be read with all their experts: the engine holds and reads no
more than that where it reads experts one by one. The host needs room for a layer at least;
what is streamed to a GPU is kept there where it fits, else on the disk, which is slower than said here. The engine's own plan
(`workloads/serving/stream_plan.py`) is exact for the model at hand and measures the link; a test compares both.
"""

from __future__ import annotations

from dataclasses import dataclass

from .accelerators import Accelerator
from .memory import RUNTIME_BYTES, Footprint
from .model import ModelShape

SERVING_MODES = ("resident", "int8", "stream")
"""In the order in which they are preferred."""
SLOTS = 2
USABLE = 0.92
"""Of a GPU's memory; the rest is for its driver and the allocator."""
DISK_GB_PER_S = 1.0
"""What a CPU streams from, until the engine has measured it."""


@dataclass(frozen=True, slots=True)
class ServingShape:
    """What one replica holds and computes."""

    context: int
    """Tokens of a request, at most."""
    weight_bytes: int = 2
    kv_bytes: int | None = None
    """Asked for; None: at least one request of `context` tokens."""
    sequences: int = 64
    """In one step."""


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The engine mode for a device, and why."""

    mode: str
    fits: bool
    reason: str
    step_s: float
    """Predicted, of a full batch."""


def layer_bytes(model: ModelShape, serving: ServingShape, mode: str) -> int:
    return model.layer_parameters * _weight_bytes(serving, mode)


def _weight_bytes(serving: ServingShape, mode: str) -> int:
    return 1 if mode == "int8" else serving.weight_bytes


def _fixed_bytes(model: ModelShape, serving: ServingShape) -> int:
    tables = model.vocabulary * model.hidden * (1 if model.tied else 2)
    kv_token = 2 * model.layers * model.kv_heads * model.head_dim * serving.weight_bytes
    return tables * serving.weight_bytes + (serving.kv_bytes or kv_token * serving.context) + RUNTIME_BYTES


def serving_memory(model: ModelShape, serving: ServingShape, mode: str) -> Footprint:
    """The least that one replica needs.

    Raises:
        ValueError: a mode that no formula describes.
    """
    if mode not in SERVING_MODES:
        raise ValueError(
            f"no memory formula for the serving mode {mode!r}; known are {', '.join(SERVING_MODES)}"
        )
    layer = layer_bytes(model, serving, mode)
    stays = min(SLOTS, model.layers) if mode == "stream" else model.layers
    return Footprint(_fixed_bytes(model, serving) + stays * layer, layer)


def streamed_bytes(model: ModelShape, serving: ServingShape, memory_bytes: int) -> int:
    """What a step reads in the mode stream: the layers that do not stay beside the slots."""
    layer = layer_bytes(model, serving, "stream")
    left = memory_bytes - serving_memory(model, serving, "stream").device_bytes
    stays = max(0, left // layer)
    return max(0, model.layers - stays) * layer if stays + SLOTS < model.layers else 0


def serving_step_s(
    model: ModelShape, serving: ServingShape, mode: str, device: Accelerator, memory_bytes: int
) -> float:
    """Predicted seconds of a decoding step of all sequences."""
    tables = model.vocabulary * model.hidden
    weights = model.layers * model.active_layer_parameters + tables
    layer = model.read_layer_parameters(serving.sequences) * _weight_bytes(serving, mode)
    read = model.layers * layer + tables * serving.weight_bytes
    flops = device.tflops * 1e12 * device.utilisation
    busy = max(read / (device.memory_gb_per_s * 1e9), 2 * weights * serving.sequences / flops)
    if mode != "stream":
        return busy
    link = DISK_GB_PER_S if device.name == "cpu" else device.link_gb_per_s
    return max(busy, streamed_bytes(model, serving, memory_bytes) / (link * 1e9))


def choose_mode(
    model: ModelShape, serving: ServingShape, device: Accelerator, memory_bytes: int
) -> ModeChoice:
    """The first mode that fits, with a sentence that says why not the ones before it."""
    needs = {mode: serving_memory(model, serving, mode).device_bytes for mode in SERVING_MODES}
    mode = next((mode for mode in SERVING_MODES if needs[mode] <= memory_bytes), None)
    where = "the pod" if device.name == "cpu" else f"the {device.name}"
    has = f"{where} has {memory_bytes / 2**30:.1f} GiB"
    if mode is None:
        text = f"It fits in no engine mode: stream needs {needs['stream'] / 2**30:.1f} GiB and {has}."
        return ModeChoice(SERVING_MODES[-1], False, text, float("inf"))
    step_s = serving_step_s(model, serving, mode, device, memory_bytes)
    before = SERVING_MODES[: SERVING_MODES.index(mode)]
    if not before:
        return ModeChoice(mode, True, "", step_s)
    missed = " and ".join(f"{each} needs {needs[each] / 2**30:.1f} GiB" for each in before)
    text = (
        f"Engine mode {mode}, because {missed} and {has}; a step of {serving.sequences} requests takes about "
    )
    return ModeChoice(mode, True, f"{text}{step_s:.2g} s.", step_s)
