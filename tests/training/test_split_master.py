"""The split master weight: a bfloat16 high half and a 16-bit low half are one fp32 number, exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.training.plain_loop import rounded

from busbar.workloads.training.optimizer import join, split

NUMBERS: dict[str, torch.Tensor] = {
    "all exponents": torch.from_numpy(
        np.random.default_rng(1).integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    ),
    "ties": torch.from_numpy(
        ((np.random.default_rng(2).integers(0, 2**16, 200_000, dtype=np.uint32) << 16) + 0x8000).view(
            np.float32
        )
    ),
    "weights": torch.randn(200_000, generator=torch.Generator().manual_seed(3)) * 0.02,
    "edges": torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.17549435e-38, 3.3e38, -3.3e38, math.pi]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_every_finite_number_survives_and_is_rounded_half_away_from_zero(name: str) -> None:
    numbers = NUMBERS[name]
    numbers = numbers[numbers.abs() < 3.38e38].clone()  # finite, and no rounding to infinity
    high, low = torch.empty(len(numbers), dtype=torch.bfloat16), torch.empty(len(numbers), dtype=torch.int16)
    split(numbers.clone(), high, low, torch.empty_like(numbers))
    again = torch.empty_like(numbers)
    join(high, low, again)
    assert torch.equal(again.view(torch.int32), numbers.view(torch.int32))
    assert torch.equal(high.view(torch.int16), rounded(numbers).view(torch.int16))


def test_a_bfloat16_weight_starts_with_an_empty_low_half() -> None:
    high = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    master = torch.empty(1000)
    join(high, torch.zeros(1000, dtype=torch.int16), master)
    assert torch.equal(master, high.float())
