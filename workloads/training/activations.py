"""The bytes of activations of a micro-batch, measured by running it without data.

The model is built under torch's fake tensors (shapes, dtypes and devices, no memory), one forward and
backward runs, and every storage that appears and disappears is counted. So the plan knows the peak of *this*
architecture with *these* kernels before a byte is allocated. The same is done once more with the activations of the
blocks recomputed (`recompute`), and with their inputs on the host as well (`input_swap`). Scratch memory inside kernels is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from busbar.workloads.training.groups import blocks
from busbar.workloads.training.input_swap import InputSwap, at_once
from busbar.workloads.training.recompute import buffer_versions, recompute_blocks
from busbar.workloads.training.sequence_parallel import dividing
from busbar.workloads.training.tiled_loss import loss_of


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of storages created while active; `known` ones (weights, gradients) are not counted."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        for tensor in known:
            self._seen[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._meet(leaf.untyped_storage())
        return result

    def _meet(self, storage: Any) -> None:
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = True
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live -= size


def known_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Weights, gradients and buffers: what activations are counted beside."""
    found: list[torch.Tensor] = list(model.buffers())
    for parameter in model.parameters():
        found.append(parameter.data)
        if parameter.grad is not None:
            found.append(parameter.grad)
    return found


@contextmanager
def whole_sequences() -> Iterator[None]:
    """Let transformers know that a row is one sequence, which it cannot read from fake positions.

    It would make masks of (sequence x sequence) elements for each block then, which training with data does without.
    """
    from transformers import masking_utils

    found = masking_utils.find_packed_sequence_indices
    setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)  # noqa: B010
    try:
        yield
    finally:
        setattr(masking_utils, "find_packed_sequence_indices", found)  # noqa: B010


@dataclass(frozen=True)
class Peaks:
    """Bytes of activations of one micro-batch, each at its worst moment."""

    kept: int  # forward and backward
    recomputed: int | None  # the same with recomputation; None: this model cannot be run so
    evaluation: int  # 0: not asked for
    why_not: str = ""  # it cannot
    swapped: int | None = None  # as `recomputed`, with inputs of blocks on the host
    on_host: int = 0  # bytes of them


def peak_activation_bytes(
    build: Callable[[], torch.nn.Module],
    micro_batch: int,
    sequence: int,
    device: torch.device,
    evaluate: Callable[[torch.nn.Module, torch.Tensor], object] | None = None,
    *,
    backward: bool = True,
    documents: bool = False,
) -> tuple[torch.nn.Module, Peaks]:
    """The fake model (for its shapes), and the peaks of one micro-batch; without `backward`, of its forward pass alone, and
    with `documents` of sequences of several, which are kept apart."""
    sequences = nullcontext if documents else whole_sequences
    with FakeTensorMode(allow_non_fake_inputs=True), sequences(), device:
        model = build()
        model.train()
        for parameter in model.parameters():
            if parameter.requires_grad and backward:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        tokens = torch.zeros((micro_batch, sequence), dtype=torch.long, device=device)
        versions = buffer_versions(model)
        places = torch.zeros_like(tokens) if documents else None
        kept = _worst(
            lambda: (_peak_of_training if backward else _peak_of_losses)(model, tokens, places), documents
        )
        changed = versions != buffer_versions(model)
        evaluation = 0
        if evaluate is not None:
            model.eval()
            counting = LiveBytes([*known_tensors(model), tokens])
            with torch.no_grad(), whole_sequences(), counting as count_evaluation:
                evaluate(model, tokens)
            evaluation = count_evaluation.peak
            model.train()
        if not backward:
            return model, Peaks(kept, None, evaluation, "there is no backward pass")
        if not blocks(model):
            return model, Peaks(kept, None, evaluation, "it has no list of blocks")
        if changed:
            return model, Peaks(kept, None, evaluation, "a forward pass changes buffers of its blocks")
        swap = at_once(len(blocks(model)) - 1)
        try:
            with _recomputing(model):
                recomputed = _worst(lambda: _peak_of_training(model, tokens, places), documents)
            with _recomputing(model, swap):
                swapped = _worst(lambda: _peak_of_training(model, tokens, places, swap.room), documents)
        except Exception as problem:  # the model's own code, which may not bear a second forward pass
            return model, Peaks(kept, None, evaluation, f"{type(problem).__name__}: {problem!s:.200}")
    return model, Peaks(kept, recomputed, evaluation, "", swapped, swap.used)


def _worst(measure: Callable[[], int], documents: bool) -> int:
    """With `documents` also of a micro-batch whose rows are of one each: it has no mask, and attention may keep more then."""
    found = measure()
    if documents:
        with whole_sequences():
            found = max(found, measure())
    return found


@contextmanager
def _recomputing(model: torch.nn.Module, swap: InputSwap | None = None) -> Iterator[None]:
    forwards = [block.forward for block in blocks(model)]
    recompute_blocks(model, swap)
    try:
        yield
    finally:
        for block, forward in zip(blocks(model), forwards, strict=True):
            setattr(block, "forward", forward)  # noqa: B010


def _peak_of_losses(model: torch.nn.Module, tokens: torch.Tensor, places: torch.Tensor | None) -> int:
    model.eval()
    with torch.no_grad(), LiveBytes([*known_tensors(model), tokens]) as count:
        loss_of(model, tokens.clone(), tokens.clone(), None if places is None else places.clone()) * 1.0
    model.train()
    peak: int = count.peak
    return peak


def _peak_of_training(
    model: torch.nn.Module, tokens: torch.Tensor, places: torch.Tensor | None, *others: torch.Tensor
) -> int:
    with LiveBytes([*known_tensors(model), tokens, *others]) as count:
        there, wanted = tokens.clone(), tokens.clone()  # as they are brought to a GPU
        own = None if places is None else places.clone()
        with dividing(model):
            loss = loss_of(model, there, wanted, own) * 1.0
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
    peak: int = count.peak
    return peak
