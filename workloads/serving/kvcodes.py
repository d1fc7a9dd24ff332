"""Keys and values in 8 or 4 bits: each token's head on its own, with its own scale.

A head's numbers of one token become codes, and a few float16 numbers say what the codes mean:

    form    a number is                         bytes per token and head of d numbers
    int8    code x scale,  -127 <= code <= 127  d + 2
    int4    code x scale + least, 0 <= code < 16   d / 2 + 4

What is stored of a token depends on that token alone, not on its neighbours, on when a block becomes full or on how a
prompt was divided. So everything that holds for the tokens of a float cache (sharing, recomputing, taking guesses back)
holds here. Encoding and decoding are element by element, in float32, one rounding each: bit for bit the same wherever
the numbers lie in a batch. Below about 0.001 float16's scales are coarse: an error is never under 4e-6 there.

In a byte of int4 the low half is number i, the high half number i + d / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = 65504.0
"""Of float16."""


@dataclass(frozen=True)
class KvForm:
    """How a cache keeps numbers."""

    name: str
    bits: int
    terms: int
    """float16 numbers per token and head: the scale, then what is added."""

    def code_bytes(self, width: int) -> int:
        """Bytes of the codes of `width` numbers."""
        return width * self.bits // 8

    def bytes(self, width: int) -> int:
        """With their float16 numbers."""
        return self.code_bytes(width) + 2 * self.terms


INT8 = KvForm("int8", 8, 1)
INT4 = KvForm("int4", 4, 2)
FORMS = {form.name: form for form in (INT8, INT4)}


def encode(numbers: torch.Tensor, form: KvForm) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, width] numbers → (codes [n, code bytes] of 8 bits, terms [n, form.terms] float16)."""
    x = numbers.float()
    if form is INT8:
        scale = _half(x.abs().amax(-1, keepdim=True) / 127)
        codes = torch.round(x / _divisor(scale)).clamp_(-127, 127)
        return codes.to(torch.int8), scale
    least, most = torch.aminmax(x, dim=-1, keepdim=True)
    least = _half(least)
    scale = _half((most - least.float()) / 15)
    codes = torch.round((x - least.float()) / _divisor(scale)).clamp_(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, -1)
    return low | (high << 4), torch.cat((scale, least), -1)


def numbers_of(codes: torch.Tensor, form: KvForm, dtype: torch.dtype) -> torch.Tensor:
    """[..., code bytes] → [..., width]: the codes as numbers, before scale and addition."""
    if form is INT8:
        return codes.to(dtype)
    half = codes.shape[-1]
    out = torch.empty((*codes.shape[:-1], 2 * half), dtype=dtype, device=codes.device)
    out[..., :half] = codes & 15
    out[..., half:] = codes >> 4
    return out


def decode(codes: torch.Tensor, terms: torch.Tensor, form: KvForm, dtype: torch.dtype) -> torch.Tensor:
    """The numbers again, [..., width]."""
    out = numbers_of(codes, form, torch.float32).mul_(terms[..., :1].float())
    if form.terms == 2:
        out.add_(terms[..., 1:].float())
    return out.to(dtype)


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float16)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """Where all numbers are equal the scale is 0, and so shall the codes be."""
    wide = scale.float()
    return torch.where(wide == 0, torch.inf, wide)
