"""Rotary position tables (RoFormer, arXiv 2104.09864) and their long-context stretches.

`linear` divides positions; `llama3` divides only long wavelengths, with a smooth middle (Llama 3.1
model card); `yarn` blends by wavelength and scales attention (YaRN, arXiv 2309.00071, §3.2–3.4);
`dynamic` equals `default` up to the trained length, and the engine never goes beyond that.
"""

from __future__ import annotations

import math

import torch

from busbar.workloads.serving.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each of the head_dim/2 pairs (float32), and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind in ("default", "dynamic"):
        return plain, 1.0
    factor = float(rope.parameters["factor"])
    if rope.kind == "linear":
        return plain / factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope, factor), 1.0
    attention = rope.parameters.get("attention_factor")
    if attention is None:
        attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return _yarn(plain, rope, factor, head_dim), float(attention)


def _llama3(plain: torch.Tensor, rope: Rope, factor: float) -> torch.Tensor:
    low, high = float(rope.parameters["low_freq_factor"]), float(rope.parameters["high_freq_factor"])
    turns = rope.original_max * plain / (2 * math.pi)  # full turns within the trained length
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretch fully; 1: keep
    return (1 - blend) * plain / factor + blend * plain


def _yarn(plain: torch.Tensor, rope: Rope, factor: float, head_dim: int) -> torch.Tensor:
    def dimension_of(turns: float) -> float:
        """The pair index that makes this many turns within the trained length."""
        return head_dim * math.log(rope.original_max / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = dimension_of(float(rope.parameters.get("beta_fast") or 32))
    last = dimension_of(float(rope.parameters.get("beta_slow") or 1))
    if rope.parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = last - first if last != first else 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / span).clamp(0.0, 1.0)
    return plain / factor * stretch + plain * (1 - stretch)


def rope_tables(rope: Rope, head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, signed sin), each [positions, head_dim] float32.

    With halves (a, b) of a head, rotation is x·cos + swap(x)·sin where swap gives (b, a) and the
    first half of this sin table carries the minus sign: one fused multiply-add per element.
    """
    frequencies, scale = inverse_frequencies(rope, head_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
