"""Turns logits into tokens, row by row independent of the rest of the batch.

Greedy rows take the argmax. The others divide by temperature, keep the top k and the nucleus p, and
invert the cumulative distribution at the request's own random number (`sampling.Randomness`), so a
seed gives the same tokens alone, in a crowd, and after a preemption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from busbar.workloads.serving.sampling import Randomness, SamplingParams, TokenLogprob


@dataclass(frozen=True)
class Draw:
    """One row to sample."""

    params: SamplingParams
    randomness: Randomness
    index: int
    """How many tokens this request has sampled before."""
    counts: Mapping[int, int]
    """Sampled token → times; used by the penalties only."""
    forbidden: frozenset[int] = frozenset()
    """Tokens that may not come yet (end tokens, before min_tokens)."""


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token per row of `logits` [n, vocabulary] float32 (not changed)."""
    if any(d.params.edits_logits or d.forbidden for d in draws):
        logits = logits.clone()
        for row, draw in zip(logits, draws, strict=True):
            _edit(row, draw)
    chosen: list[int] = logits.argmax(-1).tolist()
    hot = [i for i, d in enumerate(draws) if not d.params.greedy]
    for sorts in (False, True):  # sorting is dear: only rows that need an order are sorted
        rows = [i for i in hot if _needs_order(draws[i].params) is sorts]
        if rows:
            drawn = _draw(logits[rows], [draws[i] for i in rows], sorts)
            for i, token in zip(rows, drawn, strict=True):
                chosen[i] = token
    return chosen


def logprobs_of(logits: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Log-probabilities of `token` and of the `top` likeliest, from one row of raw logits."""
    logs = torch.log_softmax(logits, -1)
    best = torch.topk(logs, min(top, len(logs))) if top else None
    likeliest = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best else ()
    return TokenLogprob(token, float(logs[token]), likeliest)


def _needs_order(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _edit(row: torch.Tensor, draw: Draw) -> None:
    params = draw.params
    if draw.counts and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(draw.counts), device=row.device)
        times = torch.tensor(list(draw.counts.values()), dtype=row.dtype, device=row.device)
        row[ids] -= params.presence_penalty + params.frequency_penalty * times
    for token, bias in params.logit_bias:
        row[token] += bias
    if draw.forbidden:
        row[torch.tensor(sorted(draw.forbidden), device=row.device)] = float("-inf")


def _draw(logits: torch.Tensor, draws: Sequence[Draw], sorts: bool) -> list[int]:
    device = logits.device
    temperature = torch.tensor([[d.params.temperature] for d in draws], device=device)
    point = torch.tensor([[d.randomness.uniform(d.index)] for d in draws], dtype=torch.float64, device=device)
    probabilities = torch.softmax(logits / temperature, -1).double()
    order: torch.Tensor | None = None
    if sorts:
        probabilities, order = probabilities.sort(stable=True, dim=-1, descending=True)
        rank = torch.arange(probabilities.shape[-1], device=device)
        k = torch.tensor([[d.params.top_k or probabilities.shape[-1]] for d in draws], device=device)
        probabilities = probabilities.masked_fill(rank >= k, 0.0)
        p = torch.tensor([[d.params.top_p] for d in draws], dtype=torch.float64, device=device)
        before = probabilities.cumsum(-1) - probabilities
        limit = p * probabilities.sum(-1, keepdim=True)
        probabilities = probabilities.masked_fill((before >= limit) & (rank > 0), 0.0)
    heap = probabilities.cumsum(-1)
    index = torch.searchsorted(heap, point * heap[:, -1:], right=True)
    index = index.clamp_(max=probabilities.shape[-1] - 1)
    if order is not None:
        index = order.gather(-1, index)
    return [int(i) for i in index.squeeze(-1).tolist()]
