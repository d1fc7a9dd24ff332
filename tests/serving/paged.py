"""A stand-in for torch's paged attention, which needs a GPU."""

from __future__ import annotations

from typing import Any

import torch


def paged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, **named: Any
) -> Any:
    """What torch documents of `varlen_attn` with a block table, for one query a sequence; the real one needs a GPU."""
    ends, no_keys, most_queries, longest = given
    tables, lengths = named.pop("block_table"), named.pop("seqused_k")
    assert (no_keys, most_queries) == (None, 1)
    assert lengths.max() <= longest
    assert named == {"scale": 1.0, "enable_gqa": query.shape[1] != key.shape[2]}
    assert tables.dtype == lengths.dtype == ends.dtype == torch.int32
    assert ends.tolist() == list(range(len(query) + 1))
    out = torch.empty_like(query)
    group = query.shape[1] // key.shape[2]
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        keys, values = (
            pages[table].reshape(-1, *pages.shape[2:])[:length].repeat_interleave(group, 1).double()
            for pages in (key, value)
        )
        weights = torch.softmax(torch.einsum("hd,thd->ht", query[row].double(), keys), -1)
        out[row] = torch.einsum("ht,thd->hd", weights, values).to(out.dtype)
    return out
