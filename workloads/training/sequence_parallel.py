"""Sequences of which each rank has a part: all ranks of a group compute one micro-batch together.

Every layer but attention looks at one token at a time, so a rank computes them for its part of the tokens alone. Attention
looks at all tokens and at one head at a time. So before it the ranks exchange parts: each gets all tokens of its share of
the heads; and after it each gets back all heads of its share of the tokens.

    queries, keys, values [rows, heads, tokens / n, width]  ->  [rows, heads / n, tokens, width]
    result                [rows, tokens, heads / n, width]  ->  [rows, tokens / n, heads, width]

What a rank hands over for one exchange is (n - 1) / n of its own part, so it stays the same when ranks and sequence grow
together. Backward exchanges gradients the other way round. Source: "DeepSpeed Ulysses" (arXiv:2309.14509).

A rank's loss is that of its tokens over the number of all that are learned, so gradients and losses of the ranks are added
up like those of other micro-batches. They are those of one rank up to rounding.

Attention is replaced by transformers' interface for it; where documents are kept apart (see `documents`), it has the mask of
whole sequences, as each rank has all tokens of its heads. What mixes tokens otherwise is refused (`refuse`, `check`).
Outside `dividing`, in evaluation and export, a model with parts computes whole sequences by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from busbar.workloads.training.division import SEQUENCE_FIELD, divide_sequence
from busbar.workloads.training.documents import mask_of, two_documents
from busbar.workloads.training.errors import InvalidJob

_REMEDY = "leave it out"
IMPLEMENTATION = "busbar_sequence_parallel"  # its name in transformers' interface
_PROBE_TOKENS = 4  # of each rank
_CLOSE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}
_ATTRIBUTE = "_busbar_sequence_part"


class Exchange(Protocol):
    """What a group of ranks does together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_to_all(self, parts: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill `parts` with this rank's part of every rank's `whole`, in the order of ranks."""


class Imagined:
    """A group of which no other rank is there: for shapes, under fake tensors."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def all_to_all(self, parts: torch.Tensor, whole: torch.Tensor) -> None:
        parts.copy_(whole)


class SequencePart:
    """This rank's part of each sequence."""

    def __init__(self, group: Exchange) -> None:
        self.group, self.active = group, False
        self.replaced: list[tuple[Any, Any]] = []  # configs, and the attention that they named
        self.sent_bytes = 0  # handed over for other ranks, by this one
        self.largest_bytes = 0  # of what was exchanged at once
        self.positions: torch.Tensor | None = None  # of a micro-batch with documents, [rows, length]
        self._mask: torch.Tensor | None = None  # of these
        self._room: torch.Tensor | None = None  # None: of its own each time

    def take(self, room: torch.Tensor) -> None:
        """Bytes for twice `largest_bytes`, in which exchanges come and go from now on."""
        self._room = room

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """Its part of [rows, length]."""
        each = tokens.shape[1] // self.group.size
        return tokens[:, self.group.rank * each :][:, :each]

    def inputs(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """What the model is given of [rows, length]; with `positions`, of documents that are kept apart."""
        self.positions, self._mask = positions, None
        places = positions
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return {"input_ids": self.own(tokens), "position_ids": self.own(places)}

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Of whole sequences, which all blocks share; None: attention is causal and nothing more."""
        if self.positions is not None and self._mask is None:
            self._mask = mask_of(self.positions, dtype)
            self.positions = self.positions if self._mask is not None else None
        return self._mask

    def forget(self) -> None:
        """The micro-batch is over."""
        self.positions = self._mask = None

    def exchange(self, given: torch.Tensor, split: int, join: int) -> torch.Tensor:
        """Cut `given` along one dimension into a part for each rank, and join what they send along another."""
        result: torch.Tensor = _Exchanged.apply(given, self, split, join)
        return result

    def send(self, given: torch.Tensor, split: int, join: int) -> torch.Tensor:
        """The same without a gradient."""
        size = given.numel() * given.itemsize
        self.largest_bytes = max(self.largest_bytes, size)
        self.sent_bytes += size * (self.group.size - 1) // self.group.size
        with _disable_current_modes():  # what comes and goes is planned as exchange, and no activation
            chunks = given.chunk(self.group.size, split)
            if self._room is None:
                going = torch.stack(chunks)
                coming = torch.empty_like(going)
            else:
                shape = self.group.size, *chunks[0].shape
                going, coming = (half[:size].view(given.dtype).view(shape) for half in self._room.view(2, -1))
                torch.stack(chunks, out=going)
            self.group.all_to_all(coming.view(-1), going.view(-1))
            parts = coming.unbind()
        return torch.cat(parts, join)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, part: SequencePart, split: int, join: int) -> torch.Tensor:
        ctx.part, ctx.split, ctx.join = part, split, join
        return part.send(given, split, join)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.part.send(gradients[0], ctx.join, ctx.split), None, None, None


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' interface has it: queries, keys and values [rows, heads, tokens, width]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    compute: Any = sdpa_attention_forward
    part = _part(module)
    if part is None or not part.active:
        found: tuple[torch.Tensor, None] = compute(module, query, key, value, attention_mask, **rest)
        return found
    query, key, value = (part.exchange(each, 1, 2) for each in (query, key, value))
    result, _ = compute(module, query, key, value, part.mask(query.dtype), **rest)
    return part.exchange(result, 1, 2), None


def attach(model: nn.Module, part: SequencePart) -> nn.Module:
    """Has the model compute parts of sequences in `dividing`."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)
    for module in model.modules():
        object.__setattr__(module, _ATTRIBUTE, part)
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", IMPLEMENTATION) != IMPLEMENTATION:
            part.replaced.append((config, config._attn_implementation))
            config._attn_implementation = IMPLEMENTATION
    return model


def _part(module: nn.Module) -> SequencePart | None:
    found: SequencePart | None = module.__dict__.get(_ATTRIBUTE)
    return found


def exchanged_bytes(model: nn.Module) -> int:
    """The most that was exchanged at once so far."""
    part = _part(model)
    return 0 if part is None else part.largest_bytes


def active_part(model: nn.Module) -> SequencePart | None:
    """Of a model that computes parts of sequences now."""
    part = _part(model)
    return part if part is not None and part.active else None


@contextmanager
def dividing(model: nn.Module) -> Iterator[None]:
    """Forward and backward passes meanwhile are of this rank's part of each sequence, if the model has parts."""
    part = _part(model)
    if part is None:
        yield
        return
    part.active = True
    try:
        yield
    finally:
        part.active = False
        part.forget()


def refuse(config: Any, length: int, size: int) -> None:
    """Refuses a model, by its transformers config, or a length that `size` ranks cannot share. Raises InvalidJob."""
    said = config.get_text_config()
    heads: int = getattr(said, "num_attention_heads", None) or 0
    divide_sequence(length, heads, getattr(said, "num_key_value_heads", None) or heads, size)
    kinds = sorted({*(getattr(said, "layer_types", None) or ())} - {"full_attention"})
    window = getattr(said, "sliding_window", None)
    windowed = window is not None and window < length and getattr(said, "use_sliding_window", True)
    if kinds or windowed:
        what = f"layers of {', '.join(kinds)}" if kinds else f"a sliding window of {window} tokens"
        raise InvalidJob(
            SEQUENCE_FIELD, f"is not possible with this {said.model_type} model: it has {what}", _REMEDY
        )


def check(model: nn.Module, vocabulary: int, length: int, agree: Any, *, documents: bool = False) -> None:
    """Refuses a model that has other logits of a few tokens in parts than as a whole; all ranks call it.

    Args:
        documents: these are two documents, which are kept apart.
        agree: gives the largest of each number over the ranks (`Ranks.most`).

    Raises:
        InvalidJob: alike on all ranks.
    """
    part = _part(model)
    if part is None:
        return
    parameter = next(model.parameters())
    count = min(length, _PROBE_TOKENS * part.group.size)
    tokens = torch.arange(count, device=parameter.device)[None] % vocabulary
    given = {"input_ids": tokens}
    if documents:
        given["position_ids"] = two_documents(count, parameter.device)
    was_training, off, problem = model.training, float("inf"), ""
    try:
        with torch.no_grad():
            with as_it_was(model):
                whole = part.own(_logits(model, given)[..., 0])  # enough to see a difference
            with dividing(model):
                own = _logits(model, part.inputs(tokens, given.get("position_ids")))[..., 0]
            off = float((own - whole).abs().max() / whole.abs().max())
    except (RuntimeError, TypeError, ValueError) as why:
        problem = f": {why!s:.200}"
    finally:
        model.train(was_training)
        part.sent_bytes = part.largest_bytes = 0
    is_close = off <= _CLOSE.get(parameter.dtype, 6e-2)
    if agree([int(not is_close)])[0]:
        raise InvalidJob(
            SEQUENCE_FIELD,
            f"is not possible: {type(model).__name__} gives something else for parts of a few tokens than for all of them"
            f"{problem}",
            _REMEDY,
        )


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """With the attention that the model had."""
    part = _part(model)
    if part is None:
        yield
        return
    for config, name in part.replaced:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, _ in part.replaced:
            config._attn_implementation = IMPLEMENTATION


def _logits(model: nn.Module, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = model.eval()(**given, use_cache=False).logits
    return found.float()
