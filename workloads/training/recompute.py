"""Activations inside a block that are computed again in backward instead of being kept.

Of each transformer block only the inputs are kept. When backward reaches the block, its forward runs once more, with
the state that the random generators had the first time, and keeps what backward needs until the block is done. So one
block's activations exist at a time. The same operations run on the same numbers: no bit of a loss or gradient changes.

The blocks are those of `groups`. torch's own checkpointing does the work (`use_reentrant=False`), around each block's
`forward` and whatever its signature; architectures need no support for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from busbar.workloads.training.groups import blocks

Forward = Callable[..., Any]


def recompute_blocks(model: nn.Module) -> None:
    """Make every block of `model` recompute its activations in training; evaluation stays as it is."""
    for block in blocks(model):
        setattr(block, "forward", _recomputed(block, block.forward))  # noqa: B010


def _recomputed(block: nn.Module, forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return run_again_in_backward(lambda: forward(*args, **kwargs), (args, kwargs))

    return run


def run_again_in_backward(compute: Callable[[], Any], given: object) -> Any:
    """The result of `compute`, which keeps the tensors in `given` alone and is called once more in backward."""
    # torch saves the generators of the devices of positional tensors only: so all tensors are given as such.
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    return checkpoint(lambda *_: compute(), *tensors, use_reentrant=False)


def buffer_versions(model: nn.Module) -> list[int]:
    """How often each buffer of the blocks was changed so far: a block that changes one would do so twice."""
    return [buffer._version for block in blocks(model) for buffer in block.buffers()]
