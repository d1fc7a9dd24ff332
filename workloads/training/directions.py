"""Random directions that are never stored: one sign for each trained element, told anew whenever it is asked for.

A sign is one bit of a hash of (seed, step, group, element), in integer arithmetic alone. So it is the same on every
device, in every placement and however the elements are cut, as long as they are cut at multiples of 32. Signs have mean
zero and the identity as covariance, which is what an estimate by simultaneous perturbation needs (SPSA; Spall 1992).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

WORD = 32  # signs of one hash
_LOW = 0xFFFFFFFF
_FIRST, _SECOND, _THIRD = (
    0x9E3779B1,
    0x85EBCA6B,
    0xC2B2AE35,
)  # odd; the multipliers of MurmurHash3's last step


@dataclass(frozen=True)
class Direction:
    """Of one step."""

    seed: int
    step: int

    def signs(self, group: int, start: int, length: int, device: torch.device) -> torch.Tensor:
        """1.0 or -1.0, float32 [length], of the elements from `start` on, a multiple of 32, of a group."""
        first, second = _keys(self.seed, self.step, group)
        words = torch.arange(start // WORD, -(-(start + length) // WORD), device=device)  # int64
        for key in (first, second):
            words.bitwise_xor_(key).mul_(_FIRST).bitwise_and_(_LOW)
            words.bitwise_xor_(words >> 16).mul_(_SECOND).bitwise_and_(_LOW)
            words.bitwise_xor_(words >> 13).mul_(_THIRD).bitwise_and_(_LOW)
            words.bitwise_xor_(words >> 16)
        shifts = torch.arange(WORD, device=device, dtype=torch.int32)
        bits = words.to(torch.int32).unsqueeze(1).bitwise_right_shift(shifts).bitwise_and_(1)
        return bits.view(-1)[:length].float().mul_(-2.0).add_(1.0)


def _keys(seed: int, step: int, group: int) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed} {step} {group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
