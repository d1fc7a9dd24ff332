"""Paged attention behind one call, and the back ends that a probe may choose from.

A step's tokens come as spans of equal query length: all decodes of similar context in one span (one
query each), each prompt chunk in its own. A back end computes one span from the gathered contexts.

`TiledProduct` is plain batched products with two rules that make a row's result independent of what
else is in the batch (on a CPU in float32; checked at start by `probe.py`, never assumed):
  - never fewer than `MIN_ROWS` query rows per product: BLAS libraries switch kernels below four;
  - weights times values is summed in fixed tiles of `TILE` positions: with one long product the
    library's own split, and so the rounding, would depend on the padded length.
`Fused` is torch's scaled_dot_product_attention: faster on a GPU, without that promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

MIN_ROWS = 4
TILE = 128
CONTEXT_QUANTUM = 64
"""Contexts are padded to a multiple of this (or of the block, if larger)."""


@dataclass(frozen=True)
class Span:
    """Rows start..stop of a step: `batch` sequences with `queries` tokens each, sequence by sequence."""

    start: int
    stop: int
    batch: int
    queries: int
    run_index: torch.Tensor
    """Which runs of the pool hold the contexts (KvCache.run_index)."""
    mask: torch.Tensor
    """[batch, 1, queries, context] float32: 0 where a query may look, -inf elsewhere."""


class AttentionBackend(Protocol):
    """One span: q [batch, queries, heads, head_dim], k and v [batch x kv head, context, head_dim].

    Returns [batch, queries, heads, head_dim] in q's dtype; q is already scaled.
    """

    name: str

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: Span, kv_heads: int
    ) -> torch.Tensor: ...


class TiledProduct:
    """Batched products in a fixed order of summation."""

    name = "tiled-product"

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: Span, kv_heads: int
    ) -> torch.Tensor:
        batch, queries, heads, width = q.shape
        group, context = heads // kv_heads, k.shape[1]
        rows = group * queries
        grouped = q.view(batch, queries, kv_heads, group, width).permute(0, 2, 3, 1, 4)
        padded = max(rows, MIN_ROWS)
        if rows < MIN_ROWS:
            packed = q.new_zeros((batch * kv_heads, MIN_ROWS, width))
            packed[:, :rows] = grouped.reshape(-1, rows, width)
        else:
            packed = grouped.reshape(-1, rows, width)
        scores = torch.bmm(packed.to(k.dtype), k.transpose(1, 2))
        if queries == 1:
            scores.view(batch, kv_heads * padded, context).add_(span.mask[:, 0])
        else:
            live = scores if rows == padded else scores[:, :rows]
            live = live.view(batch, kv_heads * group, queries, context)
            live.add_(span.mask)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
        mixed = torch.bmm(weights[..., :TILE], v[:, :TILE])
        for first in range(TILE, context, TILE):
            mixed.baddbmm_(weights[..., first : first + TILE], v[:, first : first + TILE])
        mixed = mixed[:, :rows].view(batch, kv_heads, group, queries, width)
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, width).to(q.dtype)


class Fused:
    """torch's scaled_dot_product_attention over the gathered contexts."""

    name = "fused-sdpa"

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: Span, kv_heads: int
    ) -> torch.Tensor:
        batch, width = q.shape[0], q.shape[3]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2).to(k.dtype),
            k.view(batch, kv_heads, -1, width),
            v.view(batch, kv_heads, -1, width),
            attn_mask=span.mask.to(k.dtype),
            scale=1.0,
            enable_gqa=q.shape[2] != kv_heads,
        )
        return out.transpose(1, 2).to(q.dtype)


BACKENDS: tuple[AttentionBackend, ...] = (TiledProduct(), Fused())


def backend(name: str) -> AttentionBackend:
    """The back end with this name."""
    return next(b for b in BACKENDS if b.name == name)


def padded_columns(blocks: int, block_tokens: int) -> int:
    """Block-table columns for a context of `blocks` blocks, rounded up to the context quantum."""
    quantum = max(1, CONTEXT_QUANTUM // block_tokens)
    return -(-blocks // quantum) * quantum
