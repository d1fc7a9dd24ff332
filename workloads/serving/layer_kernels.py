"""What lies between the matrix products of a layer, as one kernel each: for a GPU, in Triton.

A decoding step's rows are few, so a kernel that only adds or only turns numbers costs its launch, a few microseconds, and
there are thirty of them in a layer. Here are three: adding to the residual stream and its norm; the rotation of queries and
keys, with their norms where a family has them, and the storing of keys and values in the pool; the gated product of an MLP.
Numbers are float32 inside and are rounded once, so results differ from the plain calls by roundings.

Needs Triton, as `decode_kernel.py` does; only `step_probe.choose_graphs` imports it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from busbar.workloads.serving.kvcache import KvCache

COLUMNS = 1024
"""Of a gated product that one program computes."""


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    x, added, weight, total, normed, width, eps, ADDS: tl.constexpr, PADDED: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
    real = number < width
    at = row * width + number
    value = tl.load(x + at, mask=real, other=0.0)
    if ADDS:
        other = tl.load(added + at, mask=real, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(total + at, value, mask=real)
    value = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    factor = tl.load(weight + number, mask=real, other=0.0).to(tl.float32)
    tl.store(normed + at, (value * scale * factor).to(normed.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _turn_and_store(  # type: ignore[no-untyped-def]
    qkv,
    cosines,
    sines,
    query_norm,
    key_norm,
    slots,
    queries,
    keys,
    pool,
    key_origin,
    value_origin,
    scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NORMS: tl.constexpr,
) -> None:
    """One head of one row: of queries, then keys, then values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    number = tl.arange(0, PADDED_DIM)
    real = number < DIM
    from_head = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    value = tl.load(from_head + number, mask=real, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        swapped = tl.where(number < DIM // 2, number + DIM // 2, number - DIM // 2)
        other = tl.load(from_head + swapped, mask=real, other=0.0).to(tl.float32)
        if NORMS:
            inverse = 1.0 / tl.sqrt(tl.sum(value * value, 0) / DIM + eps)
            norm = query_norm if head < HEADS else key_norm
            value *= inverse * tl.load(norm + number, mask=real, other=0.0).to(tl.float32)
            other *= inverse * tl.load(norm + swapped, mask=real, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + row * DIM + number, mask=real, other=0.0).to(tl.float32)
        sine = tl.load(sines + row * DIM + number, mask=real, other=0.0).to(tl.float32)
        value = value * cosine + other * sine
    if head < HEADS:
        target = queries + (row * HEADS + head) * DIM + number
        tl.store(target, (value * scale).to(queries.dtype.element_ty), mask=real)
    else:
        is_key = head < HEADS + KV_HEADS
        own = head - HEADS if is_key else head - HEADS - KV_HEADS
        if is_key:
            tl.store(keys + (row * KV_HEADS + own) * DIM + number, value.to(keys.dtype.element_ty), mask=real)
        origin = key_origin if is_key else value_origin
        place = origin + tl.load(slots + row * KV_HEADS + own) * DIM
        tl.store(pool + place + number, value.to(pool.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(gate_up, out, width, COLUMNS: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = number < width
    gate = tl.load(gate_up + row * 2 * width + number, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + number, mask=real, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + number, value.to(out.dtype.element_ty), mask=real)


class LayerKernels:
    """As `model.LayerCalls`."""

    def add_norm(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `LayerCalls.add_norm`."""
        rows, width = x.shape
        normed = torch.empty_like(x)
        total = x if added is None else torch.empty_like(x)
        _add_norm[(rows,)](
            x,
            x if added is None else added,
            weight,
            total,
            normed,
            width,
            eps,
            ADDS=added is not None,
            PADDED=triton.next_power_of_2(width),
            num_warps=8,
        )
        return total, normed

    def turn_and_store(
        self,
        qkv: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        scale: float,
        eps: float,
        layer: int,
        slot_index: torch.Tensor,
        cache: KvCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `LayerCalls.turn_and_store`."""
        rows, width, kv_heads = len(qkv), cache.shape.head_dim, cache.shape.kv_heads
        heads = qkv.shape[1] // width - 2 * kv_heads
        queries, keys = (qkv.new_empty((rows, count, width)) for count in (heads, kv_heads))
        plane = kv_heads * cache.shape.block_tokens * width
        query_norm, key_norm = (turns[0], turns[0]) if norms is None else norms
        _turn_and_store[(rows, heads + 2 * kv_heads)](
            qkv,
            *turns,
            query_norm,
            key_norm,
            slot_index,
            queries,
            keys,
            cache.pool,
            2 * layer * plane,
            (2 * layer + 1) * plane,
            scale,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=width,
            PADDED_DIM=triton.next_power_of_2(width),
            NORMS=norms is not None,
            num_warps=1,
        )
        return queries, keys

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `LayerCalls.gated`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        _gate[(rows, triton.cdiv(width, COLUMNS))](gate_up, out, width, COLUMNS=COLUMNS)
        return out


LAYER_KERNELS = LayerKernels()
