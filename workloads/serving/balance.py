"""Makes the channels of keys equally large before they are stored in codes.

Some models have channels whose keys are many times larger than the others' (Qwen2's biases make them so). A scale per
token then spends its codes on those, and four bits leave nothing of the rest. So each channel of each key head is divided
by the largest number that a trial run finds in it, and queries are multiplied by the same: their products stay what they
were. The trial's tokens are random with a fixed seed, so every start on a machine finds the same factors.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from busbar.workloads.serving.attention import MIN_ROWS
from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.kvcache import KvCache, KvShape
from busbar.workloads.serving.model import Decoder
from busbar.workloads.serving.runner import Runner
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence

TRIAL_TOKENS = 256
LEAST = 1e-4
"""A channel that stays this far below its head's largest is divided as if it were so large."""


def key_peaks(decoder: Decoder, shape: KvShape, device: torch.device, positions: int) -> torch.Tensor:
    """[layers, kv heads, head_dim] float32: the largest key of each channel in the trial run."""
    length = min(TRIAL_TOKENS, positions)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, decoder.arch.vocab_size, (length,), generator=generator).tolist()
    blocks = -(-length // shape.block_tokens)
    cache = KvCache(replace(shape, form=None), blocks, device)
    scheduler = Scheduler(BlockPool(blocks), StepLimits(shape.block_tokens, length, MIN_ROWS))
    sequence = Sequence(0, tokens, length)
    scheduler.add(sequence)
    Runner(decoder, cache).run(scheduler.plan())
    keys = cache.pool[sequence.blocks, :, 0].float().abs().amax((0, 3))
    return torch.maximum(keys, keys.amax(-1, keepdim=True) * LEAST).clamp_(
        min=torch.finfo(torch.float32).tiny
    )
