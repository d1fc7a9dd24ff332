"""Activations inside a block that are computed again in backward instead of being kept.

Of each transformer block only the inputs are kept, on the device or on the host (`input_swap`). When backward reaches the block, its forward runs once more, with
the state that the random generators had the first time, and keeps what backward needs until the block is done. So one
block's activations exist at a time. The same operations run on the same numbers: no bit of a loss or gradient changes.

The blocks are those of `groups`. torch's own checkpointing does the work (`use_reentrant=False`), around each block's
`forward` and whatever its signature; architectures need no support for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from busbar.workloads.training.groups import blocks
from busbar.workloads.training.input_swap import InputSwap

Forward = Callable[..., Any]
Moving = Callable[
    [Sequence[torch.Tensor]], AbstractContextManager[None]
]  # of a block's inputs (see `InputSwap`)


def recompute_blocks(model: nn.Module, swap: InputSwap | None = None) -> None:
    """Make every block of `model` recompute its activations in training; evaluation stays as it is."""
    for number, block in enumerate(blocks(model)):
        moving = None if swap is None else partial(swap.moving, number)
        setattr(block, "forward", _recomputed(block, block.forward, moving))  # noqa: B010


def _recomputed(block: nn.Module, forward: Forward, moving: Moving | None) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return run_again_in_backward(forward, args, kwargs, moving)

    return run


def run_again_in_backward(
    forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any], moving: Moving | None = None
) -> Any:
    """The result of `forward`, which keeps the tensors that it was given alone and is called once more in backward; `moving`
    may keep some of them elsewhere."""
    leaves, shape = tree_flatten((tuple(args), dict(kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[place] for place in places]
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    del leaves  # or the function below would keep the tensors

    def compute(*given: torch.Tensor) -> Any:
        filled = list(others)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        own_args, own_kwargs = tree_unflatten(filled, shape)
        return forward(*own_args, **own_kwargs)

    # torch saves the generators of the devices of positional tensors only: so all tensors are given as such.
    with nullcontext() if moving is None else moving(tensors):
        return checkpoint(compute, *tensors, use_reentrant=False)


def buffer_versions(model: nn.Module) -> list[int]:
    """How often each buffer of the blocks was changed so far: a block that changes one would do so twice."""
    return [buffer._version for block in blocks(model) for buffer in block.buffers()]
