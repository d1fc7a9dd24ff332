"""Progressive layer dropping: blocks that a step leaves out, more of them the later the step and the deeper the block.

Source: Zhang and He, 2020, arXiv:2010.13369; here a whole block is kept and scaled, or left out, at once. Block i of L, counted
from 1, is kept in step t with the probability

    1 - (i / L) * (1 - theta(t)),    theta(t) = (1 - keep) * exp(-rate * t) + keep

and what a kept block adds to its input counts by the inverse of that. A block that is left out hands its input on: nothing of it
is computed, and it has no gradient, no update and no traffic in that step. Evaluation has all blocks as they are.

Which blocks these are is a function of the seed and the step alone, so all micro-batches, ranks and placements, and runs that
are continued, leave out the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from busbar.workloads.training.block_slots import shares_blocks
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.groups import blocks
from busbar.workloads.training.settings import LayerDrop

_FIELD, _REMEDY = "spec.engine.layerDrop", "leave it out"


class DroppedBlocks:
    """Of one model, of which it takes over the blocks' `forward`. It begins with the first step."""

    def __init__(self, model: nn.Module, settings: LayerDrop, seed: int) -> None:
        """Raises InvalidJob, also in the first pass through a block that is not of the form that is needed."""
        self._settings, self._seed = settings, seed
        inner = blocks(model)
        self._count, self._model = len(inner), type(model).__name__
        if not inner:
            raise self._refusal("has no list of blocks")
        if shares_blocks(model):
            raise self._refusal("has blocks that share weights")
        self.begin(0)
        for number, block in enumerate(inner):
            setattr(block, "forward", self._or_left_out(number, block, block.forward))  # noqa: B010

    def begin(self, step: int) -> None:
        """The step with this number, from 0, is computed from now on."""
        self.left_out = self.of(step)
        self._scales = [
            1 / self._settings.probability(step, number, self._count) for number in range(self._count)
        ]

    def of(self, step: int) -> frozenset[int]:
        """The blocks, counted from 0, that this step leaves out."""
        return self._settings.left_out(self._seed, step, self._count)

    @property
    def groups(self) -> frozenset[str]:
        """The names of their groups."""
        return frozenset(f"block-{number}" for number in self.left_out)

    def _or_left_out(self, number: int, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not block.training:
                return forward(*args, **kwargs)
            given = args[0] if args else None
            if number in self.left_out:
                return given
            found = forward(*args, **kwargs)
            if not isinstance(given, torch.Tensor) or not isinstance(found, torch.Tensor):
                raise self._refusal(
                    "has blocks that do not make one tensor of the one that they are given first"
                )
            if found.shape != given.shape:
                raise self._refusal("has blocks that change the shape of what they are given")
            return torch.lerp(given, found, self._scales[number])  # given + scale * (found - given)

        return run

    def _refusal(self, why: str) -> InvalidJob:
        return InvalidJob(_FIELD, f"is not possible with this {self._model}: it {why}", _REMEDY)
