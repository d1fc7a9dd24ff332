"""In which dtype weights and keys and values are kept.

`auto` is float32 on a CPU, so that greedy answers are the same on every machine. `fastest` is bfloat16 on processors that
multiply it faster, which are many of the newer ones: it is tried at the start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

from busbar.workloads.serving.errors import ModelCorrupt
from busbar.workloads.serving.linear import can_pack, make_linear
from busbar.workloads.serving.probe import Trial

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU = torch.device("cpu")
TRIED = ("float32", "bfloat16")
ROWS, WIDTH = 16, 1024
"""A product of the trial, as of a step that decodes 16 sequences."""
ROUNDS, CALLS = 10, 10
"""How often each dtype has its turn, and products of a turn."""
WORTH = 1.2
"""How many times faster bfloat16 must be, as its sums are less exact."""


def settled(wanted: str, device: torch.device) -> tuple[str, list[Trial]]:
    """The dtype's name with `fastest` decided, and what was tried for it. On a GPU it is the checkpoint's own."""
    if wanted != "fastest":
        return wanted, []
    if device.type != "cpu":
        return "auto", []
    seconds = product_seconds()
    return faster(seconds), [Trial(f"{dtype} products", 0.0, took * 1e6) for dtype, took in seconds.items()]


def faster(seconds: Mapping[str, float]) -> str:
    """The dtype to take by these times of a product."""
    return "bfloat16" if seconds["float32"] >= WORTH * seconds["bfloat16"] else "float32"


def product_seconds() -> dict[str, float]:
    """CPU seconds of one product of `ROWS` rows with `WIDTH` by `WIDTH` weights by dtype, the least of some in turn: other
    work on the machine disturbs them all."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn((size, WIDTH), generator=generator) for size in (WIDTH, ROWS))
    least = dict.fromkeys(TRIED, math.inf)
    products = {
        dtype: make_linear(weight.to(DTYPES[dtype]), None, can_pack(CPU, DTYPES[dtype])) for dtype in TRIED
    }
    with torch.no_grad():
        for _ in range(ROUNDS):
            for dtype, product in products.items():
                x = rows.to(DTYPES[dtype])
                began = time.process_time()
                for _ in range(CALLS):
                    product(x)
                least[dtype] = min(least[dtype], (time.process_time() - began) / CALLS)
    return least


def choose_dtypes(wanted: str, checkpoint: str, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """(weights, KV cache). On a CPU the cache is float32 always: bf16 attention is slow there.

    Args:
        wanted: auto, float32 or bfloat16.
        checkpoint: the dtype of the checkpoint's weights.
    """
    if checkpoint not in DTYPES:
        raise ModelCorrupt(f"config.json: dtype {checkpoint!r} is none of {', '.join(DTYPES)}")
    if device.type == "cpu":
        return DTYPES["float32" if wanted == "auto" else wanted], torch.float32
    weights = DTYPES[checkpoint if wanted == "auto" else wanted]
    return weights, weights
