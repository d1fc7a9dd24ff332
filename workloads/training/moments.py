"""How AdamW's moments are kept between steps: exactly, or in fewer bytes.

    exact    float32; 8 bytes for both of a parameter's
    bf16     bfloat16; 4 bytes
    int8     codes of eight bits, with a scale for every 256 parameters; 2.03 bytes

In the reduced formats a chunk's moments are widened to float32, updated by the kernel of the exact format, and made narrow
again. In `int8` a scale is the largest size of its 256 numbers, and the code c of a number stands for

    first moment     scale x (c / 127) |c / 127|     c from -127 to 127
    second moment    scale x (c / 255)^4             c from 0 to 255

so that small numbers have small steps: the root of the second moment, which an update is divided by, has the resolution
of the first. A second moment that is not zero does not become zero.

Each number goes to the nearest that the format has, so one that changes by less than half a step stays as it is: a second
moment that decays slowly would never do so, which is why `betas[1]` is bounded for these formats (in `TrainingEngine`).
What is widened and made narrow again without an update keeps every bit. Blocks of 256 begin at multiples of 256 of a
parameter, so the numbers do not depend on where the state is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from busbar.workloads.training.demand import NARROW_RUN
from busbar.workloads.training.settings import BF16, EXACT, INT8

BLOCK = 256  # parameters that share a scale
_MOST_FIRST, _MOST_SECOND = 127, 255


@dataclass(frozen=True)
class StatePart:
    """One of the flat tensors that the state of a run of parameters consists of."""

    kind: str  # also in the names of a checkpoint
    dtype: torch.dtype
    per: int = 1  # parameters per element
    grain: int = 1  # parameters to which it is rounded up

    def elements(self, parameters: int) -> int:
        return -(-parameters // self.grain) * self.grain // self.per


_LOW = StatePart("low", torch.int16)  # half of the master weight, under bfloat16
_MOMENTS = {
    EXACT: (StatePart("m", torch.float32), StatePart("v", torch.float32)),
    BF16: (StatePart("m", torch.bfloat16), StatePart("v", torch.bfloat16)),
    INT8: (
        StatePart("m-code", torch.int8, 1, BLOCK),
        StatePart("v-code", torch.uint8, 1, BLOCK),
        StatePart("m-scale", torch.float32, BLOCK, BLOCK),
        StatePart("v-scale", torch.float32, BLOCK, BLOCK),
    ),
}
_BY_KIND = {part.kind: part for parts in _MOMENTS.values() for part in parts}


def state_parts(state: str, dtype: str) -> tuple[StatePart, ...]:
    """What the state of parameters of this type consists of, in this format."""
    return _MOMENTS[state] + (() if dtype == "float32" else (_LOW,))


def elements_of(kind: str, parameters: int) -> int:
    """Elements of one of these tensors, or of another one that has as many as the parameter."""
    part = _BY_KIND.get(kind)
    return parameters if part is None else part.elements(parameters)


def widen(
    state: str,
    kept: Mapping[str, torch.Tensor],
    first: torch.Tensor,
    second: torch.Tensor,
    room: torch.Tensor,
) -> None:
    """Put both moments of a chunk, as they are kept, into two float32 tensors; `room` is float32 too, for NARROW_RUN of
    them, and of no use in `bf16`."""
    if state == BF16:
        first.copy_(kept["m"])
        second.copy_(kept["v"])
        return
    for run in _runs(first):
        small, large = first[run], second[run]
        small.copy_(kept["m-code"][run]).div_(_MOST_FIRST)
        small.mul_(torch.abs(small, out=room[: small.numel()])).view(-1, BLOCK).mul_(
            _scales(kept["m-scale"], run)[:, None]
        )
        large.copy_(kept["v-code"][run]).div_(_MOST_SECOND).square_().square_()
        large.view(-1, BLOCK).mul_(_scales(kept["v-scale"], run)[:, None])


def narrow(
    state: str,
    first: torch.Tensor,
    second: torch.Tensor,
    kept: Mapping[str, torch.Tensor],
    room: torch.Tensor,
) -> None:
    """Undo `widen` with new values; `first` and `second` are used up."""
    if state == BF16:
        kept["m"].copy_(first)
        kept["v"].copy_(second)
        return
    for run in _runs(first):
        small, large = first[run], second[run]
        size = torch.abs(small, out=room[: small.numel()])
        _shares(size, _scales(kept["m-scale"], run)).sqrt_().mul_(_MOST_FIRST).round_().copysign_(small)
        kept["m-code"][run].copy_(size)
        least = torch.sign(large, out=size)  # 1 of what is not 0
        _shares(large, _scales(kept["v-scale"], run)).sqrt_().sqrt_().mul_(_MOST_SECOND).round_()
        kept["v-code"][run].copy_(torch.maximum(large, least, out=large))


def _runs(whole: torch.Tensor) -> list[slice]:
    """Small enough that what is made beside them takes little memory."""
    return [slice(start, start + NARROW_RUN) for start in range(0, whole.numel(), NARROW_RUN)]


def _scales(kept: torch.Tensor, run: slice) -> torch.Tensor:
    return kept[run.start // BLOCK : -(-run.stop // BLOCK)]


def _shares(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Divide numbers that are not negative by the largest of their block, in place, which becomes its scale."""
    rows = numbers.view(-1, BLOCK)
    torch.amax(rows, 1, out=scales)
    rows.div_(scales.masked_fill(scales == 0, 1.0)[:, None])
    return numbers
