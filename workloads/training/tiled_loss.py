"""The loss of a causal model, and the logits that it is of, as a whole or in tiles of tokens.

As a whole, the logits of a micro-batch, their float32 copy and its gradient exist at once: three times four bytes for each
token and entry of the vocabulary, which with 128,000 entries is more than all blocks keep of a token. In tiles the head is
applied to `TILE` tokens at a time; nothing of a tile is kept, and backward computes it again. So one tile exists at a time.

The numbers are those of the whole up to rounding: losses are added tile by tile, and so are the gradients of the head. The
tiles do not depend on where anything lies, so that all placements have the same bits with each other.

A model is tiled by having its head (`get_output_embeddings`) pass hidden states through while the tiled loss runs it; a
model that does more behind its head, such as capping logits, is refused (`check`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from busbar.scheduler.fit.memory import TILE_TOKENS
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.packing import IGNORED
from busbar.workloads.training.recompute import run_again_in_backward
from busbar.workloads.training.sequence_parallel import active_part

TILE = TILE_TOKENS
"""Part of what a run computes: another number changes roundings."""
_FIELD, _REMEDY = "spec.engine.loss", "leave it out"
_PROBE_TOKENS = 8
_CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
_ATTRIBUTE = "_busbar_tiles"


class Tiles:
    """Of one model."""

    def __init__(self, model: nn.Module, head: Any) -> None:
        self._model, self._compute = model, head.forward
        self._passes = False
        head.forward = self._head

    def _head(self, hidden: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return hidden if self._passes else self._compute(hidden, *rest, **named)

    def hidden(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[tokens, width]: what the head is given."""
        self._passes = True
        try:
            found: torch.Tensor = self._model(**given, use_cache=False).logits
        finally:
            self._passes = False
        return found.flatten(0, 1)

    def _losses(self, hidden: torch.Tensor, wanted: torch.Tensor, reduction: str) -> torch.Tensor:
        logits = self._compute(hidden).float()
        return F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction=reduction)

    def total(self, given: Mapping[str, torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
        """The sum of the losses of the tokens [rows, length] that are `wanted`, each predicted by the one before it."""
        total = torch.zeros((), device=wanted.device)
        for part, own in zip(
            torch.split(self.hidden(given), TILE), torch.split(wanted.flatten(), TILE), strict=True
        ):
            total = total + run_again_in_backward(self._losses, (part, own, "sum"), {})
        return total

    def each(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows, length - 1] float32: the loss of each token but the first of its row."""
        wanted = F.pad(tokens[:, 1:], (0, 1), value=IGNORED).flatten()
        parts = zip(
            torch.split(self.hidden({"input_ids": tokens}), TILE), torch.split(wanted, TILE), strict=True
        )
        found = torch.cat([self._losses(part, own, "none") for part, own in parts])
        return found.view(tokens.shape)[:, :-1]


def tile(model: nn.Module) -> nn.Module:
    """Has `loss_of` and `token_losses` of this model work in tiles. Raises InvalidJob."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    if head is None:
        raise InvalidJob(_FIELD, f"tiled is not possible: {type(model).__name__} names no head", _REMEDY)
    object.__setattr__(model, _ATTRIBUTE, Tiles(model, head))
    return model


def _tiles(model: nn.Module) -> Tiles | None:
    found: Tiles | None = model.__dict__.get(_ATTRIBUTE)
    return found


def loss_of(
    model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """The mean loss of a micro-batch [rows, length]; of a rank's part of the tokens, its share of that. With `positions`
    of the same shape attention is within documents (see `documents`)."""
    tiles, part = _tiles(model), active_part(model)
    given = {"input_ids": tokens} if positions is None else {"input_ids": tokens, "position_ids": positions}
    if tiles is None and part is None:
        loss: torch.Tensor = model(**given, labels=labels, use_cache=False).loss
        return loss
    wanted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    count = (wanted != IGNORED).sum()
    if part is not None:
        given, wanted = part.inputs(tokens, positions), part.own(wanted)
    if tiles is not None:
        return tiles.total(given, wanted) / count
    logits = model(**given, use_cache=False).logits.float().flatten(0, 1)
    return F.cross_entropy(logits, wanted.flatten(), ignore_index=IGNORED, reduction="sum") / count


def run_forward(model: nn.Module, tokens: torch.Tensor) -> None:
    """A forward pass whose result nobody wants; its logits, in tiles, are not made."""
    tiles, part = _tiles(model), active_part(model)
    given = {"input_ids": tokens} if part is None else part.inputs(tokens)
    if tiles is None:
        model(**given, use_cache=False)
    else:
        tiles.hidden(given)


def token_losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Loss of each token but the first, as float64, of a batch [rows, length]."""
    tiles = _tiles(model)
    if tiles is not None:
        return tiles.each(tokens).double()
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    wanted = tokens[:, 1:]
    # Flat: the form with a class dimension in the middle has no repeatable kernel on a GPU.
    flat = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return flat.view(wanted.shape).double()


def check(model: nn.Module, vocabulary: int) -> None:
    """Refuses a tiled model whose own loss of a few tokens is another one. Raises InvalidJob."""
    tiles = _tiles(model)
    if tiles is None:
        return
    parameter = next(model.parameters())
    tokens = torch.arange(_PROBE_TOKENS, device=parameter.device)[None] % vocabulary
    was_training = model.training
    try:
        with torch.no_grad():
            whole = float(model.eval()(input_ids=tokens, labels=tokens, use_cache=False).loss)
            try:
                tiled = float(loss_of(model, tokens, tokens))
            except RuntimeError:  # the head is not given what it takes
                tiled = float("nan")
    finally:
        model.train(was_training)
    if not abs(tiled - whole) <= _CLOSE.get(parameter.dtype, 2e-2) * abs(whole):
        raise InvalidJob(
            _FIELD,
            f"tiled is not possible: {type(model).__name__} has a loss of {whole:.6g} for a few tokens, and its head "
            f"alone gives {tiled:.6g}",
            _REMEDY,
        )
