"""Weight matrices in 8 or 4 bits, made from float ones while a model is loaded.

    form    a weight is                                                        bytes per weight
    int8    code x row scale, -127 <= code <= 127                              1
    int4    (code - 8) x group factor x row scale, 0 <= code < 16,             1 / 2 + 1 / 128
            factor 1 to 15 for every 128 inputs of a row

and 4 bytes per row for its scale in float32. So a weight of either form is a whole number of at most 127 times its row's
scale, and products can be computed with whole numbers (`integer_linear.py`).

In a byte of int4 the low half is input i of a group, the high half input i + half a group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from busbar.workloads.serving.errors import ModelUnsupported
from busbar.workloads.serving.linear import Move

GROUP = 128
LEAST_GROUP = 8
"""Half a group is read as numbers of 32 bits."""
CODED_AT_ONCE = 2**22
"""Weights of a matrix that are in memory in float several times, while their codes are made."""
MOST_FACTOR = 15
"""Times 8, the largest code, it still is a number of 8 bits."""


@dataclass(frozen=True)
class WeightForm:
    """How weights are kept."""

    name: str
    bits: int


INT8 = WeightForm("int8", 8)
INT4 = WeightForm("int4", 4)
FORMS = {form.name: form for form in (INT8, INT4)}


@dataclass(frozen=True)
class CodedWeight:
    """A matrix [out, in] in codes."""

    codes: torch.Tensor
    """int8 [out, in], or uint8 [out, in / 2] with factors."""
    factors: torch.Tensor | None
    """int8 [out, groups, 1]."""
    scale: torch.Tensor
    """float32 [out]."""

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def width(self) -> int:
        """Inputs."""
        return self.codes.shape[1] * (1 if self.factors is None else 2)

    @property
    def bytes(self) -> int:
        parts = (self.codes, self.scale, *(() if self.factors is None else (self.factors,)))
        return sum(each.numel() * each.element_size() for each in parts)

    def part(self, rows: slice) -> CodedWeight:
        """Some outputs, on the same memory."""
        factors = None if self.factors is None else self.factors[rows]
        return CodedWeight(self.codes[rows], factors, self.scale[rows])

    def whole(self, first: int, stop: int) -> torch.Tensor:
        """int8 [stop - first, in]: the weights of these rows as multiples of the row's scale."""
        codes = self.codes[first:stop]
        if self.factors is None:
            return codes
        groups = self.factors.shape[1]
        pairs = codes.view(len(codes), groups, -1).view(torch.int32)
        out = codes.new_empty((len(codes), groups, 2, self.width // groups // 2), dtype=torch.int8)
        halves = out.view(torch.int32)
        torch.bitwise_and(pairs, 0x0F0F0F0F, out=halves[:, :, 0])
        torch.bitwise_and(pairs >> 4, 0x0F0F0F0F, out=halves[:, :, 1])
        return out.view(len(codes), groups, -1).sub_(8).mul_(self.factors[first:stop]).view(len(codes), -1)

    def decoded(self, first: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """[stop - first, in] float."""
        return (self.whole(first, stop).float() * self.scale[first:stop, None]).to(dtype)

    def moved(self, move: Move) -> CodedWeight:
        factors = None if self.factors is None else move(self.factors)
        return replace(self, codes=move(self.codes), factors=factors, scale=move(self.scale))


def code(weight: torch.Tensor, form: WeightForm) -> CodedWeight:
    """The codes of a float matrix [out, in]. Raises ModelUnsupported where int4 does not fit its inputs."""
    parts = [_code(rows, form) for rows in torch.split(weight, max(1, CODED_AT_ONCE // weight.shape[1]))]
    factors = [part.factors for part in parts if part.factors is not None]
    return CodedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat(factors) if factors else None,
        torch.cat([part.scale for part in parts]),
    )


def _code(weight: torch.Tensor, form: WeightForm) -> CodedWeight:
    w = weight.float()
    if form is INT8:
        scale = w.abs().amax(1) / 127
        codes = torch.round(w / _divisor(scale)[:, None]).clamp_(-127, 127).to(torch.int8)
        return CodedWeight(codes, None, scale)
    rows, width = w.shape
    group = group_of(width)
    grouped = w.view(rows, -1, group)
    wanted = grouped.abs().amax(2) / 7.5  # codes from -8 to 7 reach as far on both sides
    scale = wanted.amax(1) / MOST_FACTOR
    factors = torch.ceil(wanted / _divisor(scale)[:, None]).clamp_(1, MOST_FACTOR)
    step = _divisor(factors * scale[:, None])[:, :, None]
    codes = (torch.round(grouped / step) + 8).clamp_(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, 2)
    packed = (low | (high << 4)).reshape(rows, width // 2)
    return CodedWeight(packed, factors.to(torch.int8)[:, :, None], scale)


def group_of(width: int) -> int:
    """Inputs per factor: 128, or the largest power of two that divides the width."""
    group = min(GROUP, width & -width)
    if group < LEAST_GROUP:
        raise ModelUnsupported(
            f"weights in int4 need matrices whose number of inputs is a multiple of {LEAST_GROUP}; this model has one "
            f"with {width}. Serve it with --weights-dtype int8 or auto"
        )
    return group


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """A row or group of zeros has the scale 0, and codes 0."""
    return torch.where(scale == 0, torch.inf, scale)
