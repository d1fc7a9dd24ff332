"""MLPs of the blocks, computed for a part of a micro-batch's tokens at a time.

An MLP keeps about three times its inner width of each token, which is more than anything else inside a block. It looks at
one token at a time, so here it is given `mlp_tile_rows` of them; backward computes each tile again, and has the inside of one
tile at a time. What a whole block needs of a token is then what stands around its MLP.

The numbers are those of the whole up to rounding: gradients of weights are added up tile by tile. Tiles depend on the
number of tokens in a micro-batch alone, so that all placements have the same bits with each other.

An MLP is a module that the block calls by one of `NAMES`. Tensors that it is given with a row for each token are cut alike.
A model whose MLPs mix tokens, or that names none, is refused (`check`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from busbar.scheduler.fit.memory import mlp_tile_rows
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.groups import blocks
from busbar.workloads.training.recompute import run_again_in_backward

NAMES = ("mlp", "feed_forward", "ffn")
_FIELD, _REMEDY = "spec.engine.mlp", "leave it out"
_PROBE_TOKENS, _PROBE_ROWS = 8, 3
_CLOSE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
_ATTRIBUTE = "_busbar_mlps"


class TiledMlps:
    """Those of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.rows = mlp_tile_rows  # part of what a run computes: another number changes roundings
        found = [getattr(block, name) for block in blocks(model) for name in NAMES if hasattr(block, name)]
        if not found:
            what = f"blocks of {type(model).__name__} name no MLP ({', '.join(NAMES)})"
            raise InvalidJob(_FIELD, f"tiled is not possible: {what}", _REMEDY)
        for module in found:
            module.forward = self._tiled(module, module.forward)

    def _tiled(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def compute(weights: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            with _with_weights(module, weights):
                return forward(*args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            hidden = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
            rows = self.rows(hidden.shape[:-1].numel())
            if rows >= hidden.shape[:-1].numel():
                return forward(*args, **kwargs)
            tiles = _cut(args, kwargs, hidden.shape[:-1], rows)
            if torch.is_grad_enabled():
                weights = [each.data for each in module.parameters()]
                found = [run_again_in_backward(compute, (weights, *own), named) for own, named in tiles]
            else:
                found = [forward(*own, **named) for own, named in tiles]
            if not all(isinstance(each, torch.Tensor) for each in found):
                what = f"{type(module).__name__} gives more than one tensor"
                raise InvalidJob(_FIELD, f"tiled is not possible: {what}", _REMEDY)
            return torch.cat(found, dim=-2).view(*hidden.shape[:-1], -1)

        return run

    @contextmanager
    def at_most(self, rows: int) -> Iterator[None]:
        """Tiles of so many tokens meanwhile."""
        before, self.rows = self.rows, lambda tokens: rows
        try:
            yield
        finally:
            self.rows = before


@contextmanager
def _with_weights(module: nn.Module, weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Where the weights are that a forward pass had, which are given to it so that autograd keeps them: by the time of
    backward the parameters may refer to other places (see `peer_slots`)."""
    before = [each.data for each in module.parameters()]
    for each, weight in zip(module.parameters(), weights, strict=True):
        each.data = weight
    try:
        yield
    finally:
        for each, weight in zip(module.parameters(), before, strict=True):
            each.data = weight


def _cut(
    args: Sequence[Any], kwargs: Mapping[str, Any], tokens: torch.Size, rows: int
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each tile: of tensors [*tokens, width] the rows of the tile, as [1, rows, width]."""
    leaves, shape = tree_flatten((tuple(args), dict(kwargs)))
    whole = [isinstance(leaf, torch.Tensor) and leaf.shape[:-1] == tokens for leaf in leaves]
    given = [
        leaf.flatten(0, -2)[None].split(rows, 1) if cut else repeat(leaf)
        for leaf, cut in zip(leaves, whole, strict=True)
    ]
    for _, *part in zip(range(0, tokens.numel(), rows), *given):  # noqa: B905 - `repeat` has no end
        yield tree_unflatten(part, shape)


def tile(model: nn.Module) -> nn.Module:
    """Has the MLPs of this model work in tiles. Raises InvalidJob."""
    object.__setattr__(model, _ATTRIBUTE, TiledMlps(model))
    return model


def check(model: nn.Module, vocabulary: int) -> None:
    """Refuses a model with tiles which has other logits of a few tokens in tiles than as a whole. Raises InvalidJob."""
    mlps: TiledMlps | None = model.__dict__.get(_ATTRIBUTE)
    if mlps is None:
        return
    parameter = next(model.parameters())
    tokens = torch.arange(_PROBE_TOKENS, device=parameter.device)[None] % vocabulary
    was_training = model.training
    problem = ""
    try:
        with torch.no_grad():
            whole = model.eval()(input_ids=tokens, use_cache=False).logits.float()
            try:
                with mlps.at_most(_PROBE_ROWS):
                    tiled = model(input_ids=tokens, use_cache=False).logits.float()
                off = float((tiled - whole).abs().max() / whole.abs().max())
            except (RuntimeError, TypeError) as why:
                off, problem = float("inf"), f": {why!s:.200}"
    finally:
        model.train(was_training)
    if not off <= _CLOSE.get(parameter.dtype, 4e-2):
        raise InvalidJob(
            _FIELD,
            f"tiled is not possible: MLPs of {type(model).__name__} give something else for a few tokens at a time than "
            f"for all of them{problem}",
            _REMEDY,
        )
