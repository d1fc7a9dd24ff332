"""Products with coded weights (`weightcodes.py`), only the weights being rounded.

`IntegerLinear` multiplies whole numbers, which processors do faster than float32. An input row becomes a scale and two
digits of 8 bits, together 15 bits of its largest number; both digits go through one product of 8-bit numbers with 32-bit
sums, and are put together again. Such sums are exact, so a row's result does not depend on its neighbours, on threads or
on the order of summation. torch offers the product of packed 8-bit weights to its own compiler only (an operator in its
`onednn` namespace), and old processors have saturating ones, so `can_multiply` tries both here with the worst numbers.

`DecodedLinear` makes float weights for each product: on any device, and slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F

from busbar.workloads.serving.linear import Keep, Linear, Make, Move
from busbar.workloads.serving.weightcodes import INT8, CodedWeight, WeightForm, code

MOST_INPUTS = 65_536
"""More 8-bit products might not fit a sum of 32 bits."""
DIGIT = 127
LOWER = 254
"""Lower digits per unit of an upper one: the remainder is at most a half."""
ROW_TILE = 128
"""Rows whose digits are made at once, so that they stay in the processor's cache."""
WEIGHT_TILE = 2**19
"""Weights that are unpacked at once, for the same reason."""


class DecodedLinear:
    """Decodes weights and multiplies in float."""

    def __init__(self, weight: CodedWeight, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.bytes = weight.bytes + _size(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        step = weight.rows if x.is_cuda else max(1, WEIGHT_TILE // weight.width)
        starts = range(0, weight.rows, step)
        parts = [F.linear(x, weight.decoded(first, first + step, x.dtype)) for first in starts]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return out if self._bias is None else out.add_(self._bias)

    def moved(self, move: Move) -> DecodedLinear:
        return DecodedLinear(self._weight.moved(move), None if self._bias is None else move(self._bias))


Product = Callable[[torch.Tensor], torch.Tensor]
"""int8 [rows, in] → float32 [rows, out]."""
Products = Callable[[], Iterable[tuple[slice, Product]]]
"""Of a matrix, some of its outputs after the others."""


@dataclass(frozen=True)
class PackedCodes:
    """int8 weights in oneDNN's own layout; the plain ones are not kept."""

    layout: torch.Tensor
    scale: torch.Tensor
    """float32 [out]."""

    @classmethod
    def of(cls, weight: CodedWeight) -> PackedCodes:
        return cls(packed_codes(weight.codes), weight.scale)

    @property
    def rows(self) -> int:
        return len(self.scale)

    @property
    def bytes(self) -> int:
        return self.layout.numel() + self.scale.numel() * self.scale.element_size()

    def products(self) -> list[tuple[slice, Product]]:
        """One of all outputs."""
        zero = torch.zeros(self.rows, dtype=torch.int32)

        def product(digits: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
                digits, 1.0, 0, self.layout, self.scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
            )
            return out

        return [(slice(0, self.rows), product)]


class IntegerLinear:
    """Whole numbers; on CPUs. `pack`: int8 weights get a layout of their own, so that the codes are not kept. Without it
    nothing is copied: what the tensors hold may change between calls."""

    def __init__(
        self, weight: CodedWeight | PackedCodes, bias: torch.Tensor | None, pack: bool = True
    ) -> None:
        self._bias = bias.float() if pack and bias is not None else bias
        self._rows = weight.rows
        self._products: Products
        if isinstance(weight, CodedWeight) and pack and weight.factors is None:
            weight = PackedCodes.of(weight)
        if isinstance(weight, PackedCodes):
            made = weight.products()
            self._products = lambda: made
        else:
            self._products = partial(unpacked, weight)
        self.bytes = weight.bytes + _size(self._bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((len(x), self._rows))
        parts = [
            (rows, *digits_of(x[rows].float()))
            for rows in (slice(first, first + ROW_TILE) for first in range(0, len(x), ROW_TILE))
        ]
        for columns, product in self._products():
            for rows, digits, scale in parts:
                found = product(digits)
                upper, lower = found[: len(scale)], found[len(scale) :]
                upper.add_(lower.mul_(1 / LOWER)).mul_(scale)
                if self._bias is not None:
                    upper.add_(self._bias[columns])
                out[rows, columns] = upper
        return out

    def moved(self, move: Move) -> IntegerLinear:
        """It exists on CPUs only, and stays there."""
        return self


def packed_codes(codes: torch.Tensor) -> torch.Tensor:
    """int8 [out, in] in oneDNN's layout."""
    found: torch.Tensor = torch.ops.onednn.qlinear_prepack(codes, None)
    return found


def unpacked(weight: CodedWeight) -> Iterator[tuple[slice, Product]]:
    """Weights that become 8-bit numbers anew each time, some rows after the others."""
    step = max(1, WEIGHT_TILE // weight.width)
    for first in range(0, weight.rows, step):
        rows = slice(first, min(first + step, weight.rows))
        yield rows, partial(_times, weight.whole(rows.start, rows.stop), weight.scale[rows])


def _times(weight: torch.Tensor, scale: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(digits, weight.t()) * scale


def digits_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [2 x rows, in], float32 [rows, 1]): x = (upper + lower / LOWER) x scale, all upper digits first."""
    scale = x.abs().amax(1, keepdim=True).div_(DIGIT)
    digits = torch.empty((2 * len(x), x.shape[1]), dtype=torch.int8)
    rest = x / torch.where(scale == 0, torch.inf, scale)
    upper = rest.round()
    digits[: len(x)] = upper
    digits[len(x) :] = rest.sub_(upper).mul_(LOWER).round_()
    return digits, scale


def kept_coded_linear(
    weight: Make,
    bias: torch.Tensor | None,
    form: WeightForm,
    width: int,
    device: torch.device,
    keep: Keep,
) -> Linear:
    """The float `weight`, with so many inputs on that device, is made only where its codes are not kept."""
    coded = cache(lambda: code(weight(), form))
    scale = keep("scale", lambda: coded().scale)
    if form is INT8 and multiplies_whole(width, device):
        return IntegerLinear(PackedCodes(keep("packed", lambda: packed_codes(coded().codes)), scale), bias)
    codes = keep("codes", lambda: coded().codes)
    factors = None if form is INT8 else keep("factors", lambda: _there(coded().factors))
    return coded_linear(CodedWeight(codes, factors, scale), bias)


def coded_linear(weight: CodedWeight, bias: torch.Tensor | None, pack: bool = True) -> Linear:
    """`pack` is for weights that stay as they are."""
    if multiplies_whole(weight.width, weight.codes.device):
        return IntegerLinear(weight, bias, pack)
    return DecodedLinear(weight, bias)


def multiplies_whole(width: int, device: torch.device) -> bool:
    """Whether matrices with so many inputs are multiplied in whole numbers there."""
    return device.type == "cpu" and width <= MOST_INPUTS and can_multiply()


@cache
def can_multiply() -> bool:
    """Whether both products are exact on this processor, also where all numbers are as large as they can be."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-DIGIT, DIGIT + 1, (2, 96, 64), generator=generator, dtype=torch.int8)
    largest = torch.full((2, 96, 64), DIGIT, dtype=torch.int8)
    largest[1, ::2] = -DIGIT
    for inputs, codes in (random, largest):
        weight = CodedWeight(codes, None, torch.ones(96))
        exact = (inputs.long() @ codes.long().T).float()
        try:
            results = [
                product(inputs)
                for form in (PackedCodes.of(weight).products, partial(unpacked, weight))
                for _, product in form()
            ]
        except (RuntimeError, AttributeError, NotImplementedError):
            return False
        if not all(torch.equal(each, exact) for each in results):
            return False
    return True


def _there(factors: torch.Tensor | None) -> torch.Tensor:
    assert factors is not None, "int4 has factors"
    return factors


def _size(bias: torch.Tensor | None) -> int:
    return 0 if bias is None else bias.numel() * bias.element_size()
