"""The decoder's forward pass over a ragged batch of tokens from many sequences.

One row per token. Everything but attention treats rows alike, in one product per matrix; attention
goes span by span through the paged cache. The last rows are padding (see `runner`): they keep the
number of rows at or above what makes the library's products independent of the batch, and they take
the scalar tail of vectorised element-wise loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from busbar.workloads.serving.adapter_pages import AdapterRows, Group
from busbar.workloads.serving.architecture import Architecture
from busbar.workloads.serving.attention import MIN_ROWS, AttentionBackend, Span
from busbar.workloads.serving.block_attention import BlockPlan, InPlace
from busbar.workloads.serving.experts import ExpertMlp, gated
from busbar.workloads.serving.kvcache import KvCache
from busbar.workloads.serving.linear import Linear
from busbar.workloads.serving.rope import rope_tables
from busbar.workloads.serving.weights import Layer, Weights


@dataclass(frozen=True)
class Batch:
    """What one step computes."""

    tokens: torch.Tensor
    """[rows] int64, padding rows last."""
    positions: torch.Tensor
    """[rows] int64."""
    slot_index: torch.Tensor
    """Where each row's keys and values go (KvCache.slot_index)."""
    spans: tuple[Span, ...]
    """For an attention back end that takes gathered contexts; empty with a `plan`."""
    sample_rows: torch.Tensor
    """[n] int64: rows whose logits are wanted; at least MIN_ROWS, repeated if need be."""
    kept_rows: torch.Tensor | None = None
    """[m] int64: rows whose hidden states are wanted."""
    plan: BlockPlan | None = None
    """For attention that reads blocks in place."""
    adapters: AdapterRows | None = None
    """None: no row has one."""


class LayerCalls(Protocol):
    """What lies between the products of a layer, each as one call."""

    def add_norm(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + added, and that over the root of its mean square and times the weight), each [rows, hidden]."""
        ...

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
        """(queries [rows, heads, dim], rotated and scaled, keys [rows, kv heads, dim], rotated) of a fused product; keys and
        values are stored. `turns`: cosines and sines [rows, dim] of the rows; `norms`: weights of queries and keys, where
        the family has such norms."""
        ...

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, inner]: SiLU of the first half of each row times the second."""
        ...


class TorchCalls:
    """`LayerCalls` by torch's operators, in a fixed order where the decoder has one."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.balance: tuple[torch.Tensor, torch.Tensor] | None = None
        """See `Decoder.balance`: factors [layers, heads, head_dim] of queries, with their scale, and of keys."""

    def add_norm(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `LayerCalls.add_norm`."""
        x = x if added is None else x + added
        return x, self._norm(x, weight, eps)

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
        kv_heads, width = cache.shape.kv_heads, cache.shape.head_dim
        by_head = qkv.view(len(qkv), -1, width)
        turned, values = by_head[:, :-kv_heads], by_head[:, -kv_heads:]
        if norms is not None:
            queries, keys = turned[:, :-kv_heads], turned[:, -kv_heads:]
            turned = torch.cat((self._norm(queries, norms[0], eps), self._norm(keys, norms[1], eps)), 1)
        half = width // 2
        swapped = torch.cat((turned[..., half:], turned[..., :half]), -1)
        turned = torch.addcmul(turned * turns[0][:, None], swapped, turns[1][:, None])
        queries, keys = turned[:, :-kv_heads], turned[:, -kv_heads:]
        if self.balance is None:
            queries = queries * scale
        else:
            queries, keys = queries * self.balance[0][layer], keys * self.balance[1][layer]
        cache.store(layer, slot_index, keys, values)
        return queries, keys

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As `LayerCalls.gated`."""
        return gated(gate_up)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if self._decoder.fixed_order or x.is_cuda:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        # torch's own takes seven passes on a CPU; this takes three.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        normed: torch.Tensor = x * scale.to(x.dtype)
        return normed.mul_(weight)


class Decoder:
    """Weights, rotary tables and an attention back end; no state of its own."""

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        attention: AttentionBackend,
        positions: int,
        in_place: InPlace | None = None,
    ) -> None:
        """Gathered contexts go to `attention`; with `in_place` blocks are read where they are, and a row's result may
        depend, in its last bits, on what else is in the step."""
        self.in_place = in_place
        self.arch = arch
        self.weights = weights
        self.attention = attention
        device, self.dtype = weights.embedding.device, weights.embedding.dtype
        cos, sin = rope_tables(arch.rope, arch.head_dim, positions)
        self._cos = cos.to(device=device, dtype=self.dtype)
        self._sin = sin.to(device=device, dtype=self.dtype)
        self._scale = arch.head_dim**-0.5
        self._torch = TorchCalls(self)
        self.calls: LayerCalls = self._torch

    @property
    def fixed_order(self) -> bool:
        """Whether what else is in a step has no part in the order in which a row's numbers are added up."""
        return self.in_place is None

    @property
    def attention_name(self) -> str:
        """Of the way in which decoding sequences attend."""
        return (self.in_place or self.attention).name

    def balance(self, keys: torch.Tensor) -> None:
        """From now on keys are stored divided by `keys` [layers, kv heads, head_dim], and queries multiplied by it."""
        queries = keys.repeat_interleave(self.arch.heads // self.arch.kv_heads, 1) * self._scale
        self._torch.balance = queries.to(self.dtype), (1 / keys).to(self.dtype)

    @property
    def stored_key_scale(self) -> torch.Tensor | None:
        """By what keys are multiplied when they are stored; None: nothing."""
        return None if self._torch.balance is None else self._torch.balance[1]

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KvCache) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [n, vocabulary] float32 of the sample rows, hidden states [m, hidden] of the kept rows); the cache
        gains every row's k and v."""
        states, count = self.states(batch, cache), len(batch.sample_rows)
        return self.weights.head(states[:count]).float(), states[count:]

    @torch.inference_mode()
    def states(self, batch: Batch, cache: KvCache) -> torch.Tensor:
        """[n + m, hidden] of the sample rows and of the kept rows; the cache gains every row's k and v."""
        x = F.embedding(batch.tokens, self.weights.embedding)
        turns = self._cos[batch.positions], self._sin[batch.positions]
        added: torch.Tensor | None = None
        last, eps = len(self.weights.layers) - 1, self.arch.norm_eps
        wanted = batch.sample_rows
        if batch.kept_rows is not None:
            wanted = torch.cat((wanted, batch.kept_rows))
        for index, layer in enumerate(self.weights.layers):
            x, normed = self.calls.add_norm(x, added, layer.input_norm, eps)
            added = self._attend(index, layer, normed, turns, batch, cache)
            groups = () if batch.adapters is None else batch.adapters.groups
            if index == last:  # the rest is needed only where a token is sampled, or a state wanted
                x, added = x[wanted], added[wanted]
                groups = () if batch.adapters is None else batch.adapters.wanted
            x, normed = self.calls.add_norm(x, added, layer.mlp_norm, eps)
            added = self._mlp(index, layer, normed, groups)
        return self.calls.add_norm(x, added, self.weights.norm, eps)[1]

    def _attend(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        cache: KvCache,
    ) -> torch.Tensor:
        arch, rows = self.arch, x.shape[0]
        q_width, kv_width = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        groups = () if batch.adapters is None else batch.adapters.groups
        qkv = _product("qkv", layer.qkv, index, x, groups)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        queries, keys = self.calls.turn_and_store(
            qkv, turns, norms, self._scale, arch.norm_eps, index, batch.slot_index, cache
        )
        if batch.plan is not None:
            values = qkv[:, q_width + kv_width :].view(rows, arch.kv_heads, arch.head_dim)
            attended = batch.plan.attend(index, queries, keys, values, cache)
            return _product("out", layer.out, index, attended, groups)
        mixed = torch.zeros((rows, q_width), dtype=x.dtype, device=x.device)
        for span in batch.spans:
            k, v = cache.gather(index, span.run_index, span.batch)
            q = queries[span.start : span.stop].view(span.batch, span.queries, arch.heads, arch.head_dim)
            out = self.attention(q, k, v, span, arch.kv_heads)
            mixed[span.start : span.stop] = out.reshape(-1, q_width)
        return _product("out", layer.out, index, mixed, groups)

    def _mlp(self, index: int, layer: Layer, x: torch.Tensor, groups: tuple[Group, ...]) -> torch.Tensor:
        mlp = layer.mlp
        if isinstance(mlp, ExpertMlp):  # adapters do not reach experts
            return mlp(x, MIN_ROWS if self.fixed_order else 1)
        hidden = self.calls.gated(_product("gate_up", mlp.gate_up, index, x, groups))
        return _product("down", mlp.down, index, hidden, groups)


def _product(
    name: str, matrix: Linear, layer: int, x: torch.Tensor, groups: tuple[Group, ...]
) -> torch.Tensor:
    """A fused matrix's product, with what adapters add to their rows."""
    out = matrix(x)
    for group in groups:
        group.add(layer, name, x, out)
    return out
