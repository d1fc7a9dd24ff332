"""Matrix products with fixed weights: torch's plain one, or oneDNN's with the weights packed once.

On the CPUs tried, the packed form is two to three times as fast for the few rows of a decode step, and
its rows do not depend on how many there are. torch offers it to its own compiler only (an operator
with a leading underscore), so `can_pack` tries it here before anything relies on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

PACKABLE = (torch.float32, torch.bfloat16)

Move = Callable[[torch.Tensor], torch.Tensor]
Make = Callable[[], torch.Tensor]
Keep = Callable[[str, Make], torch.Tensor]
"""A tensor by its name: what `Make` gives, or what it gave to an earlier process (`kept_weights.py`)."""


def keep_nothing(name: str, make: Make) -> torch.Tensor:
    return make()


def keep_below(keep: Keep, where: str) -> Keep:
    """Of names that begin with `where`."""
    return lambda name, make: keep(f"{where}.{name}", make)


class Linear(Protocol):
    """x [rows, in] → [rows, out]."""

    bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def moved(self, move: Move) -> Linear:
        """The same with its tensors moved."""
        ...


class PlainLinear:
    """torch.nn.functional.linear."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.bytes = _size(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def moved(self, move: Move) -> PlainLinear:
        return PlainLinear(move(self._weight), None if self._bias is None else move(self._bias))


class PackedLinear:
    """oneDNN with weights in its own blocked layout (`packed`); the plain weights are not kept."""

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed, self._bias = packed, bias
        self.bytes = _size(packed, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out

    def moved(self, move: Move) -> PackedLinear:
        """It exists on CPUs only, and stays there."""
        return self


def packed(weight: torch.Tensor) -> torch.Tensor:
    """In oneDNN's layout."""
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return found


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, pack: bool) -> Linear:
    return kept_linear(lambda: weight, bias, pack, keep_nothing)


def kept_linear(weight: Make, bias: torch.Tensor | None, pack: bool, keep: Keep) -> Linear:
    """`weight` is made only where it is not kept in the form in which it is multiplied."""
    if pack:
        return PackedLinear(keep("packed", lambda: packed(weight())), bias)
    return PlainLinear(keep("weight", weight), bias)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing works here, and computes what float64 does."""
    if device.type != "cpu" or dtype not in PACKABLE or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((96, 64), generator=generator).to(dtype)
    x, bias = torch.randn((5, 64), generator=generator).to(dtype), torch.ones(96, dtype=dtype)
    exact = x.double() @ weight.double().T + bias.double()
    try:
        got = PackedLinear(packed(weight), bias)(x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    tolerance = 1e-4 if dtype is torch.float32 else 0.5
    return bool((got.double() - exact).abs().max() < tolerance)


def _size(weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    extra = 0 if bias is None else bias.numel() * bias.element_size()
    return weight.numel() * weight.element_size() + extra
