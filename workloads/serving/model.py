"""The decoder's forward pass over a ragged batch of tokens from many sequences.

One row per token. Everything but attention treats rows alike, in one product per matrix; attention
goes span by span through the paged cache. The last rows are padding (see `runner`): they keep the
number of rows at or above what makes the library's products independent of the batch, and they take
the scalar tail of vectorised element-wise loops.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        self._balance: tuple[torch.Tensor, torch.Tensor] | None = None

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
        self._balance = queries.to(self.dtype), (1 / keys).to(self.dtype)

    @property
    def stored_key_scale(self) -> torch.Tensor | None:
        """By what keys are multiplied when they are stored; None: nothing."""
        return None if self._balance is None else self._balance[1]

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
        cos = self._cos[batch.positions][:, None]
        sin = self._sin[batch.positions][:, None]
        last = len(self.weights.layers) - 1
        wanted = batch.sample_rows
        if batch.kept_rows is not None:
            wanted = torch.cat((wanted, batch.kept_rows))
        for index, layer in enumerate(self.weights.layers):
            x = x + self._attend(index, layer, self._norm(x, layer.input_norm), cos, sin, batch, cache)
            groups = () if batch.adapters is None else batch.adapters.groups
            if index == last:  # the rest is needed only where a token is sampled, or a state wanted
                x = x[wanted]
                groups = () if batch.adapters is None else batch.adapters.wanted
            x = x + self._mlp(index, layer, self._norm(x, layer.mlp_norm), groups)
        return self._norm(x, self.weights.norm)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.fixed_order or x.is_cuda:
            return F.rms_norm(x, (x.shape[-1],), weight, self.arch.norm_eps)
        # torch's own takes seven passes on a CPU; this takes three.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = length.square_().mul_(1 / x.shape[-1]).add_(self.arch.norm_eps).rsqrt_()
        normed: torch.Tensor = x * scale.to(x.dtype)
        return normed.mul_(weight)

    def _attend(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        cache: KvCache,
    ) -> torch.Tensor:
        arch, rows = self.arch, x.shape[0]
        q_width, kv_width = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        groups = () if batch.adapters is None else batch.adapters.groups
        qkv = _product("qkv", layer.qkv, index, x, groups)
        turned = qkv[:, : q_width + kv_width].view(rows, arch.heads + arch.kv_heads, arch.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = turned[:, : arch.heads], turned[:, arch.heads :]
            turned = torch.cat((self._norm(queries, layer.q_norm), self._norm(keys, layer.k_norm)), 1)
        half = arch.head_dim // 2
        swapped = torch.cat((turned[..., half:], turned[..., :half]), -1)
        turned = torch.addcmul(turned * cos, swapped, sin)
        queries, keys = turned[:, : arch.heads], turned[:, arch.heads :]
        if self._balance is None:
            queries = queries * self._scale
        else:
            queries, keys = queries * self._balance[0][index], keys * self._balance[1][index]
        values = qkv[:, q_width + kv_width :]
        cache.store(index, batch.slot_index, keys, values)
        if batch.plan is not None:
            values = values.view(rows, arch.kv_heads, arch.head_dim)
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
        hidden = gated(_product("gate_up", mlp.gate_up, index, x, groups))
        return _product("down", mlp.down, index, hidden, groups)


def _product(
    name: str, matrix: Linear, layer: int, x: torch.Tensor, groups: tuple[Group, ...]
) -> torch.Tensor:
    """A fused matrix's product, with what adapters add to their rows."""
    out = matrix(x)
    for group in groups:
        group.add(layer, name, x, out)
    return out
