"""The step model of a replica on a type, or in an engine mode, that nobody has measured: from one that was.

    roofline here ─┐
                   ├─ their ratio × what was measured there ─► the prediction
    roofline there ┘

`prior` is the roofline of `fit/serving.py` by engine mode: what a step reads of device memory and what is streamed, two
operations per weight and token, and the KV cache that the mode leaves room for. Alone it errs by what software loses; measured on
another type or in another mode it has learned that, as training's table does. Steps that decode and prompt tokens have a
ratio each, because one is bound by memory and the other by arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import ServingModelError
from ..fit.accelerators import Accelerator
from ..fit.model import ModelShape
from ..fit.serving import DISK_GB_PER_S, ServingShape, layer_bytes, serving_memory, streamed_bytes
from .step_model import STEP_OVERHEAD_S, StepModel

BATCH, CONTEXT = 8, 1000
"""The step at which measured and predicted ones are compared: so many sequences, each with so many tokens."""
PROMPT = 512
"""The prompt at which they are."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica runs, and how."""

    device: Accelerator
    memory_bytes: int
    """That it may use."""
    mode: str


def prior(model: ModelShape, serving: ServingShape, place: Place) -> StepModel:
    """The roofline of one replica.

    Raises:
        ServingModelError: it does not fit in this mode.
    """
    device, mode = place.device, place.mode
    name = f"{device.name} ({mode})"
    tables = model.vocabulary * model.hidden
    weights = model.layers * model.layer_parameters + tables
    read = model.layers * layer_bytes(model, serving, mode) + tables * serving.weight_bytes
    kv_token = 2 * model.layers * model.kv_heads * model.head_dim * serving.weight_bytes
    least = serving_memory(model, serving, mode).device_bytes
    free = place.memory_bytes - least
    if free < 0:
        raise ServingModelError(
            f"{name}: it needs {least / 2**30:.1f} GiB of {place.memory_bytes / 2**30:.1f} GiB"
        )
    bandwidth, flops = device.memory_gb_per_s * 1e9, device.tflops * 1e12 * device.utilisation
    step_s = read / bandwidth
    kv_bytes = serving.kv_bytes or kv_token * serving.context + (free if mode != "stream" else 0)
    if mode == "stream":  # what is free keeps layers
        link = DISK_GB_PER_S if device.name == "cpu" else device.link_gb_per_s
        step_s = max(step_s, streamed_bytes(model, serving, place.memory_bytes) / (link * 1e9))
    return StepModel(
        name,
        a_s=STEP_OVERHEAD_S + step_s,
        b_s=2 * weights / flops,
        c_s=kv_token / bandwidth,
        d_s=2 * weights / flops,
        e_s=4 * model.layers * model.heads * model.head_dim / flops,
        kv_tokens=max(1.0, kv_bytes / kv_token),
    )


def predicted(
    model: ModelShape,
    serving: ServingShape,
    place: Place,
    measured: Sequence[tuple[Place, StepModel]],
) -> StepModel:
    """The step model at a place by those measured at others: on the same type if there is one, else the mean of their ratios.

    Raises:
        ServingModelError: nothing was measured, or it does not fit here.
    """
    if not measured:
        raise ServingModelError("nothing was measured anywhere")
    here = prior(model, serving, place)
    near = [pair for pair in measured if pair[0].device.name == place.device.name] or list(measured)
    priors = [(prior(model, serving, _holding(model, serving, at)), found) for at, found in near]
    decode = _mean([_step(found) / _step(guess) for guess, found in priors])
    prompt = _mean([found.prompt_s(PROMPT) / guess.prompt_s(PROMPT) for guess, found in priors])
    return replace(
        here,
        a_s=decode * here.a_s,
        b_s=decode * here.b_s,
        c_s=decode * here.c_s,
        d_s=prompt * here.d_s,
        e_s=prompt * here.e_s,
    )


def _holding(model: ModelShape, serving: ServingShape, at: Place) -> Place:
    """With as much memory as the mode needs at least: it did run there, in a pool with more of it."""
    least = serving_memory(model, serving, at.mode).device_bytes
    return replace(at, memory_bytes=max(at.memory_bytes, least))


def _step(model: StepModel) -> float:
    return model.decode_s(BATCH, BATCH * CONTEXT)


def _mean(ratios: Sequence[float]) -> float:
    """Geometric: twice as fast and half as fast make one."""
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
