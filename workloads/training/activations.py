"""The bytes of activations of a micro-batch, measured by running it without data.

The model is built under torch's fake tensors (shapes, dtypes and devices, no memory), one forward and
backward runs, and every storage that appears and disappears is counted. So the plan knows the peak of *this*
architecture with *these* kernels before a byte is allocated. Scratch memory inside kernels is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


def peak_activation_bytes(
    build: Callable[[], torch.nn.Module],
    micro_batch: int,
    sequence: int,
    device: torch.device,
    evaluate: Callable[[torch.nn.Module, torch.Tensor], object] | None = None,
) -> tuple[torch.nn.Module, int, int]:
    """The fake model (for its shapes), and the peaks of one micro-batch: forward and backward, and evaluation."""
    with FakeTensorMode(allow_non_fake_inputs=True), device:
        model = build()
        model.train()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        tokens = torch.zeros((micro_batch, sequence), dtype=torch.long, device=device)
        with LiveBytes(known_tensors(model)) as count:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            del loss
        evaluation = 0
        if evaluate is not None:
            model.eval()
            with torch.no_grad(), LiveBytes([*known_tensors(model), tokens]) as count_evaluation:
                evaluate(model, tokens)
            evaluation = count_evaluation.peak
    return model, count.peak, evaluation
