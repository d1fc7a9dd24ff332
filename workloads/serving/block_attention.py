"""Attention that reads the blocks of the pool in place: used on a CPU when results need not be bit-equal.

Decoding sequences are computed block by block. In the pool the same head of consecutive blocks lies at equal
distances, so a range of blocks is one strided operand of a batched product, and nothing is copied: each
block's scores against the query of the sequence that owns it, then its share of the output. The shares of a
sequence are added up by one product with an owner matrix. Blocks in the range that no sequence of the step owns are
computed too, with weight zero; if they are the majority, or if two sequences share a block, the blocks are gathered
first.

Prompt chunks attend with torch's scaled_dot_product_attention: a chunk that begins its sequence to itself, a
later one to its gathered context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from busbar.workloads.serving.kvcache import KvCache
from busbar.workloads.serving.sequence import Chunk

NOTHING = -1e30
"""Added to the scores of slots that a query may not see; finite, so that no difference is undefined."""
MOST_IN_VAIN = 2.0
"""Blocks in a range per block that is owned, above which they are gathered instead."""


@dataclass(frozen=True)
class DecodePart:
    """Rows 0..rows of a step: one query each."""

    rows: int
    first: int | None
    """First block of the range; None: gather `blocks`."""
    blocks: torch.Tensor
    """[n] ids of the blocks, those in the range or those to gather."""
    owner: torch.Tensor
    """[n] int64 row that owns each block (0 where nobody does)."""
    mask: torch.Tensor
    """[n, 1, slots] float32: 0 where the owner sees the slot."""
    table: torch.Tensor
    """[rows * widest] int64 places of each row's blocks among the n, repeated to the widest row's number."""
    belongs: torch.Tensor
    """[rows, n] float32: 1 where the row owns the block."""


@dataclass(frozen=True)
class PromptPart:
    """Rows start..stop of a step: one chunk of one sequence."""

    start: int
    stop: int
    blocks: torch.Tensor | None
    """Of the context; None: the chunk is its own context."""
    mask: torch.Tensor | None
    """[queries, context] float32, additive."""


@dataclass(frozen=True)
class BlockPlan:
    """What one step attends to; the same for every layer."""

    decode: DecodePart | None
    prompts: tuple[PromptPart, ...]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KvCache
    ) -> torch.Tensor:
        """q [rows, heads, dim] scaled, k and v [rows, kv heads, dim] of this step, stored already.

        Returns [rows, heads * dim] in q's dtype.
        """
        out = torch.zeros_like(q)
        if self.decode is not None:
            part = self.decode
            out[: part.rows] = _decode(part, layer, q[: part.rows].to(cache.shape.dtype), cache)
        for chunk in self.prompts:
            rows = slice(chunk.start, chunk.stop)
            out[rows] = _prompt(chunk, layer, q[rows], k[rows], v[rows], cache)
        return out.view(len(q), -1)


def plan_blocks(decoding: list[Chunk], prompts: list[Chunk], cache: KvCache) -> BlockPlan:
    """For rows in this order: the decoding chunks, then each prompt chunk's."""
    parts, row = [], len(decoding)
    for chunk in prompts:
        parts.append(_prompt_part(chunk, row, cache))
        row += chunk.count
    return BlockPlan(_decode_part(decoding, cache) if decoding else None, tuple(parts))


def _decode_part(chunks: list[Chunk], cache: KvCache) -> DecodePart:
    size = cache.shape.block_tokens
    ids: list[int] = []
    owner: list[int] = []
    visible: list[int] = []
    for row, chunk in enumerate(chunks):
        length = chunk.start + 1
        own = chunk.sequence.blocks[: -(-length // size)]
        ids += own
        owner += [row] * len(own)
        visible += [size] * (len(own) - 1) + [length - size * (len(own) - 1)]
    lowest, highest = min(ids), max(ids) + 1
    ranged = len(set(ids)) == len(ids) and highest - lowest <= MOST_IN_VAIN * len(ids)
    places = [i - lowest for i in ids] if ranged else list(range(len(ids)))
    count = highest - lowest if ranged else len(ids)
    at = torch.tensor(places)
    of = torch.tensor(owner)
    all_owner = torch.zeros(count, dtype=torch.int64).index_copy_(0, at, of)
    seen = torch.zeros(count, dtype=torch.int64).index_copy_(0, at, torch.tensor(visible))
    mask = torch.zeros((count, 1, size)).masked_fill_(torch.arange(size) >= seen[:, None, None], NOTHING)
    belongs = torch.zeros((len(chunks), count))
    belongs[of, at] = 1.0
    rows: list[list[int]] = [[] for _ in chunks]
    for place, row in zip(places, owner, strict=True):
        rows[row].append(place)
    widest = max(map(len, rows))
    table = [place for own in rows for place in own + own[:1] * (widest - len(own))]
    blocks = torch.arange(lowest, highest) if ranged else torch.tensor(ids)
    return DecodePart(
        len(chunks), lowest if ranged else None, blocks, all_owner, mask, torch.tensor(table), belongs
    )


def _decode(part: DecodePart, layer: int, q: torch.Tensor, cache: KvCache) -> torch.Tensor:
    rows, heads, width = q.shape
    count, kv_heads = len(part.blocks), cache.shape.kv_heads
    group = heads // kv_heads
    if part.first is not None:
        both = cache.pool[part.first : part.first + count, layer]
    else:
        both = cache.pool[:, layer].index_select(0, part.blocks)
    queries = q.view(rows, kv_heads, group, width).index_select(0, part.owner)
    scores = torch.empty((kv_heads, count, group, cache.shape.block_tokens), dtype=q.dtype)
    for head in range(kv_heads):
        torch.baddbmm(part.mask, queries[:, head], both[:, 0, head].transpose(1, 2), out=scores[head])
    peaks = scores.amax(-1)
    of_row = peaks.index_select(1, part.table).view(kv_heads, rows, -1, group).amax(2)
    scores.sub_(of_row.index_select(1, part.owner).unsqueeze(-1)).exp_()
    sums = torch.matmul(part.belongs, scores.sum(-1))  # [kv heads, rows, group]
    mixed = torch.empty((kv_heads, count, group, width), dtype=q.dtype)
    for head in range(kv_heads):
        torch.bmm(scores[head], both[:, 1, head], out=mixed[head])
    out = torch.matmul(part.belongs, mixed.view(kv_heads, count, -1)).view(kv_heads, rows, group, width)
    return (out / sums.unsqueeze(-1)).transpose(0, 1).reshape(rows, heads, width)


def _prompt_part(chunk: Chunk, row: int, cache: KvCache) -> PromptPart:
    stop, size = row + chunk.count, cache.shape.block_tokens
    if chunk.start == 0:
        return PromptPart(row, stop, None, None)
    end = chunk.start + chunk.count
    blocks = chunk.sequence.blocks[: -(-end // size)]
    positions = torch.arange(chunk.start, end)[:, None]
    hidden = torch.arange(len(blocks) * size) > positions
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    return PromptPart(row, stop, torch.tensor(blocks), mask)


def _prompt(
    part: PromptPart, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KvCache
) -> torch.Tensor:
    dtype = cache.shape.dtype
    if part.blocks is None:
        keys, values = (t.transpose(0, 1)[None].to(dtype) for t in (k, v))
    else:
        both = cache.pool[:, layer].index_select(0, part.blocks)  # [blocks, 2, kv heads, slots, dim]
        shape = (1, cache.shape.kv_heads, -1, cache.shape.head_dim)
        keys, values = (both[:, i].transpose(0, 1).reshape(shape) for i in (0, 1))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None].to(dtype),
        keys,
        values,
        attn_mask=part.mask,
        is_causal=part.mask is None,
        scale=1.0,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1).to(q.dtype)
