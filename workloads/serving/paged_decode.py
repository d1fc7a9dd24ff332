"""Decoding attention in place on a GPU by torch's `varlen_attn`, which reads pages through a block table.

A layer's keys of a block are a page: the pool is block-major, so a view of it with the layer's strides is the pool of pages
that the function wants, and nothing is copied. Which kernel computes it (cuDNN's or FlashAttention's), and for which page
sizes, processors and dtypes, is torch's choice; where there is none it raises, and `probe.choose_in_place` sees that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention.varlen import varlen_attn

from busbar.workloads.serving.block_attention import InPlace, Tables
from busbar.workloads.serving.kvcache import KvCache


@dataclass(frozen=True)
class PagedDecode:
    """The decoding rows of a step."""

    tables: Tables
    ends: torch.Tensor
    """[rows + 1] int32: 0, 1, ... rows; each row is a sequence of one query."""

    @property
    def rows(self) -> int:
        return len(self.tables.lengths)

    def attend(self, layer: int, q: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """As `DecodePart.attend`."""
        pages = cache.pool[:, layer].transpose(2, 3)  # [blocks, 2, slots, kv heads, head_dim]
        out = varlen_attn(
            q.contiguous(),
            pages[:, 0],
            pages[:, 1],
            self.ends,
            None,
            1,
            self.tables.longest,
            scale=1.0,
            enable_gqa=q.shape[1] != cache.shape.kv_heads,
            seqused_k=self.tables.lengths,
            block_table=self.tables.blocks,
        )
        assert isinstance(out, torch.Tensor)
        return out


def _part(tables: Tables, cache: KvCache) -> PagedDecode:
    rows = len(tables.lengths)
    return PagedDecode(tables, torch.arange(rows + 1, dtype=torch.int32, device=cache.device))


PAGED = InPlace.of_tables("paged-varlen", _part)
