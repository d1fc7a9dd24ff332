"""Attention within each document of a sequence that has several (`data.packing: within-documents`).

Documents are laid end to end (see `packing`), so a sequence may end one, have others whole, and begin another. Positions
begin anew at each document's separator, and attention sees nothing before it: a token is predicted from its own document
alone. The separator is the last thing that is learned of one document and the first that is seen of the next, so no label
crosses. transformers finds the documents by positions that do not rise by one, and makes one mask of a micro-batch,
[rows, 1, length, length], that all its blocks share; layers with a sliding window get theirs, within documents too.

torch makes a boolean mask additive in every layer, which keeps it for backward. Here it is made additive once, with the
same numbers (0 and -inf), so that a micro-batch has one: the bits are those of a plain loop that gives `position_ids`.

A micro-batch in which each row is of one document has no mask. Where ranks share sequences, attention is taken over
already (see `sequence_parallel`), and uses the mask of `mask_of`. Evaluation has one document in a sequence.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from busbar.workloads.training.errors import InvalidJob

FIELD, _REMEDY = "spec.engine.data.packing", "leave it out"
IMPLEMENTATION = "busbar_documents"  # its name in transformers' interfaces
_PROBE_TOKENS = 4  # of each of two documents
_CLOSE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}


def _additive(*args: Any, dtype: torch.dtype, **rest: Any) -> torch.Tensor | None:
    """As transformers' interface has it: a mask for queries, keys and values of this type."""
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(*args, **rest)
    return None if mask is None else _as_added(mask, dtype)


def _as_added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), float("-inf"))


def attach(model: nn.Module) -> nn.Module:
    """Has the blocks of a model share one mask. One whose attention is not torch's keeps its own way."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, sdpa_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, _additive)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = IMPLEMENTATION
    return model


def mask_of(positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """[rows, 1, length, length]: 0 where a token sees another one of its document, -inf elsewhere; None: each row has one.

    Args:
        positions: [rows, length].
    """
    from transformers import masking_utils

    rows, length = positions.shape
    found = masking_utils.find_packed_sequence_indices(positions)
    if found is None:
        return None
    own: Any = masking_utils.packed_sequence_compatibility_function
    sees = own(masking_utils.causal_mask_function, positions, found)
    mask = masking_utils.sdpa_mask(
        rows, length, length, mask_function=sees, allow_is_causal_skip=False, device=positions.device
    )
    assert mask is not None
    return _as_added(mask, dtype)


def refuse(config: Any) -> None:
    """Refuses a model, by its transformers config, that takes no positions. Raises InvalidJob."""
    from transformers import AutoModelForCausalLM

    mapping: Any = AutoModelForCausalLM._model_mapping
    kind: Any = mapping[type(config)]
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        raise InvalidJob(
            FIELD, f"within-documents is not possible: {kind.__name__} takes no positions", _REMEDY
        )


def two_documents(tokens: int, device: torch.device) -> torch.Tensor:
    """[1, tokens]: positions of two documents."""
    return (torch.arange(tokens, device=device) % -(-tokens // 2))[None]


def check(model: nn.Module, vocabulary: int) -> None:
    """Refuses a model that sees a document before another one, or has other logits of it than alone. Raises InvalidJob.

    The gradient of the last logits with respect to the embeddings of the document before is exactly zero where nothing of
    it is seen.
    """
    kept: list[torch.Tensor] = []  # the embeddings

    def keep(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[-1]

    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    device = table.weight.device
    tokens = torch.arange(2 * _PROBE_TOKENS, device=device)[None] % vocabulary
    places = two_documents(2 * _PROBE_TOKENS, device)
    was_training, problem, seen, off = model.training, "", 0.0, float("inf")
    try:
        with torch.no_grad():
            alone = _logits(model, tokens[:, _PROBE_TOKENS:], places[:, _PROBE_TOKENS:])
        hook = table.register_forward_hook(keep)
        try:
            both = _logits(model, tokens, places)
            (gradient,) = torch.autograd.grad(both[0, -1].square().sum(), kept[0])
        finally:
            hook.remove()
        seen = float(gradient[0, :_PROBE_TOKENS].abs().max())
        off = float((both.detach()[:, _PROBE_TOKENS:] - alone).abs().max() / alone.abs().max())
    except (RuntimeError, TypeError, ValueError, IndexError) as why:
        problem = f": {why!s:.200}"
    finally:
        model.train(was_training)
    if seen > 0 or not off <= _CLOSE.get(table.weight.dtype, 6e-2):
        what = "sees the document before" if seen > 0 else "computes something else beside another document"
        raise InvalidJob(
            FIELD,
            f"within-documents is not possible: a document {what} in {type(model).__name__}{problem}",
            _REMEDY,
        )


def _logits(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return found.float()
