"""Writes tensors as a checkpoint without a run: the bytes in blocks, as a capture delivers them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from busbar.workloads.machine.streams import CallerStream
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.layout import Layout
from busbar.workloads.training.state_file import Block


class GivenBlocks:
    """Blocks of a data section, one after the other, for any number of threads."""

    def __init__(self, parts: Iterable[torch.Tensor]) -> None:
        self._blocks = self._placed(parts)
        self._lock = threading.Lock()
        self.given_back = 0

    def _placed(self, parts: Iterable[torch.Tensor]) -> Iterator[Block]:
        start = 0
        for part in parts:
            yield Block(start, part, CallerStream().record(), part)
            start += part.numel()

    def take(self) -> Block | None:
        with self._lock:
            return next(self._blocks, None)

    def give_back(self, block: Block) -> None:
        with self._lock:
            self.given_back += 1


def write_state(
    folder: CheckpointFolder,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
    block: int = 4096,
) -> int:
    size = folder.write(step, layout_of(tensors), given_blocks(tensors, block), facts)
    folder.remove_old(step)
    return size


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    return Layout.of([(name, tensor.dtype, tensor.numel()) for name, tensor in tensors.items()])


def given_blocks(tensors: Mapping[str, torch.Tensor], block: int = 4096) -> GivenBlocks:
    data = torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors.values()])
    return GivenBlocks(data[start : start + block] for start in range(0, data.numel(), block))
