"""What an idle engine gives up while it sleeps, and how it comes back.

    level   KV cache      weights                                          adapters
    1       dropped       kept: on a CPU where they are, of a GPU in       dropped on a GPU
                          pinned host memory; layers that are streamed
                          are not in memory then
    2       dropped       dropped, and read from the model folder again    dropped

The KV cache is that of the device and of the host. A draft model sleeps as the served one does. The process, its tokenizer, grammars and start-up checks stay. Adapters are read again when they are asked for. All of
this runs in the engine's thread, between two steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from enum import IntEnum

import torch

from busbar.workloads.serving.loader import Loaded


class SleepLevel(IntEnum):
    """vLLM's numbers."""

    AWAKE = 0
    WEIGHTS_KEPT = 1
    WEIGHTS_DROPPED = 2


def fall_asleep(loaded: Loaded, level: SleepLevel) -> None:
    """Gives memory back. Nothing may run or wait; a sleeping engine may go to the deeper level."""
    core, on_gpu = loaded.core, loaded.device.type == "cuda"
    core.scheduler.forget()
    if core.draft is not None:
        core.draft.empty()
    for runner, _ in loaded.models:
        runner.release()
        decoder = runner.decoder
        decoder.weights.layers.rest()
        if level is SleepLevel.WEIGHTS_DROPPED:
            decoder.weights = decoder.weights.dropped()
        elif on_gpu:
            decoder.weights = decoder.weights.moved(_pinned)
    if level is SleepLevel.WEIGHTS_DROPPED or on_gpu:
        loaded.adapters.empty()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc keeps what was freed inside its heap
        ctypes.CDLL(None).malloc_trim(0)
    if on_gpu:
        torch.cuda.empty_cache()


def wake(loaded: Loaded) -> None:
    """The reverse. Raises ModelError where the model folder has changed, and what torch raises where the memory is
    gone."""
    for runner, read in loaded.models:
        decoder = runner.decoder
        if not len(decoder.weights.layers):
            decoder.weights = read()
        elif decoder.weights.embedding.device != loaded.device:
            decoder.weights = decoder.weights.moved(lambda tensor: tensor.to(loaded.device))
        runner.allocate()


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory from which the device reads without a detour."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
