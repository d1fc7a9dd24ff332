"""Decoding attention in place on a GPU: a Triton kernel that reads the pool's blocks through a block table.

Each decoding row has one query per head. The queries that share a key-value head are the rows of one product, so its keys
and values are read once for all of them. A context is split into equal shares, so that a few long sequences still keep
every multiprocessor busy (split-KV): a program computes one share of one row and head with a running maximum, and
`merge_splits` adds the shares up by the logarithms of their sums. Nothing is gathered, and what is read is a sequence's own
length, rounded up to a tile.

A cache of codes (`kvcodes.py`) is read as codes, which are exact in any dtype that is multiplied here: a slot's scale goes to
its score and to its weight, and what int4 adds to all numbers of a slot is one more sum.

This module needs Triton, a C compiler and a GPU; only `probe.choose_in_place` imports it. With `TRITON_INTERPRET=1` the same
code runs on a CPU, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from busbar.workloads.serving.block_attention import InPlace, Tables
from busbar.workloads.serving.kvcache import KvCache

TILE = 64
"""Tokens of a context that a program multiplies at once."""
STAGES = 2
"""Tiles in shared memory at once: one is loaded while another is multiplied. Two of 256 numbers fit an A100's."""
LEAST_QUERIES = 16
"""Rows of a product on tensor cores; queries of a head group are padded to it."""
PROGRAMS_PER_PROCESSOR = 4
"""Programs per multiprocessor that a step's contexts are split into, if they are long enough."""


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(pool, slot, number, stored, like, DIM: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What slots hold, or their codes as numbers of the dtype of `like`."""
    if BITS == 4:
        half = DIM // 2
        at = (slot * half)[:, None] + (number % half)[None, :]
        both = tl.load(pool + at, mask=stored, other=0)
        shift = tl.where(number < half, 0, 4).to(tl.uint8)
        found = ((both >> shift[None, :]) & 15).to(like.dtype)
    else:
        found = tl.load(pool + (slot * DIM)[:, None] + number[None, :], mask=stored, other=0)
        if BITS == 8:
            found = found.to(like.dtype)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _term(terms, slot, which, seen, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[1, slots]: the scale (0) of each slot's codes, or what is added to them (1, of int4 only)."""
    count: tl.constexpr = 8 // BITS  # int8 has one, int4 two
    return tl.load(terms + count * slot + which, mask=seen, other=0.0).to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _attend_shares(  # type: ignore[no-untyped-def]
    queries,
    pool,
    terms,
    tables,
    lengths,
    mixed,
    log_sums,
    share,
    splits,
    columns,
    block_stride,
    key_plane,
    value_plane,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """One share of one row's context, for the queries of one key-value head: their mixture of values, and the logarithm
    of their sum of weights (-inf where the share lies behind the context)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    query = tl.arange(0, PADDED_GROUP)
    number = tl.arange(0, PADDED_DIM)
    real = (query < GROUP)[:, None] & (number < DIM)[None, :]
    at = (row * HEADS + head * GROUP + query) * DIM
    asked = tl.load(queries + at[:, None] + number[None, :], mask=real, other=0.0)
    peak = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    sums = tl.zeros((PADDED_GROUP, PADDED_DIM), tl.float32)
    first = split * share
    last = tl.minimum(first + share, tl.load(lengths + row))
    for start in range(first, last, TILE):
        token = start + tl.arange(0, TILE)
        seen = token < last
        block = tl.load(tables + row * columns + token // SLOTS, mask=seen, other=0)
        slot = block.to(tl.int64) * block_stride + head * SLOTS + token % SLOTS
        stored = seen[:, None] & (number < DIM)[None, :]
        at_key, at_value = key_plane + slot, value_plane + slot
        keys = _numbers(pool, at_key, number, stored, asked, DIM, BITS)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee")
        if BITS > 0:
            scores *= _term(terms, at_key, 0, seen, BITS)
        if BITS == 4:
            scores += tl.sum(asked.to(tl.float32), 1)[:, None] * _term(terms, at_key, 1, seen, BITS)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(peak - higher)
        values = _numbers(pool, at_value, number, stored, asked, DIM, BITS)
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None]
        if BITS == 4:
            sums += tl.sum(weights * _term(terms, at_value, 1, seen, BITS), 1)[:, None]
        if BITS > 0:
            weights *= _term(terms, at_value, 0, seen, BITS)
        sums += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        peak = higher
    shown = tl.where(total > 0, total, 1.0)
    out = (row * splits + split) * HEADS + head * GROUP + query
    tl.store(mixed + out[:, None] * DIM + number[None, :], sums / shown[:, None], mask=real)
    tl.store(log_sums + out, tl.where(total > 0, peak + tl.log(shown), float("-inf")), mask=query < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    mixed,
    log_sums,
    out,
    splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
) -> None:
    """The shares of one row and head, weighted by their sums."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.arange(0, PADDED_SPLITS)
    number = tl.arange(0, PADDED_DIM)
    at = (row * splits + split) * HEADS + head
    logs = tl.load(log_sums + at, mask=split < splits, other=float("-inf"))
    weights = tl.exp(logs - tl.max(logs, 0))
    real = (split < splits)[:, None] & (number < DIM)[None, :]
    parts = tl.load(mixed + at[:, None] * DIM + number[None, :], mask=real, other=0.0)
    whole = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + (row * HEADS + head) * DIM + number, whole.to(out.dtype.element_ty), mask=number < DIM)


def merge_splits(mixed: torch.Tensor, log_sums: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Adds up shares of contexts: [rows, splits, heads, dim] float32 mixtures of values and [rows, splits, heads] float32
    logarithms of their sums of weights, -inf for a share of nothing, at least one of a row's finite. Fills and returns
    `out` [rows, heads, dim]."""
    rows, splits, heads, width = mixed.shape
    _merge[(rows, heads)](
        mixed,
        log_sums,
        out,
        splits,
        HEADS=heads,
        DIM=width,
        PADDED_DIM=triton.next_power_of_2(width),
        PADDED_SPLITS=triton.next_power_of_2(splits),
    )
    return out


def shares_of(rows: int, kv_heads: int, longest: int, programs: int) -> tuple[int, int]:
    """(tokens of a share, shares of the longest context): whole tiles, in as many shares as `programs` programs over all
    rows and heads ask for."""
    tiles = -(-longest // TILE)
    wanted = min(tiles, max(1, programs // (rows * kv_heads)))
    share = -(-tiles // wanted) * TILE
    return share, -(-longest // share)


@dataclass(frozen=True)
class KernelDecode:
    """The decoding rows of a step."""

    tables: Tables
    share: int
    """Tokens of a context that one program reads."""
    splits: int

    @property
    def rows(self) -> int:
        return len(self.tables.lengths)

    def attend(self, layer: int, q: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """As `DecodePart.attend`."""
        rows, heads, width = q.shape
        shape = cache.shape
        kv_heads, slots = shape.kv_heads, shape.block_tokens
        mixed = torch.empty((rows, self.splits, heads, width), dtype=torch.float32, device=q.device)
        log_sums = torch.empty((rows, self.splits, heads), dtype=torch.float32, device=q.device)
        _attend_shares[(rows, kv_heads, self.splits)](
            q.contiguous(),
            cache.pool,
            cache.pool if cache.terms is None else cache.terms,
            self.tables.blocks,
            self.tables.lengths,
            mixed,
            log_sums,
            self.share,
            self.splits,
            self.tables.blocks.shape[1],
            shape.runs_per_block * slots,
            2 * layer * kv_heads * slots,
            (2 * layer + 1) * kv_heads * slots,
            HEADS=heads,
            GROUP=heads // kv_heads,
            PADDED_GROUP=max(LEAST_QUERIES, triton.next_power_of_2(heads // kv_heads)),
            DIM=width,
            PADDED_DIM=max(LEAST_QUERIES, triton.next_power_of_2(width)),
            SLOTS=slots,
            TILE=TILE,
            BITS=0 if shape.form is None else shape.form.bits,
            num_stages=STAGES,
        )
        return merge_splits(mixed, log_sums, torch.empty_like(q, memory_format=torch.contiguous_format))


def _part(tables: Tables, cache: KvCache) -> KernelDecode:
    rows, kv_heads = len(tables.lengths), cache.shape.kv_heads
    return KernelDecode(tables, *shares_of(rows, kv_heads, tables.longest, _programs(cache.device)))


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 2 * PROGRAMS_PER_PROCESSOR
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


KERNEL = InPlace.of_tables("split-kv-kernel", _part, reads_codes=True)
