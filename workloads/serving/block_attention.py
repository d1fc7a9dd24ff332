"""Attention that reads the blocks of the pool in place: used when results need not be bit-equal.

How decoding sequences are computed is one of several ways (`InPlace`): on a CPU by the products of this module, on a GPU
by torch's paged attention (`paged_decode.py`) or by a kernel (`decode_kernel.py`), as `probe.py` finds.

The products go block by block. In the pool the same head of consecutive blocks lies at equal
distances, so a range of blocks is one strided operand of a batched product, and nothing is copied: each
block's scores against the query of the sequence that owns it, then its share of the output. The shares of a
sequence are added up by one product with an owner matrix. Blocks in the range that no sequence of the step owns are
computed too, with weight zero; if they are the majority, the blocks are gathered first.

A block that several sequences share (`prefix.py`) is read once, for the queries of all of them. Blocks are grouped by
the number of their owners, rounded up to a power of two: in a group all blocks have equally many places for queries,
and places without an owner count as nothing.

Prompt chunks attend with torch's scaled_dot_product_attention: a chunk that begins its sequence to itself, a
later one to its gathered context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
import torch.nn.functional as F

from busbar.workloads.serving.blocks import SCRATCH_BLOCK
from busbar.workloads.serving.kvcache import KvCache, StoredBlocks
from busbar.workloads.serving.sequence import Chunk

NOTHING = -1e30
"""Added to the scores of slots that a query may not see; finite, so that no difference is undefined."""
MOST_IN_VAIN = 2.0
"""Blocks in a range per block that is owned, above which they are gathered instead."""


@dataclass(frozen=True)
class BlockGroup:
    """Blocks with up to `owners` owners each. Pair p is the query in place p % owners of block p // owners."""

    owners: int
    first: int | None
    """First block of the range; None: gather `blocks`."""
    blocks: torch.Tensor
    """[n] ids of the blocks, those in the range or those to gather."""
    owner: torch.Tensor
    """[n * owners] int64 row of each pair (0 where there is none)."""
    mask: torch.Tensor
    """[n * owners, 1, slots] float32: 0 where the owner sees the slot."""
    belongs: torch.Tensor
    """[rows, n * owners] float32: 1 where the pair is the row's."""


class DecodePart(Protocol):
    """Rows 0..rows of a step: one query each."""

    @property
    def rows(self) -> int: ...

    def attend(self, layer: int, q: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """[rows, heads, head_dim], of scaled queries [rows, heads, head_dim] in the cache's dtype."""


@dataclass(frozen=True)
class Tables:
    """Which blocks the contexts of decoding rows lie in."""

    blocks: torch.Tensor
    """[rows, columns] int32 ids, of anything behind a context's end."""
    lengths: torch.Tensor
    """[rows] int32 tokens that each row sees."""
    longest: int
    """No length is larger."""

    @classmethod
    def of(cls, chunks: list[Chunk], cache: KvCache) -> Tables:
        lengths = [chunk.start + 1 for chunk in chunks]
        columns = -(-max(lengths) // cache.shape.block_tokens)
        tables = [chunk.sequence.blocks[:columns] for chunk in chunks]
        padded = [own + [SCRATCH_BLOCK] * (columns - len(own)) for own in tables]

        def numbers(values: list[int] | list[list[int]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=cache.device)

        return cls(numbers(padded), numbers(lengths), max(lengths))


@dataclass(frozen=True)
class InPlace:
    """A way to compute decoding sequences without gathering their contexts."""

    name: str
    plan: Callable[[list[Chunk], KvCache], DecodePart]
    part: Callable[[Tables, KvCache], DecodePart] | None = None
    """The plan's result, where block tables are all that it depends on."""
    reads_codes: bool = False
    """Whether it reads a cache with a form."""

    @classmethod
    def of_tables(
        cls, name: str, part: Callable[[Tables, KvCache], DecodePart], reads_codes: bool = False
    ) -> InPlace:
        return cls(name, lambda chunks, cache: part(Tables.of(chunks, cache), cache), part, reads_codes)


@dataclass(frozen=True)
class ProductsDecode:
    """Decoding rows as batched products over blocks."""

    rows: int
    groups: tuple[BlockGroup, ...]
    table: torch.Tensor
    """[rows * widest] int64 places of each row's pairs among those of all groups, repeated to the widest row's
    number."""

    def attend(self, layer: int, q: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """As `DecodePart.attend`."""
        return _decode(self, layer, q, cache)


@dataclass(frozen=True)
class PromptPart:
    """Rows start..stop of a step: one chunk of one sequence."""

    start: int
    stop: int
    blocks: torch.Tensor | None
    """Of the context; None: the chunk is its own context."""
    mask: torch.Tensor | None
    """[queries, context] in the cache's dtype, additive."""


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
        if self.decode is not None and not self.prompts:
            attended = self.decode.attend(layer, q.to(cache.shape.dtype), cache)
            return attended.to(q.dtype).reshape(len(q), -1)
        out = torch.zeros_like(q)
        if self.decode is not None:
            part = self.decode
            out[: part.rows] = part.attend(layer, q[: part.rows].to(cache.shape.dtype), cache)
        for chunk in self.prompts:
            rows = slice(chunk.start, chunk.stop)
            out[rows] = _prompt(chunk, layer, q[rows], k[rows], v[rows], cache)
        return out.view(len(q), -1)


def plan_blocks(way: InPlace, decoding: list[Chunk], prompts: list[Chunk], cache: KvCache) -> BlockPlan:
    """For rows in this order: the decoding chunks, then each prompt chunk's."""
    parts, row = [], len(decoding)
    for chunk in prompts:
        parts.append(_prompt_part(chunk, row, cache))
        row += chunk.count
    return BlockPlan(way.plan(decoding, cache) if decoding else None, tuple(parts))


def _plan_products(chunks: list[Chunk], cache: KvCache) -> ProductsDecode:
    size = cache.shape.block_tokens
    ids: list[int] = []
    visible: list[int] = []
    widths: list[int] = []
    for chunk in chunks:
        length = chunk.start + 1
        own = chunk.sequence.blocks[: -(-length // size)]
        ids += own
        widths.append(len(own))
        visible += [size] * (len(own) - 1) + [length - size * (len(own) - 1)]
    block, seen = torch.tensor(ids), torch.tensor(visible)
    row = torch.arange(len(chunks)).repeat_interleave(torch.tensor(widths))
    _, inverse, owners = torch.unique(block, return_inverse=True, return_counts=True)
    order = inverse.argsort(stable=True)
    slot = torch.empty_like(block)  # of each pair among those of its block
    slot[order] = torch.arange(len(ids)) - (owners.cumsum(0) - owners)[inverse[order]]
    kind = torch.ceil(torch.log2(owners.double())).long()[inverse]
    place = torch.empty_like(block)  # of each pair among those of all groups
    groups: list[BlockGroup] = []
    before = 0
    for exponent in torch.unique(kind).tolist():
        mine = (kind == exponent).nonzero()[:, 0]
        group, inside = _group(block[mine], row[mine], seen[mine], slot[mine], len(chunks), size)
        place[mine] = before + inside
        before += len(group.owner)
        groups.append(group)
    widest = max(widths)
    places = iter(place.tolist())
    rows = [list(islice(places, count)) for count in widths]
    table = [at for own in rows for at in own + own[:1] * (widest - len(own))]
    return ProductsDecode(len(chunks), tuple(groups), torch.tensor(table))


def _group(
    block: torch.Tensor, row: torch.Tensor, seen: torch.Tensor, slot: torch.Tensor, rows: int, size: int
) -> tuple[BlockGroup, torch.Tensor]:
    """The group of these pairs (block, row that owns it, slots that the row sees, place among the block's owners), and
    the place of each pair in the group."""
    distinct, inverse = torch.unique(block, return_inverse=True)
    first, last = int(distinct[0]), int(distinct[-1])
    ranged = last + 1 - first <= MOST_IN_VAIN * len(distinct)
    blocks = torch.arange(first, last + 1) if ranged else distinct
    owners = int(slot.max()) + 1
    at = (block - first if ranged else inverse) * owners + slot
    pairs = len(blocks) * owners
    owner = torch.zeros(pairs, dtype=torch.int64).index_copy_(0, at, row)
    ends = torch.zeros(pairs, dtype=torch.int64).index_copy_(0, at, seen)
    mask = torch.zeros((pairs, 1, size)).masked_fill_(torch.arange(size) >= ends[:, None, None], NOTHING)
    belongs = torch.zeros((rows, pairs))
    belongs[row, at] = 1.0
    return BlockGroup(owners, first if ranged else None, blocks, owner, mask, belongs), at


def _decode(part: ProductsDecode, layer: int, q: torch.Tensor, cache: KvCache) -> torch.Tensor:
    rows, heads, width = q.shape
    kv_heads = cache.shape.kv_heads
    by_head = q.view(rows, kv_heads, heads // kv_heads, width)
    operands = [cache.blocks_of(layer, group.first, group.blocks) for group in part.groups]
    scores = [_scores(g, both, by_head) for g, both in zip(part.groups, operands, strict=True)]
    peaks = torch.cat([each.amax(-1) for each in scores], 1)
    of_row = peaks.index_select(1, part.table).view(kv_heads, rows, -1, peaks.shape[2]).amax(2)
    sums = torch.zeros_like(of_row)
    out = torch.zeros((kv_heads, rows, peaks.shape[2] * width), dtype=q.dtype)
    for group, both, each in zip(part.groups, operands, scores, strict=True):
        each.sub_(of_row.index_select(1, group.owner).unsqueeze(-1)).exp_()
        sums += torch.matmul(group.belongs, each.sum(-1))  # [kv heads, rows, queries]
        out += torch.matmul(group.belongs, _mixed(group, both, each))
    shares = out.view(kv_heads, rows, -1, width) / sums.unsqueeze(-1)
    return shares.transpose(0, 1).reshape(rows, heads, width)


def _scores(group: BlockGroup, stored: StoredBlocks, by_head: torch.Tensor) -> torch.Tensor:
    """[kv heads, pairs, queries, slots] of queries [rows, kv heads, queries, dim]."""
    _, kv_heads, count, width = by_head.shape
    blocks, slots = len(group.blocks), stored.shape.block_tokens
    queries = by_head.index_select(0, group.owner)
    scores = torch.empty((kv_heads, len(group.owner), count, slots), dtype=by_head.dtype)
    plain = stored.terms is None
    for head in range(kv_heads):
        keys = stored.part(0, head).transpose(1, 2)
        if plain and group.owners == 1:
            torch.baddbmm(group.mask, queries[:, head], keys, out=scores[head])
            continue
        asked = queries[:, head].reshape(blocks, -1, width)
        found = torch.bmm(asked, keys, out=scores[head].view(blocks, -1, slots))
        if (scale := stored.scale(0, head)) is not None:
            found.mul_(scale)
        if (added := stored.added(0, head)) is not None:
            found.addcmul_(asked.sum(-1, keepdim=True), added)
    return scores if plain and group.owners == 1 else scores.add_(group.mask)


def _mixed(group: BlockGroup, stored: StoredBlocks, weights: torch.Tensor) -> torch.Tensor:
    """[kv heads, pairs, queries * dim]: the values of each pair's block, weighted."""
    kv_heads, pairs, count, slots = weights.shape
    blocks, width = len(group.blocks), stored.shape.head_dim
    mixed = torch.empty((kv_heads, blocks, group.owners * count, width), dtype=weights.dtype)
    for head in range(kv_heads):
        of_blocks = weights[head].view(blocks, -1, slots)
        scale, added = stored.scale(1, head), stored.added(1, head)
        torch.bmm(of_blocks if scale is None else of_blocks * scale, stored.part(1, head), out=mixed[head])
        if added is not None:
            mixed[head].add_(torch.bmm(of_blocks, added.transpose(1, 2)))
    return mixed.view(kv_heads, pairs, count * width)


def _prompt_part(chunk: Chunk, row: int, cache: KvCache) -> PromptPart:
    stop, size = row + chunk.count, cache.shape.block_tokens
    if chunk.start == 0:
        return PromptPart(row, stop, None, None)
    end = chunk.start + chunk.count
    blocks = chunk.sequence.blocks[: -(-end // size)]
    device = cache.device
    positions = torch.arange(chunk.start, end, device=device)[:, None]
    hidden = torch.arange(len(blocks) * size, device=device) > positions
    mask = torch.zeros(hidden.shape, dtype=cache.shape.dtype, device=device)
    return PromptPart(
        row, stop, torch.tensor(blocks, device=device), mask.masked_fill_(hidden, float("-inf"))
    )


def _prompt(
    part: PromptPart, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KvCache
) -> torch.Tensor:
    dtype = cache.shape.dtype
    if part.blocks is None:
        keys, values = (cache.as_stored(t).transpose(0, 1)[None] for t in (k, v))
    else:
        both = cache.contents(layer, part.blocks)  # [blocks, 2, kv heads, slots, dim]
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


PRODUCTS = InPlace("blocks-in-place", _plan_products, reads_codes=True)
